"""Prefixes that one engine copies from another's cache: the answer is that of an engine alone, whatever happens.

Native and simulated engines, each behind `PeerPrefixEngine`; the lease is asked for over a real request plane.
"""

import asyncio
import contextlib
import itertools
import pathlib
import random

import pytest

from devices import DEVICE
from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.disagg import metrics, peer_prefixes
from dynamo.kvbm import exchange, tier_policy
from dynamo.observability import metrics as registries
from dynamo.protocols import blocks, generate, kv_transfer
from dynamo.transfer import agent
from dynamo.worker import engines, model_source
from waiting import PATIENT_S, until

HOLD_S = 10 * PATIENT_S  # so a lease that ends within the patience of a test was released
OF_KIND = {
    "native": {"threads": 1, "kv_hold_s": HOLD_S},
    "native on a device": {"threads": 1, "kv_hold_s": HOLD_S, "device": DEVICE},
    "mocker": {"block_size": 16, "speedup_ratio": 20, "kv_hold_s": HOLD_S},
}
TIERS = {
    "native": {"connector": "kvbm", "kvbm_cpu_cache_override_num_blocks": 200},
    "mocker": {"kvbm_host_blocks": 200, "kvbm_host_bandwidth": 1000.0, "speedup_ratio": 2},
}
PREFIX_LEN, BLOCK = 480, 16


@pytest.fixture(params=OF_KIND)
def kind(request):
    return request.param


@pytest.fixture
def no_hurry(monkeypatch):
    """A copy may take as long as it does on a busy machine, and not half of the time of computing."""
    monkeypatch.setattr(tier_policy, "_MIN_WAIT_S", PATIENT_S)
    monkeypatch.setattr(tier_policy, "_MAX_WAIT_S", PATIENT_S)


class Sink:
    def __init__(self):
        self.answers, self.outputs_of, self.ends, self.errors = {}, {}, {}, {}

    def begin(self, request_id):
        self.answers[request_id], self.outputs_of[request_id] = [], []
        self.ends[request_id] = asyncio.Event()

    def outputs(self, batch):
        for request_id, output in batch:
            self.answers[request_id] += output.token_ids
            self.outputs_of[request_id].append(output)
            if output.finish_reason is not None:
                self.ends[request_id].set()

    def failed(self, request_id, error):
        self.errors[request_id] = error
        self.ends[request_id].set()

    def kv_events(self, events, dp_rank=0):
        pass

    def died(self, error):
        raise error


class Client:
    """Asks the engine of another `Side` directly; `fault` says what goes wrong on the way."""

    def __init__(self, holder):
        self.holder, self.fault, self.num_asked = holder, None, 0
        self.instances, self.listeners = {7: None}, []

    def on_change(self, listener):
        self.listeners.append(listener)

    def leave(self, instance_id):
        """Let an instance vanish from discovery."""
        del self.instances[instance_id]
        for listener in self.listeners:
            listener()

    async def wait_for_instances(self, timeout_s):
        pass

    async def open(self, request, receiver, *, instance_id, timeout_s, headers, gives_up_early):
        self.num_asked += 1
        if self.fault == "dead":
            raise errors.WorkerLost("connection refused")
        if self.fault == "wrong program":
            raise ZeroDivisionError
        side, request_id, fault = self.holder, request.id, self.fault

        class Stream:
            def cancel(self):
                side.engine.abort(request_id)

        async def answer():
            await side.sink.ends[request_id].wait()
            if fault == "late":
                await side.inner.wait_until_released()  # the lease has ended
            for output in side.sink.outputs_of[request_id]:
                receiver.receive(output)
            receiver.ended(side.sink.errors.get(request_id))

        if self.fault != "silent":
            side.sink.begin(request_id)
            side.engine.submit(request)
            self.task = asyncio.get_running_loop().create_task(answer())
        return Stream()


