import asyncio
import math
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import config, errors
from dynamo.launch import allocation
from dynamo.planner import config as planner_config
from dynamo.planner import profile_sweep, profiling
from dynamo.planner.forecast import RequestShape
from dynamo.planner.policies import Targets
from dynamo.planner.predictive_policy import Headroom, Sizing
from dynamo.planner.profile import DecodePoint, DecodeSurface, PrefillCurve, WorkerProfile
from dynamo.planner.profile_sweep import Cell, CellResult, EngineSize
from dynamo.runtime import component
from dynamo.worker import engines
from planner_cases import make_profile

SIZE = EngineSize(num_kv_tokens=100_000, max_num_seqs=64, context_length=8192)


@given(
    st.integers(5000, 500_000), st.integers(1, 256), st.integers(1, 20_000), st.integers(2, 2000)
)
def test_cells_fit_the_engine_and_are_unique(num_kv_tokens, max_num_seqs, isl, osl):
    size = EngineSize(num_kv_tokens=num_kv_tokens, max_num_seqs=max_num_seqs, context_length=4096)
    cells = profile_sweep.plan_cells(size, isl, osl)

    assert len(set(cells)) == len(cells)
    assert {cell.kind for cell in cells} >= {"prefill", "decode"}
    assert all(cell.concurrency <= max_num_seqs for cell in cells)
    assert all(cell.context + osl < 4096 or cell.context == 16 for cell in cells)


def test_corners_of_decode_come_first():
    decode = [c for c in profile_sweep.plan_cells(SIZE, 1000, 50) if c.kind == "decode"]

    assert decode[0].concurrency == 1
    assert decode[1].context == max(cell.context for cell in decode)


def test_largest_cell_of_the_middle_length_is_also_measured_with_prompts_that_begin_alike():
    cells = profile_sweep.plan_cells(SIZE, 1000, 50)
    middle = [cell for cell in cells if cell.kind == "decode" and cell.context == 1000]

    assert cells[-1] == Cell("shared", 1000, max(cell.concurrency for cell in middle))
    assert cells[-1].num_common == 750
    assert [cell for cell in cells if cell.num_common] == cells[-1:]


def test_engine_of_one_sequence_has_no_prompts_that_begin_alike():
    size = EngineSize(num_kv_tokens=100_000, max_num_seqs=1, context_length=8192)

    assert not [cell for cell in profile_sweep.plan_cells(size, 1000, 50) if cell.kind == "shared"]


def test_larger_cell_than_a_failed_one_is_not_tried():
    failed = [CellResult(cell=Cell("decode", 1000, 8), failure="no memory")]

    assert profile_sweep.must_fail(Cell("decode", 1000, 16), failed)
    assert profile_sweep.must_fail(Cell("decode", 2000, 8), failed)
    assert not profile_sweep.must_fail(Cell("decode", 500, 16), failed)
    assert not profile_sweep.must_fail(Cell("prefill", 2000), failed)


def lose(*cell):
    return CellResult(cell=Cell(*cell), failure="killed", is_worker_lost=True)


def test_lost_worker_costs_one_cell_and_two_of_them_all_larger_cells():
    larger = Cell("decode", 2000, 16)

    assert not profile_sweep.must_fail(larger, [lose("decode", 1000, 8)])
    assert profile_sweep.must_fail(larger, [lose("decode", 1000, 8), lose("decode", 2000, 8)])
    assert not profile_sweep.must_fail(larger, [lose("decode", 1000, 8), lose("decode", 4000, 8)])


def test_failure_below_a_measured_cell_says_nothing_of_larger_ones():
    results = [CellResult(cell=Cell("decode", 1000, 8), failure="no answer")]
    results.append(CellResult(cell=Cell("decode", 2000, 32), seconds=0.1))

    assert not profile_sweep.must_fail(Cell("decode", 2000, 16), results)


def measure(*cells):
    return [CellResult(cell=Cell(*cell), seconds=0.1) for cell in cells]


