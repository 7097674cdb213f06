"""Prefill workers and decode workers as processes of their own: same answers, and nothing lost when one goes."""

import concurrent.futures
import contextlib
import shutil
import signal

import httpx
import pytest
from deployment import MODEL
from split import ALONE, ALWAYS, Split, prefills, prompt, until_idle

from checkpoints import make_checkpoint
from dynamo.worker import model_source
from transfer_peer import NIXL
from waiting import PATIENT_S, eventually

HOLD_S = 3.0
SHORT_HOLD = ("--kv-hold-s", str(HOLD_S))
# Of many prompts the last ones are computed late on a busy machine, and a worker that leaves has to wait for them.
LATE_PREFILLS = ("--prefill-timeout-s", str(PATIENT_S))
LATE_READS = ("--kv-hold-s", str(PATIENT_S))
LATE_EXIT = ("--graceful-shutdown-timeout", str(PATIENT_S))


@pytest.fixture
def split(deployment):
    return Split(deployment)


@pytest.fixture
def long_model(tmp_path):
    """The built-in model's tokenizer, with random weights for 8,192 tokens."""
    shape = {"vocab_size": 4096, "num_hidden_layers": 2, "max_position_embeddings": 8192}
    directory = make_checkpoint(tmp_path / "long", "qwen3", **shape)
    built_in = model_source.resolve(None, with_weights=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(built_in / name, directory)
    return directory


@pytest.mark.parametrize("backend", ["shm", "tcp", NIXL])
def test_32_concurrent_answers_equal_those_of_an_aggregated_worker(split, backend, long_model):
    way = ("--model", str(long_model), "--kv-transfer-backends", backend)
    named = (*way, "--model-name", MODEL)
    decode = split.decode(*named, *LATE_PREFILLS)
    prefill, _ = split.prefill(*named, *LATE_READS), split.alone(*way)
    split.ready(decode, models=[ALONE, MODEL])
    prompts = [prompt(n) for n in (1, 2, 16, 17, 33, 200, 511, 1000, 2049, 4000, 6000)]
    prompts += [prompt(160) + prompt(i * 37 % 300 + 1, i) for i in range(21)]

    expected = split.ask_all(prompts, model=ALONE)

    assert split.ask_all(prompts) == expected
    assert split.ask_all(prompts) == expected  # now they are known on both sides
    assert prefills(decode, "fallback") == 0
    assert prefills(decode, "remote") >= 30  # of the first time, those of a block at least
    until_idle(decode, prefill)


def test_sampled_answers_equal_those_of_an_aggregated_worker(split):
    decode = split.decode(*LATE_PREFILLS)
    prefill, _ = split.prefill(*LATE_READS), split.alone()
    split.ready(decode, models=[ALONE, MODEL])
    ways = [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": 5, "max_tokens": 1},
        {"temperature": 0.8, "seed": 6, "top_p": 0.9, "presence_penalty": 1.0},
    ]

    for i, way in enumerate(ways):
        prompts = [prompt(n, i) for n in (2, 16, 200, 1000)]  # none that is known by now
        assert split.ask_all(prompts, **way) == split.ask_all(prompts, model=ALONE, **way)
    assert prefills(decode, "remote") == 3 * 4  # new prompts, however short
    until_idle(decode, prefill)


def test_decode_worker_computes_prompts_without_a_prefill_worker(split):
    decode = split.decode()
    split.frontend.await_models([MODEL])

    split.ask(prompt(100))

    assert prefills(decode, "local") == 1


def test_prefill_worker_alone_serves_no_model(split):
    prefill = split.prefill()
    eventually(lambda: "serving storyteller" in prefill.log.read_text(), what="it serves")
    decode = split.decode()
    split.ready(decode)  # the frontend has seen the prefill worker's card by now
    decode.end()

    split.frontend.await_models([])


def test_worker_without_a_mode_uses_prefill_workers(split):
    decode, _ = split.deployment.native(*ALWAYS), split.prefill()
    split.ready(decode)

    split.ask(prompt(300))

    assert prefills(decode, "remote") == 1


def test_restarting_prefill_workers_lose_no_request(split):
    decode, doomed = split.decode("--prefill-timeout-s", "5"), split.prefill()
    split.ready(decode)
    prompts = [prompt(300, i) for i in range(80)]
    expected = split.ask_all(prompts[:8])
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        answers = threads.map(split.ask, prompts)
        before = prefills(decode, "remote")
        eventually(lambda: prefills(decode, "remote") >= before + 5, what="it is at work")
        doomed.kill()
        answers = list(answers)
    newborn = split.prefill()
    split.ready(decode, num_prefill=2)
    before = prefills(decode, "remote")
    split.ask(prompt(400))

    assert answers[:8] == expected
    assert len(answers) == 80
    assert prefills(decode, "fallback") > 0
    assert prefills(decode, "remote") == before + 1
    until_idle(decode, newborn)


def test_terminated_prefill_worker_waits_until_its_blocks_are_read(split):
    decode, leaving = split.decode(*LATE_PREFILLS), split.prefill(*LATE_READS, *LATE_EXIT)
    split.ready(decode)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(split.ask, prompt(1500, i)) for i in range(8)]
        eventually(lambda: leaving.metric("requests_total") == 8, what="it has them all")
        leaving.signal(signal.SIGTERM)

        assert all(one.result() for one in asked)
    assert leaving.exit_code() == 0
    said = leaving.log.read_text()
    assert "no engine read the blocks" not in said
    assert "no worker copied them" not in said
    assert prefills(decode, "fallback") == 0
    until_idle(decode)


