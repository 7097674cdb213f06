"""What every prefill queue promises: prompts given to workers directly, and through a queue in memory or in NATS."""

import asyncio
import functools
import itertools

import msgspec
import pytest

import kv_params
import nats_server as servers
from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.disagg import metrics, prefill_queue, shared_queue
from dynamo.observability import logs
from dynamo.observability import metrics as registries
from dynamo.protocols import blocks, generate, instances, kv_transfer, model_errors, trace_context
from dynamo.runtime import component, services
from dynamo.runtime.backends.nats import jetstream
from waiting import PATIENT_S, until

PREFILL = instances.EndpointName("d", "prefill", "generate")
LEASES = "d/backend/prefill_claims"
NAMES = itertools.count()
BOUNDS = services.WorkQueueBounds(acknowledge_s=2.0)


def request(i=0):
    return generate.Request(id=f"r{i}", model="m", token_ids=blocks.pack([1, 2, 3]))


class Worker:
    """A prefill worker that answers when the test says so; with a queue, it takes jobs from there."""

    def __init__(self, runtime, join):
        self.runtime, self.calls, self.cancelled = runtime, [], 0
        self.counts = metrics.PrefillJobMetrics(registries.Registry("x"))
        self.consumer = None
        if join is not None:
            self.consumer = shared_queue.PrefillJobConsumer(
                join, runtime.requests, runtime.instance_id, self.counts, clocks.SystemClock()
            )

    async def start(self):
        await self.runtime.register(PREFILL, self._take)
        if self.consumer is not None:
            await self.consumer.start()

    def _take(self, call):
        self.calls.append(call)
        call.on_cancel(self._cancel)

    def _cancel(self):
        self.cancelled += 1

    def answer(self, i=-1):
        params = kv_params.of_connector(of=self.runtime.instance_id)
        self.calls[i].send(generate.Output((1,), kv_transfer_params=params))
        self.calls[i].finish()

    async def stop(self):
        if self.consumer is not None:
            await self.consumer.leave()
        await self.runtime.drain(0)
        if self.consumer is not None:
            await self.consumer.close()
        await self.runtime.close()

    async def die(self):
        """As kill -9 does: with no word to anybody."""
        if self.consumer is not None:
            await self.consumer._tasks.close()
        await self.runtime.close()


class Rig:
    """One decode worker's queue, and prefill workers in the same process."""

    def __init__(self, kind, nats):
        self.kind, self.nats = kind, nats
        self.cluster = component.MemoryCluster()
        self.name = f"prefill {next(NAMES)}"
        self.workers, self.registry = [], registries.Registry("y")
        self.counts = metrics.DisaggMetrics(self.registry)

    def join_of(self, runtime):
        if self.kind == "direct":
            return None
        if self.kind == "nats":
            return functools.partial(jetstream.NatsWorkQueue.open, self.nats, self.name, BOUNDS)
        return functools.partial(runtime.services.work_queue, self.name, BOUNDS)

    async def open(self, num_workers=2):
        self.runtime = await component.DistributedRuntime.in_memory(
            self.cluster, item_type=generate.Output
        )
        self.join = self.join_of(self.runtime)
        self.client = self.runtime.client(PREFILL)
        if self.kind == "direct":
            self.queue = prefill_queue.DirectQueue(
                self.connected, self.client, clocks.SystemClock(), self.counts.retries.inc
            )
        else:
            self.queue = shared_queue.SharedQueue(
                self.join,
                self.connected,
                self.client,
                self.runtime.requests,
                LEASES,
                self.counts,
                clocks.SystemClock(),
            )
            await self.queue.start()
        for _ in range(num_workers):
            await self.add_worker()

    async def add_worker(self):
        runtime = await component.DistributedRuntime.in_memory(
            self.cluster, item_type=generate.Output
        )
        worker = Worker(runtime, self.join_of(runtime))
        self.workers.append(worker)
        await worker.start()
        await until(lambda: runtime.instance_id in self.client.instances)
        return worker

    def connected(self):
        return list(self.client.instances)

    def ask(self, i=0, timeout_s=PATIENT_S):
        return asyncio.ensure_future(self.queue.prefill(request(i), timeout_s=timeout_s))

    async def busy(self, num=1):
        """The workers that have begun, once `num` prompts are being computed."""
        await until(lambda: sum(len(w.calls) for w in self.workers) >= num)
        return [w for w in self.workers if w.calls]

    async def close(self):
        for worker in self.workers:
            await worker.stop()
        if self.kind != "direct":
            await self.queue.leave()
            await self.queue.close()
        await self.runtime.close()


async def until_empty(work):
    async def is_empty():
        return not await work.depth()

    await until(is_empty)


@pytest.fixture(autouse=True)
def _leave_quickly(monkeypatch):
    monkeypatch.setattr(shared_queue, "PULL_S", 0.2)