def test_recommendation_needs_prompts_around_the_request_and_decoding_of_several_sequences():
    cells = profile_sweep.plan_cells(SIZE, 1000, 50)
    prefill = measure(("prefill", 500), ("prefill", 2000))
    single = measure(*(("decode", context, 1) for context in (250, 1000, 2000)))
    several = measure(("decode", 1000, 8))

    assert profile_sweep.find_missing(prefill + single[:2] + several, cells, 1000) == []
    assert profile_sweep.find_missing(prefill[:1] + single, cells, 1000) == [
        "a prompt of 1000 tokens or more",
        "the decoding of several sequences",
    ]
    assert profile_sweep.find_missing([lose("prefill", 500), *several], cells, 1000) == [
        "a prompt of 1000 tokens or fewer",
        "a prompt of 1000 tokens or more",
        "2 more decode cells",
    ]


def test_engine_of_one_sequence_and_a_short_context_can_have_a_recommendation():
    size = EngineSize(num_kv_tokens=1000, max_num_seqs=1, context_length=1000)
    cells = profile_sweep.plan_cells(size, 5000, 50)
    results = [CellResult(cell=cell, seconds=0.1) for cell in cells]

    assert profile_sweep.find_missing(results, cells, 5000) == []


def test_failed_cell_costs_that_cell_only():
    results = [
        CellResult(cell=Cell("prefill", 1000), seconds=0.1),
        CellResult(cell=Cell("prefill", 2000), failure="no memory"),
        CellResult(cell=Cell("decode", 1000, 10), seconds=0.02),
    ]
    profile = profile_sweep.make_profile(results, SIZE)

    assert profile.prefill.isl == (1000,)
    assert profile.decode.points[0].kv_usage == pytest.approx(10 * 1024 / 100_000)
    assert profile.decode.points[0].throughput == pytest.approx(500)


def test_median_of_what_was_measured_of_a_cell_counts():
    prefill, decode = Cell("prefill", 1000), Cell("decode", 1000, 10)
    results = [CellResult(cell=prefill, seconds=s) for s in (0.4, 0.1, 0.2)]
    results += [CellResult(cell=decode, seconds=s) for s in (0.02, 0.09)]
    results += [CellResult(cell=decode, failure="no memory")]
    profile = profile_sweep.make_profile(results, SIZE)

    assert (profile.prefill.isl, profile.prefill.ttft_s) == ((1000,), (0.2,))
    assert [point.itl_s for point in profile.decode.points] == [pytest.approx(0.055)]


def test_decode_cell_has_the_context_with_which_it_was_measured():
    """A profile for long answers promised the time of long sequences from that of short ones."""
    client = StreamedClient(0.02)
    lengths = []

    async def stream(prompt, num_tokens):
        times = await StreamedClient._stream(client, prompt, num_tokens)
        lengths.append(len(prompt) + num_tokens / 2)
        return times

    client._stream = stream
    cell = Cell("decode", 250)
    results = [*measure(("prefill", 100)), CellResult(cell=cell, seconds=1.0)]
    asyncio.run(client.measure(cell))

    assert {p.context for p in profile_sweep.make_profile(results, SIZE).decode.points} == {
        *lengths
    }


@pytest.mark.parametrize(
    ("read_tokens", "cost"),
    [(3490, 0.0), (2000, 0.0), (5177.5, 0.25), (10_240, 1.0), (20_000, 1.0)],
)
def test_repeated_tokens_cost_what_the_shared_cell_took_beyond_common_ones(read_tokens, cost):
    """A step takes a microsecond for each token: 10 sequences of 1,024 with 750 in common have 3,490."""
    results = [CellResult(cell=Cell("prefill", 1000), seconds=0.1)]
    results += [
        CellResult(cell=Cell("decode", context, number), seconds=1e-6 * number * (context + 24))
        for context in (250, 1000)
        for number in (1, 10)
    ]
    results.append(CellResult(cell=Cell("shared", 1000, 10), seconds=1e-6 * read_tokens))
    profile = profile_sweep.make_profile(results, SIZE)

    assert len(profile.decode.points) == 4
    assert profile.decode.repeated_cost == pytest.approx(cost)
    assert profile.decode.scaled(2.0).repeated_cost == pytest.approx(cost)


def test_no_profile_without_a_decode_cell():
    results = [CellResult(cell=Cell("prefill", 1000), seconds=0.1)]

    assert profile_sweep.make_profile(results, SIZE) is None


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_recommendation_uses_all_workers_and_no_more(num_workers):
    choice = profile_sweep.recommend(
        make_profile(), isl=1000, osl=100, targets=Targets(), num_workers=num_workers
    )

    assert choice.num_prefill + choice.num_decode == num_workers
    assert choice.requests_per_s > 0


