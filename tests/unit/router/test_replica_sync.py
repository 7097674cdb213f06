"""Routers that tell each other what is in flight, over the planes of one process."""

import asyncio

import pytest

from dynamo.base import errors
from dynamo.protocols import generate
from dynamo.protocols import load as load_events
from dynamo.router import api, replica_sync
from dynamo.router.api import Decision, Prompt
from dynamo.runtime import component
from dynamo.runtime.backends import memory, server_connection
from waiting import PATIENT_S

PROMPT = Prompt(num_tokens=8, block_size=4, sequence_hashes=[1, 2])


class Router:
    """One of them, and what it believes the others have in flight: key to whether the prompt is computed."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.others = {}
        self.heard = asyncio.Event()
        self.sync = replica_sync.ReplicaSync(
            runtime, namespace="n", component_name="backend", apply=self.apply
        )

    def apply(self, event):
        match event.data:
            case load_events.AddRequest(is_prefill_completed=computed):
                self.others[event.request_id] = computed
            case load_events.MarkPrefillCompleted():
                self.others[event.request_id] = True
            case load_events.Free():
                self.others.pop(event.request_id, None)
        self.heard.set()

    def send(self, key):
        self.sync.publish_add(key, Decision(api.Worker(7), 1.0), PROMPT)

    async def until(self, **others):
        async with asyncio.timeout(PATIENT_S):
            while self.others != others:
                self.heard.clear()
                await self.heard.wait()


@pytest.fixture
async def join():
    cluster, routers = component.MemoryCluster(), []

    async def make():
        router = Router(
            await component.DistributedRuntime.in_memory(cluster, item_type=generate.Output)
        )
        await router.sync.start()
        routers.append(router)
        return router

    yield make
    for router in routers:
        await router.sync.close()
        await router.runtime.close()


async def meet(*routers):
    """Until each has told one request of its own to all others, and ended it."""
    for router in routers:
        router.send("hello")
        await asyncio.gather(
            *(other.until(hello=False) for other in routers if other is not router)
        )
        router.sync.publish_free("hello")
        await asyncio.gather(*(other.until() for other in routers if other is not router))


async def test_changes_reach_the_other_router(join):
    here, there = await join(), await join()
    await meet(here, there)

    here.send("a")
    await there.until(a=False)
    here.sync.publish_prefill_completed("a")
    await there.until(a=True)
    here.sync.publish_free("a")

    await there.until()


async def test_late_router_learns_the_requests_in_flight(join):
    here = await join()
    here.send("a")
    here.send("b")
    here.sync.publish_prefill_completed("b")

    late = await join()

    await late.until(a=False, b=True)


async def test_snapshot_comes_in_parts_of_bounded_length(join, monkeypatch):
    monkeypatch.setattr(replica_sync, "PART_BLOCKS", 11, raising=False)  # each has two
    here = await join()
    for number in range(12):
        here.send(str(number))
    sizes, replied = [], server_connection.ServerCall.reply

    def reply(call, value):
        sizes.extend([len(value.requests)] if value.requests else [])  # the late one has none
        replied(call, value)

    monkeypatch.setattr(server_connection.ServerCall, "reply", reply)
    late = await join()

    await late.until(**{str(number): False for number in range(12)})
    assert sizes == [5, 5, 2]


async def test_requests_of_a_lost_router_are_freed(join):
    here, there = await join(), await join()
    await meet(here, there)
    here.send("a")
    await there.until(a=False)

    await here.runtime.close()

    await there.until()


async def test_lost_message_is_recovered_by_a_snapshot(join):
    here, there = await join(), await join()
    await meet(here, there)
    publish = here.runtime.events.publish
    here.runtime.events.publish = lambda topic, payload: publish("elsewhere", payload)
    here.send("lost")
    await asyncio.sleep(0)  # the turn of the loop after which it is published
    here.runtime.events.publish = publish
    number = len(there.others)
    assert not number

    there.sync.request_snapshots()

    await there.until(lost=False)


async def test_changes_of_one_turn_are_one_message(join):
    here, there = await join(), await join()
    await meet(here, there)
    published = []
    here.runtime.events.publish = lambda topic, payload: published.append(payload)

    for number in range(5):
        here.send(str(number))
    await asyncio.sleep(0)

    assert len(published) == 1


async def test_snapshot_omits_ended_requests(join):
    here, there = await join(), await join()
    await meet(here, there)

    here.sync.publish_free("never seen")
    here.sync.publish_prefill_completed("never seen")
    here.send("a")

    await there.until(a=False)


async def test_changes_that_are_too_long_for_one_message_are_several(join):
    here, there = await join(), await join()
    await meet(here, there)
    publish = here.runtime.events.publish

    def publish_short(topic, payload):
        if len(payload) > 300:
            raise errors.LocalProtocolError("too long")
        publish(topic, payload)

    here.runtime.events.publish = publish_short
    for number in range(5):
        here.send(str(number))
    here.send("x" * 300)
    await there.until(**{str(number): False for number in range(5)})
    here.sync.publish_free("0")

    await there.until(**{str(number): False for number in range(1, 5)})


async def test_snapshot_of_a_router_that_has_left_meanwhile_counts_no_requests(join):
    here, there = await join(), await join()
    await meet(here, there)
    here.send("a")
    await there.until(a=False)
    answer, fetch = asyncio.Event(), there.sync._fetch

    async def fetch_late(*arguments):
        snapshot = await fetch(*arguments)
        await answer.wait()
        return snapshot

    there.sync._fetch = fetch_late
    there.sync.request_snapshots()
    await asyncio.sleep(0)
    await here.runtime.records.deregister()  # as it does while it finishes its requests
    await there.until()
    answer.set()
    await asyncio.gather(*there.sync._tasks._running)

    assert there.others == {}


async def test_router_that_starts_while_discovery_is_away_is_met_when_it_is_back(join, monkeypatch):
    put = memory.MemoryDiscovery.put

    async def put_while_away(registry, key, value):
        await put(registry, key, value)  # when it is back
        raise errors.Unavailable("etcd is away")

    monkeypatch.setattr(memory.MemoryDiscovery, "put", put_while_away)
    here, there = await join(), await join()

    await meet(here, there)


async def test_snapshot_that_fails_costs_no_known_request_and_is_asked_for_again(join, monkeypatch):
    monkeypatch.setattr(replica_sync, "RETRY_S", 0.0, raising=False)
    here, there = await join(), await join()
    await meet(here, there)
    here.send("known")
    await there.until(known=False)
    plane = here.runtime.events
    publish, plane.publish = plane.publish, lambda topic, _: plane._topics.take_number(topic)
    here.send("lost")
    await asyncio.sleep(0)  # the turn of the loop after which it is published
    plane.publish = publish
    failures, seen = [errors.Unavailable("busy")], []
    fetch, apply = there.sync._fetch, there.sync._apply

    async def fetch_again(*arguments):
        if failures:
            raise failures.pop()
        return await fetch(*arguments)

    def watch(event):
        apply(event)
        seen.append("known" in there.others)

    there.sync._fetch, there.sync._apply = fetch_again, watch
    here.send("next")

    await there.until(known=False, lost=False, next=False)
    assert all(seen)


async def test_request_that_ended_unheard_is_freed_by_one_snapshot_only(join):
    here, there = await join(), await join()
    await meet(here, there)
    here.send("a")
    await there.until(a=False)
    plane = here.runtime.events
    publish, plane.publish = plane.publish, lambda topic, _: plane._topics.take_number(topic)
    here.sync.publish_free("a")
    await asyncio.sleep(0)  # the turn of the loop after which it is published
    plane.publish = publish
    there.sync.request_snapshots()
    await there.until()
    freed = []

    there.sync._apply = freed.append
    there.sync.request_snapshots()
    await asyncio.gather(*there.sync._tasks._running)

    assert freed == []