class Side:
    @classmethod
    async def start(cls, kind, client=None, **settings):
        side = cls()
        settings = {"num_gpu_blocks_override": 400} | OF_KIND[kind] | settings
        path = model_source.resolve(None, with_weights=True)
        name = kind.partition(" ")[0]
        engine = engines.build(name, path, engines.settings_of(name)(**settings))
        engine.enable_export()
        side.inner, side.sink, side.number = engine, Sink(), 0
        side.registry = registries.Registry("x")
        counters = metrics.PeerPrefixMetrics(side.registry)
        side.engine = peer_prefixes.PeerPrefixEngine(
            engine, lambda path: client, counters, clocks.SystemClock()
        )
        await side.engine.start(side.sink)
        return side

    def submit(self, prompt, source=None, **fields):
        self.number += 1
        request_id = str(self.number)
        self.sink.begin(request_id)
        self.engine.submit(
            generate.Request(
                id=request_id,
                model="m",
                token_ids=blocks.pack(prompt),
                stop_conditions=generate.StopConditions(max_tokens=8, ignore_eos=True),
                sampling_options=generate.SamplingOptions(temperature=0.0),
                prefix_source=source,
                **fields,
            )
        )
        return request_id

    async def answer(self, prompt, source=None, **fields):
        request_id = self.submit(prompt, source, **fields)
        await self.end_of(request_id)
        return self.sink.answers[request_id], self.sink.outputs_of[request_id][0]

    async def end_of(self, request_id):
        async with asyncio.timeout(PATIENT_S):
            await self.sink.ends[request_id].wait()

    async def until_idle(self):
        async with asyncio.timeout(PATIENT_S):
            while self.engine.load()[0].kv_stats.kv_active_blocks:
                await asyncio.sleep(0.005)

    def count(self, outcome):
        """Return how many prefixes ended so."""
        rows = self.registry.render().decode().splitlines()
        (row,) = (r for r in rows if "prefixes_total" in r and f'"{outcome}"' in r)
        return float(row.rsplit(" ", 1)[1])

    def source(self, num_tokens=PREFIX_LEN):
        return kv_transfer.PrefixSource(
            endpoint="n/c/e",
            instance_id=7,
            metadata=self.inner.transfer_metadata,
            num_tokens=num_tokens,
        )


@contextlib.asynccontextmanager
async def two_workers(kind, *, holder=None, **settings):
    left = await Side.start(kind, **settings, **(holder or {}))
    client = Client(left)
    right = await Side.start(kind, client, **settings)
    try:
        yield left, right, client
    finally:
        await right.engine.stop()
        await left.engine.stop()


def prompt(seed, length=PREFIX_LEN + 40):
    shared = random.Random(0).choices(range(5, 500), k=PREFIX_LEN)
    return (shared + random.Random(seed + 1).choices(range(5, 500), k=length))[:length]


@pytest.mark.usefixtures("no_hurry")
async def test_prefix_is_copied_and_the_answer_is_that_of_one_engine(kind):
    async with two_workers(kind) as (left, right, _):
        await left.answer(prompt(0))
        expected, _ = await left.answer(prompt(1))
        said, first = await right.answer(prompt(1), left.source())

        assert said == expected
        assert dict(first.tier_tokens) == {"peer": first.cached_tokens}
        assert (
            first.cached_tokens == (len(prompt(1)) - 1) // BLOCK * BLOCK
        )  # all but the last block
        assert right.count("imported") == 1
        await left.until_idle()
        await right.until_idle()
        again, first = await right.answer(prompt(2), left.source())
        assert first.tier_tokens is None  # its prefix is here already
        assert (await left.answer(prompt(2)))[0] == again


def num_mapped_pools():
    return pathlib.Path("/proc/self/maps").read_text().count("memfd:dynamo-kv")


@pytest.mark.usefixtures("no_hurry")
async def test_memory_of_a_peer_that_has_left_is_unmapped():
    async with two_workers("mocker") as (left, right, client):
        num_before = num_mapped_pools()
        await left.answer(prompt(0))
        await right.answer(prompt(1), left.source())
        assert num_mapped_pools() == num_before + 1
        client.instances[8] = None
        client.leave(8)
        await right.until_idle()
        assert num_mapped_pools() == num_before + 1
        client.leave(7)

        await until(lambda: num_mapped_pools() == num_before)


@pytest.mark.usefixtures("no_hurry")
async def test_memory_of_a_peer_that_had_left_before_is_not_mapped():
    """Nothing would tell us to unmap it: it leaves but once."""
    async with two_workers("mocker") as (left, right, client):
        num_before = num_mapped_pools()
        expected, _ = await left.answer(prompt(1))
        client.leave(7)
        said, first = await right.answer(prompt(1), left.source())

        assert said == expected
        assert first.tier_tokens is None
        assert right.count("failed") == 1
        await until(lambda: num_mapped_pools() == num_before)


