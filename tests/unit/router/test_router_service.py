"""The standalone router, asked over the request plane."""

import asyncio
import contextlib

import msgspec
import pytest
from routing_rig import NAME, Receiver, Worker, World, card, request

from dynamo.base import clock as clocks
from dynamo.base import config as options
from dynamo.base import errors
from dynamo.observability import metrics
from dynamo.protocols import generate, instances
from dynamo.router import __main__ as router_main
from dynamo.router import config, endpoint_router, route_factory, service
from dynamo.runtime import requests
from dynamo.testing import clock
from waiting import PATIENT_S


class Served(World):
    """A standalone router, two workers behind it, and somebody who asks."""

    async def start(self):
        self.clock = clock.VirtualClock()
        own = await self.runtime()
        made = route_factory.RouteFactory(
            config.RoutingConfig(router_mode="kv"), own, clocks.SystemClock(), metrics.Registry("x")
        )
        self.service = service.RouterService(own, NAME, made, self.clock)
        await self.service.start()
        self._stack.push_async_callback(self.service.close)
        for _ in range(2):
            runtime = await self.runtime()
            self.workers.append(worker := Worker(runtime, {}))
            await runtime.register(NAME, worker.take, card().record_for)
        self.asker = await self.runtime()
        await self.until(lambda: self.service._workers._router is not None)
        await self.until(lambda: len(self.service._workers._client.instances) == 2)
        await self.until(lambda: len(self.service._workers._cards) == 2)

    async def ask(self, endpoint, value, reply_type=dict):
        client = self.asker.client(instances.EndpointName("dynamo", "router", endpoint))
        await client.wait_for_instances(PATIENT_S)
        (found,) = client.instances.values()
        return await requests.call(
            self.asker.requests, found.transport["memory"], found.name.path, value,
            reply_type=reply_type, timeout_s=PATIENT_S,
        )  # fmt: skip

    def best(self, tokens, **fields):
        question = service.BestWorkerRequest(token_ids=list(tokens), **fields)
        return self.ask("best_worker_id", question, service.BestWorkerResponse)


@pytest.fixture
async def served():
    async with contextlib.AsyncExitStack() as stack:
        made = Served(stack)
        await made.start()
        yield made


async def test_best_worker_request_without_updates_changes_no_load(served):
    first = await served.best(range(100))
    again = await served.best(range(1000, 1100))

    assert first.worker_id == again.worker_id  # nobody is busy
    assert first.overlap_blocks == 0


async def test_worker_that_could_not_be_reached_is_not_the_best_one(served):
    first = await served.best(range(100))
    served.service._workers._client.report_down(first.worker_id)
    second = await served.best(range(100))
    served.service._workers._client.report_down(second.worker_id)

    assert second.worker_id != first.worker_id
    assert (await served.best(range(100))).worker_id  # all are down: one of them


async def test_counted_best_worker_request_is_load_until_free(served):
    first = await served.best(range(100), request_id="a", update_states=True)
    other = await served.best(range(1000, 1100))
    assert other.worker_id != first.worker_id

    await served.ask("mark_prefill_complete", service.SequenceUpdate(request_id="a"))
    await served.ask("free", service.SequenceUpdate(request_id="a"))

    loads = served.service._workers._router.scheduler.selector.active.loads.values()
    assert [(load.num_requests, load.prefill_tokens) for load in loads] == [(0, 0)] * 2


async def test_request_that_nobody_frees_is_load_until_its_caller_counts_as_gone(served):
    await served.best(range(100), request_id="a", update_states=True)
    await served.best(range(100), request_id="b", update_states=True)
    await served.clock.advance(endpoint_router.COUNTED_S - 1)
    await served.ask("mark_prefill_complete", service.SequenceUpdate(request_id="a"))
    in_flight = served.service._workers._router.scheduler.selector.active
    assert ("a" in in_flight, "b" in in_flight) == (True, True)

    await served.clock.advance(1)
    assert ("a" in in_flight, "b" in in_flight) == (True, False)
    await served.clock.advance(endpoint_router.COUNTED_S - 1)
    assert "a" not in in_flight


async def test_prompt_with_a_salt_finds_no_blocks_of_others(served):
    await served.best(range(3200), request_id="a", update_states=True, cache_salt="s")
    await served.ask("mark_prefill_complete", service.SequenceUpdate(request_id="a"))
    answers = [await served.best(range(3200), cache_salt=salt) for salt in (None, "t", "s")]

    assert [answer.overlap_blocks > 0 for answer in answers] == [False, False, True]


@pytest.mark.parametrize("token_ids", [[-1], [2**32], b"12345"])
async def test_best_worker_for_what_is_no_token_is_refused(served, token_ids):
    with pytest.raises(errors.InvalidRequest, match="expected token ids of"):
        await served.ask("best_worker_id", {"token_ids": token_ids}, msgspec.Raw)


async def test_router_takes_the_block_size_of_the_workers_that_are_left(served):
    newer = await served.runtime()
    facts = msgspec.structs.replace(card(), kv_cache_block_size=8)
    await newer.register(NAME, served.workers[0].take, facts.record_for)
    await served.until(lambda: len(served.service._workers._cards) == 3)
    former = served.service._workers._router
    sizes = [former.scheduler.block_size]
    for older in served.workers:
        await older.runtime.close()
    await served.until(lambda: len(served.service._workers._cards) == 1)
    sizes.append(served.service._workers._router.scheduler.block_size)
    await served.until(lambda: served.service._workers._router.instance_ids)

    assert sizes == [4, 8]
    assert not former.instance_ids
    assert (await served.best(range(100))).worker_id == newer.instance_id