def test_prompt_of_a_dead_prefill_worker_goes_to_another(split):
    decode, doomed, _ = split.decode(), split.prefill(), split.prefill()
    split.ready(decode, num_prefill=2)
    doomed.signal(signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = threads.map(split.ask, [prompt(200, i) for i in range(8)])
        eventually(lambda: prefills(decode, "remote") >= 4, what="the other one has answered")
        doomed.kill()

        assert len(list(answers)) == 8
    assert decode.metric("prefill_retries_total") > 0
    assert prefills(decode, "fallback") == 0
    until_idle(decode)


@pytest.mark.parametrize("backend", ["shm", "tcp", NIXL])
def test_stopped_prefill_worker_delays_but_loses_no_request(split, backend):
    way = ("--kv-transfer-backends", backend, "--kv-transfer-timeout-s", "1")
    decode, stuck = split.decode(*way), split.prefill(*way, "--kv-hold-s", "8")
    split.ready(decode)
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        answers = threads.map(split.ask, [prompt(500, i) for i in range(24)])
        eventually(lambda: prefills(decode, "remote") >= 1, what="a prompt was copied")
        stuck.signal(signal.SIGSTOP)

        assert len(list(answers)) == 24
    assert prefills(decode, "fallback") > 0
    until_idle(decode)
    stuck.signal(signal.SIGCONT)
    until_idle(stuck)


def test_blocks_leased_to_a_dead_decode_worker_are_freed(split):
    decode, prefill = split.decode(), split.prefill(*SHORT_HOLD)
    split.ready(decode)
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(split.ask, prompt(700, i)) for i in range(16)]
        eventually(lambda: prefill.metric("kvstats_active_blocks") > 0, what="it computes")
        decode.kill()
        concurrent.futures.wait(asked)  # they fail: nobody else could answer

    until_idle(prefill)


def test_disconnected_clients_leave_no_block_leased(split):
    decode, prefill = split.decode(), split.prefill(*SHORT_HOLD)
    split.ready(decode)
    body = {"model": MODEL, "max_tokens": 50, "stream": True, "nvext": {"ignore_eos": True}}

    def leave(i):
        one = body | {"prompt": prompt(700, i)}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{split.frontend.url}/v1/completions", json=one, timeout=0.01 * (i + 1))

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(leave, range(40)))

    until_idle(decode, prefill)
    assert split.ask(prompt(100))