async def open_rig(request):
    """Yield the rig of a fixture's parameter, and close it."""
    nats = None
    if request.param == "nats":
        nats = await servers.connect(request.getfixturevalue("nats_server").url)
    rig = Rig(request.param, nats)
    yield rig
    await rig.close()
    if nats is not None:
        await nats.close()


rig = pytest.fixture(open_rig, params=["direct", "memory", "nats"], name="rig")
shared = pytest.fixture(open_rig, params=["memory", "nats"], name="shared")  # by prefill workers


async def test_computed_prompt_says_where_its_blocks_are(rig):
    await rig.open()
    asking = rig.ask()
    (worker,) = await rig.busy()
    worker.answer()

    assert (await asking).connector["of"] == worker.runtime.instance_id
    assert (
        msgspec.msgpack.decode(worker.calls[0].body, type=generate.Request).token_ids
        == request().token_ids
    )


async def test_prefill_worker_computes_a_prompt_under_the_trace_of_its_request(rig):
    await rig.open()
    trace = trace_context.TraceContext("a" * 32, "b" * 16)
    token = logs.log_context.set(logs.LogContext("decode", "r0", trace))
    asking = rig.ask()
    logs.log_context.reset(token)
    (worker,) = await rig.busy()
    worker.answer()
    await asking

    headers = worker.calls[0].headers
    assert headers["x-request-id"] == "r0"
    assert headers["traceparent"].split("-")[1] == "a" * 32


async def test_many_prompts_are_all_computed(rig):
    await rig.open()
    asking = [rig.ask(i) for i in range(30)]
    answered = dict.fromkeys(rig.workers, 0)
    while not all(one.done() for one in asking):
        for worker, num in answered.items():
            for i in range(num, len(worker.calls)):
                worker.answer(i)
            answered[worker] = len(worker.calls)
        await asyncio.sleep(0.002)

    assert sum(answered.values()) == 30
    assert all(answered.values())
    assert len([one.result() for one in asking]) == 30


@pytest.mark.parametrize("error", [errors.Overloaded("x"), errors.EngineFailed("x")])
async def test_prompt_that_its_worker_fails_goes_to_another(rig, error):
    await rig.open()
    asking = rig.ask()
    (first,) = await rig.busy()
    first.calls[0].fail(error)
    await rig.busy(2)
    second = next(worker for worker in rig.workers if worker is not first)
    second.answer()

    assert (await asking).connector["of"] == second.runtime.instance_id
    assert b"prefill_retries_total 1.0" in rig.registry.render()


async def test_prompt_whose_worker_dies_goes_to_another(rig):
    await rig.open()
    asking = rig.ask()
    (first,) = await rig.busy()
    rig.workers.remove(first)
    await first.die()
    (second,) = await rig.busy()
    second.answer()

    assert (await asking).connector["of"] == second.runtime.instance_id


async def test_impossible_prompt_fails_at_once(rig):
    await rig.open()
    asking = rig.ask()
    (worker,) = await rig.busy()
    worker.calls[0].fail(model_errors.ContextTooLong("too long"))

    with pytest.raises(model_errors.ContextTooLong, match="too long"):
        await asking
    assert sum(len(w.calls) for w in rig.workers) == 1


async def test_prompt_whose_only_worker_fails_raises_its_error(rig):
    await rig.open(num_workers=1)
    asking = rig.ask()
    (worker,) = await rig.busy()
    worker.calls[0].fail(errors.EngineFailed("it broke"))

    with pytest.raises(errors.EngineFailed, match="it broke"):
        await asking


async def test_prompt_fails_without_workers(rig):
    await rig.open(num_workers=0)

    assert rig.queue.size is None
    with pytest.raises(errors.NoWorkers):
        await rig.ask()


async def test_prompt_of_a_cancelled_request_is_cancelled_at_its_worker(rig):
    await rig.open()
    asking = rig.ask()
    (worker,) = await rig.busy()
    asking.cancel()

    await until(lambda: worker.cancelled == 1)


async def test_prompt_fails_after_its_time_limit(rig):
    await rig.open()
    asking = rig.ask(timeout_s=0.5)
    (worker,) = await rig.busy()

    with pytest.raises(errors.DeadlineExceeded, match=r"0\.5 s"):
        await asking
    await until(lambda: worker.cancelled == 1)


async def test_prompt_that_no_worker_takes_fails_after_its_time_limit(shared):
    await shared.open(num_workers=1)
    asking = [shared.ask(i) for i in range(shared_queue.NUM_JOBS)]
    (worker,) = await shared.busy(shared_queue.NUM_JOBS)
    with pytest.raises(errors.DeadlineExceeded, match=r"0\.5 s"):
        await shared.ask(9, timeout_s=0.5)

    for i in range(shared_queue.NUM_JOBS):
        worker.answer(i)
    await asyncio.gather(*asking)


