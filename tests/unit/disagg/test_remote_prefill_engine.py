"""The engine that lets prefill workers compute long prompts, in front of one that does what the test says."""

import asyncio
import functools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kv_params
from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.disagg import config, metrics, policy, remote_prefill
from dynamo.engine import api
from dynamo.kvbm import pool, sharing
from dynamo.observability import metrics as registries
from dynamo.protocols import blocks, generate, kv_events, kv_transfer, load, model_errors
from dynamo.runtime.backends import memory
from waiting import PATIENT_S

REMOTE = kv_params.at_remote()
FACTS = api.EngineFacts(
    context_length=128, kv_block_size=4, total_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=256
)  # fmt: skip


class Engine:
    def __init__(self):
        self.done, self.refusal, self.unreadable, self.released = [], None, False, []
        self.loads = ()
        self.capabilities = api.EngineCapabilities(kv_transfer=self)

    async def start(self, sink):
        self.sink = sink
        return FACTS

    def submit(self, request):
        if self.refusal is not None:
            raise self.refusal
        if self.unreadable and request.kv_transfer_params is not None:
            raise errors.RemoteProtocolError("kv_transfer_params: x")
        self.done.append(request)

    def abort(self, request_id):
        self.done.append(("abort", request_id))

    def abort_choice(self, request_id, index):
        self.done.append(("abort", request_id, index))

    def load(self):
        return self.loads

    async def clear_kv_blocks(self):
        self.done.append("clear")

    async def stop(self):
        self.done.append("stop")

    def enable_export(self):
        pass

    transfer_metadata = None

    def on_import(self, listener):
        self.report_import = listener

    async def connect_peer(self, metadata, *, deadline_s):
        return "e"

    async def disconnect_peer(self, engine_id):
        pass

    def release_remote(self, params):
        self.released += [] if params is None else [params.remote.remote_hold_id]


class Queue:
    """Answers when the test says so."""

    def __init__(self):
        self.size, self.asked, self.was_cancelled = 0, [], False

    async def prefill(self, request, *, timeout_s):
        self.asked.append(request)
        self.answer = asyncio.get_running_loop().create_future()
        try:
            return await self.answer
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    async def close(self):
        pass


class Workers:
    connected = (1, 2)

    def __init__(self):
        self.reconnected, self.adapters = [], set()

    def instance_of(self, engine_id):
        return 7

    def all_have_adapter(self, lora_name):
        return lora_name in self.adapters

    def start(self):
        pass

    def reconnect(self, engine_id):
        self.reconnected.append(engine_id)

    async def close(self):
        pass


class Sink:
    def __init__(self):
        self.heard = []

    def outputs(self, batch):
        self.heard.append(batch)

    def failed(self, request_id, error):
        self.heard.append((request_id, error))

    def kv_events(self, events, dp_rank=0):
        self.heard.append(events)

    def died(self, error):
        self.heard.append(error)


class World:
    async def start(self, prefill_policy=None):
        self.engine, self.queue, self.workers, self.sink = Engine(), Queue(), Workers(), Sink()
        self.counts = registries.Registry("x")
        self.registry = memory.MemoryDiscovery(memory.MemoryRegistry())
        self.remote = remote_prefill.RemotePrefillEngine(
            self.engine,
            self.queue,
            self.workers,
            metrics.DisaggMetrics(self.counts),
            follow_limits=functools.partial(config.follow_limits, self.registry, "m"),
            prefill_policy=prefill_policy
            or policy.LengthPolicy(policy.LocalPrefillLimits(max_local_prefill_length=8)),
            prefill_timeout_s=5,
            clock=clocks.SystemClock(),
        )
        assert await self.remote.start(self.sink) is FACTS

    async def begin_prefill(self, made):
        self.remote.submit(made)
        await until(lambda: self.queue.asked)

    async def answered(self, params=None, error=None):
        if error is None:
            self.queue.answer.set_result(REMOTE if params is None else params)
        else:
            self.queue.answer.set_exception(error)
        await until(lambda: self.engine.done or self.sink.heard)

    def count(self, where):
        rows = self.counts.render().decode().splitlines()
        row = f'x_prefills_total{{where="{where}"}} '
        return next(float(line[len(row) :]) for line in rows if line.startswith(row))