@pytest.mark.usefixtures("no_hurry")
async def test_memory_of_peers_is_unmapped_though_the_engine_runs_on(monkeypatch):
    """As when its worker changes its role: the next front of the engine knows nothing of them."""

    async def run_on():
        pass

    async with two_workers("mocker") as (left, right, _):
        num_before = num_mapped_pools()
        await left.answer(prompt(0))
        await right.answer(prompt(1), left.source())
        assert num_mapped_pools() == num_before + 1
        with monkeypatch.context() as patch:
            patch.setattr(right.inner, "stop", run_on)
            await right.engine.stop()

        await until(lambda: num_mapped_pools() == num_before)


async def test_peers_that_need_not_rest_any_more_are_forgotten(monkeypatch):
    """Each start of a worker is another instance."""
    monkeypatch.setattr(peer_prefixes, "REST_S", 0.0)
    async with two_workers("mocker") as (_, right, _):
        for instance_id in range(5):
            right.engine._rest(instance_id, errors.TransferError("x"))

        assert list(right.engine._resting) == [4]


async def test_speed_of_computing_is_that_of_a_prompt_that_came_alone(kind):
    async with two_workers(kind) as (_, right, _):
        requests = [right.submit(prompt(seed)) for seed in range(2)]
        for request_id in requests:
            await right.end_of(request_id)
        after_two = right.engine._cost.s_per_token
        await right.until_idle()
        await right.answer(random.Random(7).choices(range(5, 500), k=PREFIX_LEN))

        assert after_two is None
        assert right.engine._cost.s_per_token is not None


@pytest.mark.usefixtures("no_hurry")
async def test_prefix_in_host_memory_of_the_peer_is_copied(kind):
    few = {"num_gpu_blocks_override": 64} | TIERS[kind.partition(" ")[0]]
    async with two_workers(kind, holder=few) as (left, right, _):
        expected, _ = await left.answer(prompt(1))
        for seed in range(3):  # they push it out of the engine's memory
            await left.answer(random.Random(9 + seed).choices(range(5, 500), k=600))
        said, first = await right.answer(prompt(1), left.source(PREFIX_LEN + 32))

        assert said == expected
        assert dict(first.tier_tokens)["peer"] > 0
        await left.until_idle()


@pytest.mark.parametrize("fault", ["dead", "silent"])
async def test_peer_that_does_not_lease_is_asked_once_and_the_prompt_computed(
    kind, fault, monkeypatch
):
    wait_s = PATIENT_S if fault == "dead" else 1.0  # long enough to connect and ask
    monkeypatch.setattr(tier_policy, "_MIN_WAIT_S", wait_s)
    monkeypatch.setattr(tier_policy, "_MAX_WAIT_S", wait_s)
    async with two_workers(kind) as (left, right, client):
        expected, _ = await left.answer(prompt(1))
        client.fault = fault
        said, first = await right.answer(prompt(1), left.source())

        assert said == expected
        assert first.tier_tokens is None
        assert right.count("failed") == 1
        await right.answer(prompt(5), left.source())
        assert client.num_asked == 1


async def test_peer_that_stops_during_the_copy_costs_only_the_copy(kind):
    async with two_workers(kind) as (left, right, client):
        expected, _ = await left.answer(prompt(1))
        lease = kv_transfer.EXPORT_CACHED
        source = left.source()
        params = await ask(left, prompt(1), lease)
        await left.engine.stop()
        client.open = answer_with(params)
        said, first = await right.answer(prompt(1), source)

        assert said == expected
        assert right.count("imported") + right.count("failed") == 1
        assert first.cached_tokens in (0, None) or right.count("imported")
        await right.until_idle()


async def test_fault_of_the_program_fails_the_request_instead_of_holding_it_for_ever(
    kind, monkeypatch
):
    monkeypatch.setattr(tier_policy, "_MIN_WAIT_S", PATIENT_S)
    monkeypatch.setattr(tier_policy, "_MAX_WAIT_S", PATIENT_S)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with two_workers(kind) as (left, right, client):
        await left.answer(prompt(1))
        client.fault = "wrong program"
        right.submit(prompt(1), left.source())
        await right.end_of("1")
        await right.until_idle()

    assert isinstance(right.sink.errors["1"], errors.EngineFailed)