async def test_generate_forwards_request_and_response(served):
    client = served.asker.client(instances.EndpointName("dynamo", "router", "generate"))
    await client.wait_for_instances(PATIENT_S)
    receiver = Receiver()
    await client.open(request(*range(100)), receiver)
    await served.until(lambda: served.num_calls == 1)
    worker = next(worker for worker in served.workers if worker.calls)

    worker.answer()
    worker.finish()

    assert await receiver.over is None
    assert [output.token_ids for output in receiver.outputs] == [(1,), (2,)]
    assert receiver.outputs[-1].finish_reason is generate.FinishReason.LENGTH


async def test_cancelled_call_frees_the_worker(served):
    client = served.asker.client(instances.EndpointName("dynamo", "router", "generate"))
    await client.wait_for_instances(PATIENT_S)
    stream = await client.open(request(*range(100)), Receiver())
    await served.until(lambda: served.num_calls == 1)

    stream.cancel()

    loads = served.service._workers._router.scheduler.selector.active.loads.values()
    await served.until(lambda: sum(load.num_requests for load in loads) == 0)


async def test_cancel_of_one_choice_reaches_the_worker(served):
    client = served.asker.client(instances.EndpointName("dynamo", "router", "generate"))
    await client.wait_for_instances(PATIENT_S)
    receiver = Receiver()
    stream = await client.open(request(*range(100)), receiver)
    await served.until(lambda: served.num_calls == 1)
    worker = next(worker for worker in served.workers if worker.calls)
    signals = []
    worker.calls[0].on_signal(signals.append)
    worker.answer()
    await served.until(lambda: receiver.outputs)

    stream.send_signal(1)
    stream.send_signal(2)
    await served.until(lambda: signals[1:])
    worker.finish()

    assert await receiver.over is None
    assert signals == [1, 2]


async def test_request_that_a_fault_of_the_router_hits_fails_alone(served, monkeypatch):
    async def fail(*_, **__):
        raise ZeroDivisionError

    client = served.asker.client(instances.EndpointName("dynamo", "router", "generate"))
    await client.wait_for_instances(PATIENT_S)
    receiver = Receiver()
    with monkeypatch.context() as faulty:
        faulty.setattr(served.service._workers, "open_stream", fail)
        await client.open(request(), receiver)
        with pytest.raises(errors.DynamoError, match="internal error in the router: ZeroDiv"):
            raise await receiver.over
    await client.open(request(), Receiver())
    await served.until(lambda: served.num_calls == 1)
    stop = asyncio.Event()
    stop.set()

    await served.service.run(stop)  # raises the error of a task that ends the router


async def test_malformed_request_is_refused(served):
    with pytest.raises(errors.InvalidRequest, match="expected a BestWorkerRequest"):
        await served.ask("best_worker_id", {"tokens": 3}, msgspec.Raw)


@pytest.mark.parametrize("token_ids", [b"", b"12345"])
async def test_prompt_of_no_whole_tokens_is_refused_and_the_router_goes_on(served, token_ids):
    client = served.asker.client(instances.EndpointName("dynamo", "router", "generate"))
    await client.wait_for_instances(PATIENT_S)
    receiver = Receiver()
    malformed = msgspec.structs.replace(request(), token_ids=token_ids)
    await client.open(malformed, receiver)

    with pytest.raises(errors.InvalidRequest, match="token ids of 4 bytes each"):
        raise await receiver.over
    stop = asyncio.Event()
    stop.set()
    await served.service.run(stop)  # raises the error of a task that died


async def test_prompt_of_an_adapter_goes_to_a_worker_with_it(served):
    poet = served.workers[1]
    told = msgspec.structs.replace(card(), lora_names=("poet",))
    served.service._workers._update_card(poet.id, told)
    named = [await served.best(range(100), lora_name="poet") for _ in range(2)]
    client = served.asker.client(instances.EndpointName("dynamo", "router", "generate"))
    await client.wait_for_instances(PATIENT_S)
    for turn in range(2):
        await client.open(
            request(*range(turn * 1000, turn * 1000 + 9), lora_name="poet"), Receiver()
        )
    await served.until(lambda: served.num_calls == 2)

    assert {one.worker_id for one in named} == {poet.id}
    assert len(poet.calls) == 2
    with pytest.raises(errors.NoWorkers):
        await served.best(range(100), lora_name="clerk")


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ((), {}, "kv"),
        (("--router-mode", "least-loaded"), {}, "least-loaded"),
        ((), {"DYN_ROUTER_MODE": "round-robin"}, "round-robin"),
    ],
)
def test_router_of_its_own_knows_caches_unless_it_is_told_otherwise(flags, environ, expected):
    routing = options.load(
        router_main.ServiceRoutingConfig, prog="router", argv=flags, environ=environ
    )

    assert routing.router_mode == expected
    assert routing.uses_kv_events == (expected == "kv")


async def test_card_that_is_nested_without_end_is_left_out_and_the_next_one_read(served):
    key = f"{instances.CARDS}{NAME.path}/77"
    nested = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    await served.asker.discovery.put(key, nested)
    late = await served.runtime()
    await late.register(NAME, served.workers[0].take, card().record_for)

    await served.until(lambda: late.instance_id in served.service._workers._cards)


async def test_request_that_is_asked_for_again_counts_at_the_worker_of_the_last_answer(served):
    await served.best(range(100), request_id="a", update_states=True)
    again = await served.best(range(100), request_id="a", update_states=True)
    loads = served.service._workers._router.scheduler.selector.active.loads

    assert [w.instance_id for w, load in loads.items() if load.num_requests] == [again.worker_id]