@pytest.mark.parametrize("osl", [10, 100])
def test_workers_of_a_recommendation_hold_the_targets_at_its_rate(osl):
    """At all that prefill workers can compute, a queue before them grows without end."""
    profile = make_profile()
    choice = profile_sweep.recommend(profile, isl=1000, osl=osl, targets=Targets(), num_workers=4)
    targets, shape = (
        Targets(mode=choice.mode),
        RequestShape(isl=1000, osl=osl, context=1000 + osl / 2),
    )
    needed = Sizing(profile, targets, Headroom(), shape, burstiness=1.0).workers(
        choice.requests_per_s
    )

    assert needed.prefill <= choice.num_prefill
    assert needed.decode <= choice.num_decode


def test_recommendation_says_which_target_cannot_be_met():
    choice = profile_sweep.recommend(
        make_profile(), isl=1000, osl=100, targets=Targets(ttft_s=0.01), num_workers=2
    )

    assert "TTFT" in choice.unreachable


@pytest.mark.parametrize(
    ("flags", "num_gpus"),
    [
        ("", 1),
        ("--max-num-seqs 64 --tensor-parallel-size 4", 4),
        ("-tp=2 -pp 2 --data-parallel-size=2", 8),
        ("--tensor_parallel_size 2 --tp 4", 4),
        ("--tp-size 8 --dp-size 8 --enable-dp-attention", 8),
    ],
)
def test_gpus_of_a_worker_follow_from_its_parallel_sizes(flags, num_gpus):
    assert profile_sweep.count_gpus(flags.split()) == num_gpus


@pytest.mark.parametrize("flags", ["--tp 0", "--tp two"])
def test_parallel_size_that_is_no_number_above_zero_is_refused(flags):
    with pytest.raises(errors.ConfigError, match=flags):
        profile_sweep.count_gpus(flags.split())


def test_throughput_of_four_gpus_is_that_of_the_published_profile():
    """Published for four GPUs: 48.37 ms and 15,505 tokens/s per GPU in prefill, 4.83 ms and 51.22 in decode."""
    size = EngineSize(num_kv_tokens=900_000, max_num_seqs=64, context_length=8192, num_gpus=4)
    results = [
        CellResult(cell=Cell("prefill", 3000), seconds=0.04837),
        CellResult(cell=Cell("decode", 3000, 1), seconds=0.00483),
    ]
    profile = profile_sweep.make_profile(results, size)

    assert profile.prefill.throughput == (pytest.approx(15_505, abs=1),)
    assert profile.decode.points[0].throughput == pytest.approx(51.22, rel=0.02)


def test_throughput_of_a_gpu_gives_the_published_requests_per_second():
    """Published for prompts of 3,000 tokens: 110,893 tokens/s of a GPU are 36.96 requests/s."""
    curve = PrefillCurve(isl=(3000.0,), ttft_s=(0.027,), throughput=(110_893.0,))
    decode = DecodeSurface([DecodePoint(0.1, 3150.0, 0.005, 1e6)], max_kv_tokens=945_029)
    shape = RequestShape(isl=3000, osl=300, context=3150)
    profile = WorkerProfile(prefill=curve, decode=decode)
    sizing = Sizing(profile, Targets(mode="disagg"), Headroom(), shape, burstiness=1.0)

    assert sizing.prompts_per_s == pytest.approx(36.96, abs=0.005)


def test_recommendation_counts_the_gpus_of_a_worker():
    cells = profile_sweep.plan_cells(SIZE, 1000, 100)
    results = [CellResult(cell=cell, seconds=cell.context * 1e-5) for cell in cells]

    def recommend(num_gpus):
        size = msgspec.structs.replace(SIZE, num_gpus=num_gpus)
        profile = profile_sweep.make_profile(results, size)
        return profile_sweep.recommend(
            profile, isl=1000, osl=100, targets=Targets(), num_workers=2, num_gpus=num_gpus
        )

    of_one, of_four = recommend(1), recommend(4)
    assert of_four.gpus_per_worker == 4
    assert of_four.requests_per_s == pytest.approx(of_one.requests_per_s)
    assert of_one.tokens_per_s_per_gpu == pytest.approx(of_one.requests_per_s * 100 / 2)
    assert of_four.tokens_per_s_per_gpu == pytest.approx(of_one.tokens_per_s_per_gpu / 4)