async def test_blocks_of_another_lease_change_no_answer(kind):
    """The peer forgets the lease at once, and its blocks get other content: what is late is not used."""
    async with two_workers(kind) as (left, right, client):
        expected, _ = await left.answer(prompt(1))
        params = await ask(left, prompt(1), kv_transfer.EXPORT_CACHED)
        remote = params.remote.__class__(
            **{name: getattr(params.remote, name) for name in params.remote.__struct_fields__}
            | {"remote_hold_s": -1.0}
        )
        client.open = answer_with(
            kv_transfer.KvTransferParams(do_remote_prefill=True, remote=remote)
        )
        said, first = await right.answer(prompt(1), left.source())

        assert said == expected
        assert not first.tier_tokens
        assert right.count("failed") == 1


@pytest.mark.usefixtures("no_hurry")
async def test_prefix_for_a_request_that_the_engine_refuses_is_given_back_at_once(
    kind, monkeypatch
):
    monkeypatch.setattr(exchange, "PREFIX_LEASE_S", HOLD_S)
    async with two_workers(kind) as (left, right, client):
        await left.answer(prompt(1))
        refused = right.submit(prompt(1), left.source(), data_parallel_rank=9)
        await right.end_of(refused)

        assert isinstance(right.sink.errors[refused], errors.InvalidRequest)
        assert client.num_asked == 1
        await left.until_idle()


@pytest.mark.usefixtures("no_hurry")
async def test_prefix_whose_lease_has_ended_before_its_answer_came_is_computed(kind):
    async with two_workers(kind, holder={"kv_hold_s": 1.0}) as (left, right, client):
        expected, _ = await left.answer(prompt(1))
        client.fault = "late"
        said, first = await right.answer(prompt(1), left.source())

        assert said == expected
        assert not first.tier_tokens
        assert right.count("failed") == 1


async def test_all_is_free_though_leases_and_copies_fail_stall_and_are_late(kind, monkeypatch):
    """32 requests at once, on so few blocks that some are preempted, and every third aborted."""
    monkeypatch.setattr(peer_prefixes, "REST_S", 0.0)
    real_post, numbers = agent.PreparedTransfer.post, itertools.count()

    def post(transfer, *, deadline_s, **options):
        number = next(numbers) % 3
        if number == 0:
            raise errors.TransferError("made to fail")
        return real_post(transfer, deadline_s=1e-6 if number == 1 else deadline_s, **options)

    async with two_workers(kind, num_gpu_blocks_override=120) as (left, right, client):
        expected = {n: (await left.answer(prompt(n)))[0] for n in range(32) if n % 3}
        monkeypatch.setattr(agent.PreparedTransfer, "post", post)
        ids = []
        for number in range(32):
            client.fault = ("dead", "silent", None, None)[number % 4]
            ids.append(right.submit(prompt(number), left.source()))
            await asyncio.sleep(0)  # it asks
        for request_id in ids[::3]:
            right.engine.abort(request_id)
        for number in expected:
            await right.end_of(ids[number])

        assert {n: right.sink.answers[ids[n]] for n in expected} == expected
        assert right.count("failed") > 0
        await right.until_idle()
        await left.until_idle()


async def test_lease_of_nothing_computes_the_prompt(kind):
    async with two_workers(kind) as (left, right, _):
        said, first = await right.answer(prompt(1), left.source())

        assert (await left.answer(prompt(1)))[0] == said
        assert first.tier_tokens is None


async def ask(side, tokens, params):
    """Return the parameters of an export of cached blocks."""
    side.sink.begin("x")
    side.engine.submit(
        generate.Request(
            id="x",
            model="m",
            token_ids=blocks.pack(tokens),
            stop_conditions=generate.StopConditions(max_tokens=1),
            kv_transfer_params=params,
        )
    )
    await side.end_of("x")
    assert side.sink.answers["x"] == []
    return side.sink.outputs_of["x"][-1].kv_transfer_params


def answer_with(params):
    async def open_stream(request, receiver, *, instance_id, timeout_s, headers, gives_up_early):
        class Stream:
            def cancel(self):
                pass

        receiver.receive(generate.Output(token_ids=(), kv_transfer_params=params))
        return Stream()

    return open_stream