async def until(check):
    async with asyncio.timeout(PATIENT_S):
        while not check():
            await asyncio.sleep(0)


def request(length=9, n=1, **fields):
    return generate.Request(
        id="r",
        model="m",
        token_ids=blocks.pack(range(length)),
        sampling_options=generate.SamplingOptions(n=n),
        **fields,
    )


@pytest.fixture
async def world():
    world = World()
    await world.start()
    yield world
    await world.remote.stop()


async def test_short_prompt_is_local(world):
    world.remote.submit(request(8))

    assert world.engine.done == [request(8)]
    assert world.count("local") == 1


@pytest.mark.parametrize(
    "made",
    [
        request(output_options=generate.OutputOptions(prompt_logprobs=1)),
        request(kv_transfer_params=kv_transfer.PREFILL_ONLY),
    ],
    ids=["to be scored", "decided already"],
)
async def test_prompt_to_be_scored_or_decided_already_is_local(world, made):
    world.remote.submit(made)

    assert world.engine.done == [made]


async def test_prompts_are_local_without_prefill_workers(world):
    world.queue.size = None
    world.remote.submit(request())

    assert world.engine.done == [request()]


async def test_cached_prefix_does_not_count_as_length(world):
    local = blocks.local_hashes(request().token_ids, 4)
    stored = (kv_events.StoredBlock(local[0], local[0]),)
    world.engine.sink.kv_events([kv_events.Stored(parent_hash=None, blocks=stored)])
    world.remote.submit(request())

    assert world.engine.done == [request()]
    assert len(world.sink.heard) == 1


async def test_long_prompt_is_remote_and_comes_back_with_the_place_of_its_blocks(
    world,
):
    await world.begin_prefill(request(n=2))
    asked = world.queue.asked[0]
    await world.answered()
    came = world.engine.done[0]

    assert (asked.stop_conditions.max_tokens, asked.sampling_options.n) == (1, 1)
    assert asked.kv_transfer_params == kv_transfer.PREFILL_ONLY
    assert msgspec.structs.replace(came, kv_transfer_params=None) == request(n=2)
    assert kv_transfer.remote_blocks(came.kv_transfer_params).remote_block_ids == (1, 2)
    assert 0 < came.kv_transfer_params.remote.remote_hold_s < kv_transfer.LEASE_S


async def test_prompt_of_which_the_prefill_worker_keeps_no_blocks_is_computed_locally_and_counted(
    world,
):
    await world.begin_prefill(request(annotations=(kv_transfer.REPORT_ANNOTATION,)))
    await world.answered(kv_transfer.KvTransferParams(connector={"do_remote_prefill": False}))
    (came,) = world.engine.done

    assert came.kv_transfer_params is None
    assert [world.count(where) for where in ("local", "remote", "fallback")] == [0, 0, 1]
    assert world.remote._sink._prefill_s == {}  # no report of a copy is to come


async def test_choices_that_the_engine_cannot_import_for_are_computed_locally(world):
    world.engine.capabilities = api.EngineCapabilities(
        kv_transfer=world.engine, imports_choices=False
    )
    world.remote.submit(request(n=2))

    assert world.queue.asked == []
    assert world.engine.done == [request(n=2)]


@pytest.mark.parametrize("error", [errors.WorkerLost("x"), errors.DeadlineExceeded("x")])
async def test_failed_remote_prompt_is_computed_locally(world, error):
    await world.begin_prefill(request())
    await world.answered(error=error)

    assert world.engine.done == [request()]
    assert world.count("fallback") == 1