def test_request_longer_than_the_context_cannot_be_met():
    sizes = {"isl": 3000, "osl": 150, "targets": Targets(), "num_workers": 1}

    short = profile_sweep.recommend(make_profile(), **sizes, context_length=2048)
    long = profile_sweep.recommend(make_profile(), **sizes, context_length=3150)

    assert short.unreachable == "a request of 3000+150 tokens: a worker takes 2048 at most"
    assert "a request of" not in long.unreachable


@pytest.mark.parametrize(
    ("num_devices", "backend", "num_gpus", "num_workers"),
    [
        (8, "vllm", 2, 4),
        (2, "vllm", 4, 1),
        (0, "native", 1, 1),
        (0, "mocker", 1, 16),
    ],
)
def test_recommendation_has_the_workers_that_fit_the_machine(
    num_devices, backend, num_gpus, num_workers
):
    machine = allocation.Allocation(tuple(range(16)), ("0",) * num_devices)

    assert profiling.count_workers(machine, backend, num_gpus) == num_workers


def test_serve_line_gives_each_worker_its_gpus():
    choice = profile_sweep.recommend(
        make_profile(), isl=3000, osl=150, targets=Targets(), num_workers=2, num_gpus=4
    )
    settings = profiling.ProfilerConfig(backend="vllm", model="m", worker_flags="-tp 4")
    text = profiling.describe(choice, settings, has_gpus=True)

    assert "per GPU, with 4 GPUs per worker" in text
    assert text.endswith(" --devices-per-worker 4 --worker-flags '-tp 4'\n")
    assert "--devices-per-worker" not in profiling.describe(choice, settings, has_gpus=False)


def test_recommendation_has_no_exponents():
    choice = profile_sweep.recommend(
        make_profile(), isl=3000, osl=150, targets=Targets(), num_workers=2
    )
    quick = msgspec.structs.replace(choice, requests_per_s=1234.5, tokens_per_s_per_gpu=98765.4)
    text = profiling.describe(quick, profiling.ProfilerConfig(), has_gpus=False)

    assert "1234.5 requests/s of 3000+150 tokens, 98765.4 output tokens/s" in text


@pytest.mark.parametrize("flag", ["--output", "--deployment"])
def test_folder_that_cannot_be_made_is_refused_before_anything_is_measured(flag, tmp_path, capsys):
    (tmp_path / "file").touch()
    argv = ["--output", str(tmp_path / "results"), flag, str(tmp_path / "file" / "x" / "y")]

    assert profiling.main(argv) == 2
    assert f"{flag} {tmp_path / 'file' / 'x'}" in capsys.readouterr().err


def make_sweep(folder):
    settings = profiling.ProfilerConfig(output=str(folder))
    return profiling._Sweep(settings, Targets(), guardian=None)


class Folders:
    """A guard that only makes folders."""

    def __init__(self, folder):
        self.folder = folder

    def make_folder(self, prefix):
        return self.folder / prefix


def test_profiled_worker_joins_no_deployment_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "etcd")
    monkeypatch.setenv("NATS_SERVER", "nats://production:4222")
    monkeypatch.setenv("DYN_TLS_CERT_PATH", "cert.pem")
    sweep = profiling._Sweep(
        profiling.ProfilerConfig(output=str(tmp_path)), Targets(), Folders(tmp_path)
    )
    for spec in sweep._specs():
        settings = config.load(component.RuntimeConfig, prog="", argv=(), environ=spec.environ)
        planes = (settings.discovery_backend, settings.request_plane, settings.event_plane)

        assert planes == ("file", "tcp", "zmq")
        assert spec.environ["DYN_FILE_KV"] == str(tmp_path / "dynamo-profile-" / "discovery")
        assert "DYN_TLS_CERT_PATH" not in spec.environ  # of a frontend that is asked over HTTP


def test_profiled_worker_has_the_name_that_is_asked_whatever_its_flags_say(tmp_path):
    settings = profiling.ProfilerConfig(
        output=str(tmp_path), worker_flags="--model-name other --max-num-seqs 4"
    )
    _, worker = profiling._Sweep(settings, Targets(), Folders(tmp_path))._specs()

    assert worker.argv[-4:] == ["--max-num-seqs", "4", "--model-name", "profiled"]