async def test_size_grows_with_waiting_prompts_and_shrinks_when_they_are_done(rig):
    await rig.open(num_workers=1)
    await until(lambda: rig.queue.size == 0)
    asking = [rig.ask(i) for i in range(6)]
    await rig.busy()
    await until(lambda: rig.queue.size >= 4)
    for i in range(6):
        await rig.busy(i + 1)
        rig.workers[0].answer(i)
    await asyncio.gather(*asking)

    await until(lambda: rig.queue.size == 0)


async def test_workers_that_join_later_get_prompts(rig):
    await rig.open(num_workers=0)
    worker = await rig.add_worker()
    asking = rig.ask()
    await rig.busy()
    worker.answer()

    assert (await asking).connector["of"] == worker.runtime.instance_id


async def test_job_of_a_silently_dead_worker_is_delivered_to_another(shared):
    await shared.open(num_workers=1)
    work = await shared.join()
    asking = shared.ask()
    (first,) = await shared.busy()
    await shared.add_worker()
    shared.workers.remove(first)
    await first.die()
    await until(lambda: shared.workers[0].calls)
    shared.workers[0].answer()
    await asking

    assert b"prefill_redelivered_total 1.0" in shared.registry.render()
    await until_empty(work)
    await work.close()


async def test_draining_worker_takes_no_jobs_and_finishes_its_own(shared):
    await shared.open(num_workers=1)
    (leaving,) = shared.workers
    asking = [shared.ask(i) for i in range(4)]
    await shared.busy(shared_queue.NUM_JOBS)
    await leaving.consumer.leave()
    other = await shared.add_worker()
    for i in range(shared_queue.NUM_JOBS):
        leaving.answer(i)
    await until(lambda: len(other.calls) == 4 - shared_queue.NUM_JOBS)
    for i in range(len(other.calls)):
        other.answer(i)

    assert len(await asyncio.gather(*asking)) == 4
    assert len(leaving.calls) == shared_queue.NUM_JOBS


async def test_worker_that_is_not_connected_yet_gets_no_prompt(shared):
    await shared.open(num_workers=2)
    first, second = shared.workers
    shared.queue._workers = lambda: [second.runtime.instance_id]
    asking = [shared.ask(i) for i in range(4)]
    for i in range(4):
        await until(lambda i=i: len(second.calls) > i)
        second.answer(i)
    await asyncio.gather(*asking)

    assert first.calls == []


async def test_stopping_decode_worker_fails_prompts_that_no_worker_has_begun(shared):
    await shared.open(num_workers=1)
    asking = [shared.ask(i) for i in range(4)]
    await shared.busy(shared_queue.NUM_JOBS)
    await shared.queue.leave()
    shared.workers[0].answer(0)
    shared.workers[0].answer(1)
    ends = await asyncio.gather(*asking, return_exceptions=True)

    assert (
        sum(isinstance(one, kv_transfer.KvTransferParams) for one in ends) == shared_queue.NUM_JOBS
    )
    assert sum(isinstance(one, errors.Unavailable) for one in ends) == 4 - shared_queue.NUM_JOBS
    assert shared.queue.size is None


async def test_waiting_prompts_fail_when_the_last_worker_leaves(shared):
    await shared.open(num_workers=1)
    asking = [shared.ask(i) for i in range(4)]
    await shared.busy(shared_queue.NUM_JOBS)
    await shared.workers.pop().die()

    for one in asking:
        with pytest.raises((errors.NoWorkers, errors.WorkerLost)):
            await one


async def test_job_of_a_cancelled_prompt_is_acknowledged(shared):
    await shared.open(num_workers=1)
    work = await shared.join()
    asking = [shared.ask(i) for i in range(5)]
    await shared.busy(shared_queue.NUM_JOBS)
    for one in asking:
        one.cancel()

    await until_empty(work)
    assert len(shared.workers[0].calls) == shared_queue.NUM_JOBS
    await work.close()


@pytest.mark.parametrize(
    "body",
    [
        b"junk",
        msgspec.msgpack.encode(shared_queue.PrefillJob(number="1", endpoint="x", transport={})),
        msgspec.msgpack.encode(
            shared_queue.PrefillJob(number="1", endpoint=LEASES, transport={"memory": "memory:999"})
        ),
    ],
    ids=["junk", "another plane", "nobody there"],
)
async def test_job_without_a_decode_worker_is_dropped(shared, body):
    await shared.open(num_workers=1)
    work = await shared.join()
    await work.push(body)

    await until_empty(work)
    asking = shared.ask()
    (worker,) = await shared.busy()
    worker.answer()
    await asking
    await work.close()