async def test_parameters_of_another_kind_of_engine_are_dropped(world):
    world.engine.unreadable = True
    await world.begin_prefill(request())
    await world.answered(kv_params.of_connector(remote_block_ids="x"))

    assert world.engine.done == [request()]
    assert world.count("fallback") == 1


async def test_fields_of_a_foreign_connector_travel_unchanged(world):
    foreign = kv_params.of_connector(remote_request_id="abc", remote_block_ids=[[1]])
    await world.begin_prefill(request())
    await world.answered(foreign)

    assert world.engine.done[0].kv_transfer_params == foreign


async def test_prompt_without_a_lease_is_computed_locally(world):
    await world.begin_prefill(request())
    await world.answered(kv_transfer.COMPUTE_LOCALLY)

    assert world.engine.done == [request()]


async def test_aborted_remote_prompt_is_not_submitted(world):
    await world.begin_prefill(request())
    world.remote.abort("r")
    await until(lambda: world.queue.was_cancelled)
    world.remote.abort("r")

    assert world.engine.done == [("abort", "r")]  # the second time it is not remote any more


async def test_aborted_prompt_whose_cancellation_was_lost_is_not_submitted(world):
    """As in `asyncio.wait_for` of Python 3.11, when both come in one turn of the event loop."""
    events = []

    async def prefill(prompt, *, timeout_s):
        events.append("began")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("ended")
            return REMOTE

    world.queue.prefill = prefill
    world.remote.submit(request())
    await until(lambda: events == ["began"])
    world.remote.abort("r")
    world.remote.submit(request())  # migrated back to here, under its id
    await until(lambda: len(events) == 3)
    await asyncio.sleep(0)

    assert (world.engine.done, world.sink.heard) == ([], [])
    assert world.engine.released == [7]


async def test_prompt_that_prefill_workers_died_of_is_not_computed_here(world):
    await world.begin_prefill(request())
    await world.answered(error=model_errors.SuspectRequest("two died"))

    ((_, error),) = world.sink.heard
    assert isinstance(error, model_errors.SuspectRequest)
    assert not world.engine.done


async def test_choice_aborted_during_the_prefill_is_aborted_at_the_engine(world):
    await world.begin_prefill(request(n=2))
    world.remote.abort_choice("r", 1)
    await world.answered()
    world.remote.abort_choice("r", 0)

    assert world.engine.done[1:] == [("abort", "r", 1), ("abort", "r", 0)]


async def test_remote_prompt_is_aborted_with_its_last_choice(world):
    await world.begin_prefill(request(n=2))
    world.remote.abort_choice("r", 1)
    world.remote.abort_choice("r", 0)

    await until(lambda: world.queue.was_cancelled)


async def test_refusal_after_the_prefill_goes_to_the_sink(world):
    world.engine.refusal = errors.InvalidRequest("no")
    await world.begin_prefill(request())
    await world.answered()

    assert world.sink.heard == [("r", world.engine.refusal)]
    assert world.engine.released == [7]


@pytest.mark.parametrize(
    ("error", "where"), [(None, "remote"), (errors.TransferError("x"), "fallback")]
)
async def test_imports_are_counted_and_a_failed_peer_is_connected_anew(world, error, where):
    world.engine.report_import(
        sharing.ImportReport(
            request_id="r", engine_id="e", num_blocks=2, duration_s=0.1, error=error
        )
    )

    assert world.count(where) == 1
    assert world.workers.reconnected == (["e"] if error else [])


async def test_limits_in_discovery_change_at_run_time(world, caplog):
    key = policy.limits_key("m")
    stays = []
    for value in (b'{"max_local_prefill_length": 9}', b"{nonsense", None):
        if value is None:
            await world.registry.delete(key)
        else:
            await world.registry.put(key, value)
        for _ in range(10):
            await asyncio.sleep(0)
        stays.append(not world.remote._is_remote(request()))

    assert stays == [True, True, False]
    assert "ignored" in caplog.text