def test_unknown_backend_is_refused_with_those_that_there_are(tmp_path, capsys):
    assert profiling.main(["--backend", "zz", "--output", str(tmp_path / "x")]) == 2
    assert "--backend: expected one of native, mocker, vllm" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert typing.get_args(planner_config.Backend) == tuple(engines.KIND_BY_NAME)


@pytest.mark.parametrize("num_cut", [1, 10, 60])
def test_result_after_a_line_that_was_cut_off_is_read_by_the_next_run(num_cut, tmp_path):
    first, second, third = measure(("prefill", 100), ("prefill", 200), ("prefill", 300))
    for result in (first, second):
        make_sweep(tmp_path)._append(result)
    file = tmp_path / "cells.jsonl"
    file.write_bytes(file.read_bytes()[:-num_cut])
    kept = make_sweep(tmp_path)._results
    make_sweep(tmp_path)._append(third)

    assert kept == [first, second][: 2 if num_cut == 1 else 1]
    assert make_sweep(tmp_path)._results == [*kept, third]


def test_line_that_ends_within_a_character_is_left_out(tmp_path):
    (tmp_path / "cells.jsonl").write_bytes('["é'.encode()[:-1] + b'", {}]')

    assert make_sweep(tmp_path)._results == []


def test_results_that_cannot_be_read_or_written_are_said_in_a_sentence(tmp_path, monkeypatch):
    async def measure_cell(self, pool, client, cell):
        return CellResult(cell=cell, seconds=0.1)

    monkeypatch.setattr(profiling._Sweep, "_measure_cell", measure_cell)
    folder = tmp_path / "results"
    sweep = make_sweep(folder)
    folder.rmdir()
    with pytest.raises(errors.ConfigError, match=r"cannot be written to: .* goes on after the"):
        asyncio.run(sweep._measure(None, SIZE, deadline=math.inf))
    (folder / "cells.jsonl").mkdir(parents=True)
    with pytest.raises(errors.ConfigError, match=r"--output: .*cells.jsonl"):
        make_sweep(folder)


class Clock:
    time = 0.0

    def now(self):
        return self.time


class StreamedClient(profile_sweep.ProfileClient):
    """A client of an engine whose steps all take `step_s`, on the engine's clock."""

    def __init__(self, step_s):
        self.clock, self.step_s, self.num_streams = Clock(), step_s, 0
        super().__init__("127.0.0.1", 1, "m", self.clock)

    async def _stream(self, prompt, num_tokens):
        self.num_streams += 1
        times = [self.clock.time + step * self.step_s for step in range(num_tokens + 1)]
        self.clock.time = times[-1]
        return times


@pytest.mark.parametrize(
    ("kind", "step_s", "num_streams"),
    [("prefill", 0.03, 17), ("prefill", 1.0, 3), ("decode", 0.002, 6), ("decode", 0.1, 1)],
)
def test_quick_cell_is_measured_for_half_a_second(kind, step_s, num_streams):
    client = StreamedClient(step_s)

    assert asyncio.run(client.measure(Cell(kind, 100))) == pytest.approx(step_s)
    assert client.num_streams == num_streams


def test_prompts_of_a_shared_cell_begin_alike_and_the_first_comes_alone():
    client = StreamedClient(0.1)
    prompts = []

    async def stream(prompt, num_tokens):
        prompts.append((prompt, num_tokens))
        client.clock.time += 1.0  # one round is enough
        return [0.0, *(1.0 + 0.1 * step for step in range(num_tokens))]

    client._stream = stream
    asyncio.run(client.measure(Cell("shared", 100, 3)))
    (first, num_first), *others = prompts

    assert num_first == 1
    assert all(prompt[:75] == first[:75] for prompt, _ in others)
    assert len({tuple(prompt) for prompt, _ in others}) == 3


class SilentTokensClient(StreamedClient):
    """The same of an engine where only every third token completes a text."""

    async def _stream(self, prompt, num_tokens):
        sent_at, *times = await super()._stream(prompt, num_tokens)
        return [sent_at, *times[::3], times[-1]]


def test_tokens_without_text_count_for_the_time_between_tokens():
    seconds = asyncio.run(SilentTokensClient(0.02).measure(Cell("decode", 100)))

    assert seconds == pytest.approx(0.02, rel=0.05)