async def test_limits_nested_too_deeply_are_ignored_and_later_ones_read(world):
    key = policy.limits_key("m")
    deep = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for value in (deep, b'{"max_local_prefill_length": 9}'):
        await world.registry.put(key, value)
        for _ in range(10):
            await asyncio.sleep(0)

    assert not world.remote._is_remote(request())


async def test_other_methods_are_the_engines(world):
    await world.remote.clear_kv_blocks()

    assert world.remote.load() is world.engine.loads
    assert world.engine.done == ["clear"]


def import_report(request_id="r", error=None):
    return sharing.ImportReport(
        request_id=request_id, engine_id="e", num_blocks=2, duration_s=0.25, error=error
    )


async def test_prompt_prefilled_by_its_frontend_is_submitted_unchanged(world):
    made = request(kv_transfer_params=REMOTE)
    world.remote.submit(made)

    assert world.engine.done == [made]
    assert world.count("local") == 0  # the report of the copy counts it


async def test_frontends_parameters_of_another_kind_of_engine_are_dropped(world):
    world.engine.unreadable = True
    world.remote.submit(request(kv_transfer_params=REMOTE))

    assert world.engine.done == [request()]
    assert world.count("fallback") == 1


async def test_prompt_that_a_frontend_decided_to_be_local_is_local(world):
    world.remote.submit(request(kv_transfer_params=kv_transfer.COMPUTE_LOCALLY))

    assert not world.queue.asked
    assert world.count("local") == 1


def first_output(request_id):
    return api.EngineOutput(request_id, generate.Output((1,), cached_tokens=0))


async def test_requested_report_of_the_import_comes_with_the_outputs(world):
    asked = request(annotations=(kv_transfer.REPORT_ANNOTATION,))
    await world.begin_prefill(asked)
    await world.answered()
    batch = [first_output("other"), first_output("r")]
    world.engine.sink.outputs(batch)  # the copy goes on still
    world.engine.report_import(import_report())
    world.engine.sink.outputs(batch)
    ending = generate.Output((2,), generate.FinishReason.LENGTH)
    world.engine.sink.outputs([api.EngineOutput("r", ending)])
    world.engine.sink.outputs(batch)
    before, (other, mine), (last,), after = world.sink.heard
    told = mine.output.kv_transfer_params.report

    assert (told.num_blocks, told.transfer_ms, told.prefill_worker_id) == (2, 250, 7)
    assert told.prefill_ms > 0
    assert last.output.kv_transfer_params == mine.output.kv_transfer_params
    assert (before, other) == (batch, batch[0])
    assert after is batch  # the sink takes outputs directly again


@pytest.mark.parametrize("annotations", [(), (kv_transfer.REPORT_ANNOTATION,)])
async def test_no_report_comes_unrequested_or_after_the_end(world, annotations):
    world.remote.submit(request(kv_transfer_params=REMOTE, annotations=annotations))
    world.remote.abort("r")
    world.engine.report_import(import_report())
    batch = [first_output("r")]
    world.engine.sink.outputs(batch)

    assert world.sink.heard == [batch]


async def test_no_report_is_kept_of_a_request_whose_choices_were_all_aborted(world):
    annotations = (kv_transfer.REPORT_ANNOTATION,)
    world.remote.submit(request(n=2, kv_transfer_params=REMOTE, annotations=annotations))
    for index in range(2):
        world.remote.abort_choice("r", index)

    assert world.engine.sink.outputs == world.sink.outputs  # as for requests without a report


async def test_estimate_makes_a_prompt_remote_that_would_delay_answers():
    world = World()
    await world.start(policy.EstimatePolicy())
    world.remote.submit(request(100))
    stays = list(world.engine.done)
    stats = load.WorkerStats(request_active_slots=8, request_total_slots=9, num_requests_waiting=0)
    kv = load.KvStats(kv_active_blocks=0, kv_total_blocks=9)
    world.engine.loads = (load.ForwardPassMetrics(worker_stats=stats, kv_stats=kv),)
    await world.begin_prefill(request(100))
    await world.remote.stop()

    assert stays == [request(100)]
    assert len(world.queue.asked) == 1


@pytest.mark.parametrize("all_have", [True, False])
async def test_prompt_of_an_adapter_is_remote_if_all_prefill_workers_have_it(world, all_have):
    world.workers.adapters = {"poet"} if all_have else set()
    world.remote.submit(request(lora_name="poet"))
    await asyncio.sleep(0)

    assert bool(world.queue.asked) is all_have
    assert bool(world.engine.done) is not all_have


SIZE = 4


@given(chains=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=20))
def test_cached_prefixes_are_those_that_the_pool_would_find(chains):
    memory, cached = pool.BlockPool(8), remote_prefill.CachedPrefixes()
    for chain in chains:
        packed = blocks.pack([token for token in chain for _ in range(SIZE)])
        local = blocks.local_hashes(packed, SIZE)
        names = blocks.sequence_hashes(local)
        held = memory.match_prefix(names)
        expected = len(held) * SIZE
        assert cached.count_tokens(packed, SIZE) == expected
        held += memory.allocate(len(chain) - len(held))
        memory.commit_chain(held, names, local, range(len(held)))
        memory.release(held)
        cached.apply_events(memory.take_events())


def test_cleared_cache_has_no_prefixes():
    cached, packed = remote_prefill.CachedPrefixes(), blocks.pack(range(SIZE))
    (name,) = blocks.local_hashes(packed, SIZE)
    cached.apply_events(
        [kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(name, name),))]
    )
    before = cached.count_tokens(packed, SIZE)
    cached.apply_events([kv_events.Cleared()])

    assert (before, cached.count_tokens(packed, SIZE)) == (SIZE, 0)


def test_blocks_of_an_adapter_are_cached_for_it_alone():
    cached, packed, seed = (
        remote_prefill.CachedPrefixes(),
        blocks.pack(range(SIZE)),
        blocks.seed_of("a"),
    )
    (name,) = blocks.local_hashes(packed, SIZE, seed)
    cached.apply_events(
        [kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(name, name),))]
    )

    assert cached.count_tokens(packed, SIZE, seed) == SIZE
    assert cached.count_tokens(packed, SIZE) == 0


def test_block_is_cached_until_it_has_left_the_last_tier():
    cached, packed = remote_prefill.CachedPrefixes(), blocks.pack(range(SIZE))
    (name,) = blocks.local_hashes(packed, SIZE)
    stored = (kv_events.StoredBlock(name, name),)
    counts = []
    for event in (
        kv_events.Stored(parent_hash=None, blocks=stored),
        kv_events.Stored(parent_hash=None, blocks=stored, tier=kv_events.HOST),
        kv_events.Removed(block_hashes=(name,), tier=kv_events.HOST),
        kv_events.Stored(parent_hash=None, blocks=stored, tier=kv_events.HOST),
        kv_events.Removed(block_hashes=(name,)),
        kv_events.Removed(block_hashes=(name,), tier=kv_events.HOST),
    ):
        cached.apply_events([event])
        counts.append(cached.count_tokens(packed, SIZE) // SIZE)

    assert counts == [1, 1, 1, 1, 1, 0]


def test_cleared_rank_leaves_the_blocks_of_the_others():
    cached, packed = remote_prefill.CachedPrefixes(), blocks.pack(range(SIZE))
    (name,) = blocks.local_hashes(packed, SIZE)
    stored = kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(name, name),))
    for dp_rank in (0, 1):
        cached.apply_events([stored], dp_rank)
    cached.apply_events([kv_events.Cleared()], 0)
    before = cached.count_tokens(packed, SIZE)
    cached.apply_events([kv_events.Removed(block_hashes=(name,))], 1)

    assert (before, cached.count_tokens(packed, SIZE)) == (SIZE, 0)
