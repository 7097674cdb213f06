"""The client of an endpoint: whom it asks, and what it does about those that are lost."""

import asyncio
import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.protocols import generate, instances
from dynamo.runtime import client
from dynamo.runtime.backends import memory
from dynamo.testing import clock
from waiting import PATIENT_S

NAME = instances.EndpointName("dynamo", "backend", "generate")


class Plane:
    """A request plane without a network: it notes who is asked; who is in `dead` cannot be reached."""

    name = "memory"

    def __init__(self):
        self.asked, self.receivers, self.dead, self.may_move = [], [], set(), None
        self.ended = set()  # instances whose connection has ended
        self.answering = set()  # instances that are known to answer
        self.elsewhere = set()  # they serve another endpoint by now
        self.may_open = asyncio.Event()
        self.may_open.set()

    def is_answering(self, instance_id, address=None):
        if instance_id in self.ended:
            return False
        return True if instance_id in self.answering else None

    async def open(
        self,
        address,
        endpoint,
        body,
        receiver,
        *,
        instance_id,
        headers,
        timeout_s,
        may_move,
        gives_up_early,
    ):
        self.asked.append(int(address))
        self.instance_id = instance_id
        self.may_move = may_move
        await self.may_open.wait()
        if int(address) in self.dead:
            raise errors.WorkerLost(f"{address} is dead")
        if int(address) in self.elsewhere:
            raise errors.NoWorkers("'dynamo/backend/generate' is not served here")
        self.receivers.append(receiver)
        return (address, endpoint, body, headers, timeout_s)


class Receiver:
    def __init__(self):
        self.heard = []

    def receive(self, output):
        self.heard.append(output)

    def replied(self, body):
        self.heard.append(body)

    def ended(self, error):
        self.heard.append(error)


class World:
    """A client, whom it follows, and whom it asks."""

    def __init__(self):
        self.plane, self.clock = Plane(), clock.VirtualClock()
        self.registry = memory.MemoryDiscovery(memory.MemoryRegistry())
        self.changes = []
        self.client = client.EndpointClient(
            NAME, self.registry, self.plane, inhibited_s=5, time=self.clock, draw=lambda n: n - 1
        )
        self.client.on_change(lambda: self.changes.append(sorted(self.client.instances)))
        self.client.start()

    async def put(self, *ids, **fields):
        for number in ids:
            transport = fields.get("transport", {"memory": str(number)})
            instance = instances.Instance(
                namespace=NAME.namespace,
                component=NAME.component,
                endpoint=NAME.endpoint,
                instance_id=number,
                transport=transport,
            )
            await self.registry.put(instance.key, msgspec.json.encode(instance))
        await self.settle()

    async def delete(self, number):
        await self.registry.delete(f"{instances.INSTANCES}{NAME.path}/{number:x}")
        await self.settle()

    async def doubt(self, number):
        """Discovery has lost this instance, and it may live."""
        self.registry._registry.view.doubt(f"{instances.INSTANCES}{NAME.path}/{number:x}")
        await self.settle()

    async def settle(self):
        for _ in range(10):
            await asyncio.sleep(0)

    async def ask(self, **options):
        """Who was asked, in order."""
        self.plane.asked.clear()
        await self.client.open(None, Receiver(), **options)
        return list(self.plane.asked)


@pytest.fixture
async def world():
    world = World()
    yield world
    await world.client.close()


async def test_round_robin_goes_round(world):
    await world.put(10, 20, 30)
    asked = [await world.ask() for _ in range(4)]

    assert asked == [[10], [20], [30], [10]]


async def test_instance_that_serves_another_endpoint_by_now_is_passed_over(world):
    await world.put(10, 20)
    world.plane.elsewhere = {10}

    assert await world.ask() == [10, 20]
    with pytest.raises(errors.NoWorkers, match="not served here"):
        await world.ask(instance_id=10)


async def test_random_mode_uses_the_drawn_instance(world):
    await world.put(10, 20, 30)

    assert await world.ask(mode="random") == [30]


async def test_direct_request_uses_only_the_named_instance(world):
    await world.put(10, 20)
    world.plane.dead = {20}
    with pytest.raises(errors.WorkerLost):
        await world.ask(instance_id=20)
    with pytest.raises(errors.NoWorkers, match="no instance 1e"):
        await world.ask(instance_id=30)

    assert world.plane.asked == []
    assert await world.ask(instance_id=10) == [10]


async def test_stream_is_opened_with_the_given_arguments(world):
    await world.put(10)
    receiver = Receiver()
    stream = await world.client.open({"a": 1}, receiver, headers={"b": "c"}, timeout_s=2.0)

    assert stream == ("10", "dynamo/backend/generate", {"a": 1}, {"b": "c"}, 2.0)


async def test_error_without_instances_says_what_to_start(world):
    with pytest.raises(errors.NoWorkers, match=r"dyn://dynamo\.backend\.generate: start a worker"):
        await world.ask()


async def test_unreachable_instance_is_skipped_for_some_seconds(world):
    await world.put(10, 20)
    world.plane.dead = {10}

    assert await world.ask() == [10, 20]
    assert await world.ask() == [20]
    await world.clock.advance(5)
    assert await world.ask() == [10, 20]


async def test_request_tries_each_lost_instance_once_and_raises_the_cause(world):
    await world.put(10, 20)
    world.plane.dead = {10, 20}
    for _ in range(2):  # those that are down are tried again, as nobody else is left
        with pytest.raises(errors.NoWorkers, match=r"none of the 2 instances.* is dead"):
            await world.ask()
        assert sorted(world.plane.asked) == [10, 20]
    world.plane.dead = set()

    assert len(await world.ask()) == 1


async def test_instance_of_a_broken_stream_is_skipped_until_it_registers_again(world):
    await world.put(10, 20)
    receiver = Receiver()
    await world.client.open(None, receiver)
    output, broken = generate.Output((1,)), errors.StreamBroken("gone")
    world.plane.receivers[0].receive(output)
    world.plane.receivers[0].replied(b"x")
    world.plane.receivers[0].ended(broken)
    asked = [await world.ask() for _ in range(2)]
    await world.delete(10)
    await world.put(10)

    assert receiver.heard == [output, b"x", broken]
    assert asked == [[20], [20]]
    assert await world.ask() == [10]


async def test_only_one_request_tries_a_failed_instance_again(world):
    await world.put(10, 20)
    world.plane.dead = {10}
    await world.ask()
    await world.clock.advance(5)
    world.plane.may_open.clear()
    trial = asyncio.ensure_future(world.client.open(None, Receiver(), instance_id=10))
    await world.settle()
    others = [world.client.choose() for _ in range(2)]
    world.plane.dead = set()
    world.plane.may_open.set()
    await trial

    assert others == [20, 20]
    assert {tuple(await world.ask()) for _ in range(2)} == {(10,), (20,)}


@pytest.mark.parametrize("error", [None, errors.Overloaded("busy"), errors.EngineFailed("oh")])
async def test_stream_end_without_a_loss_keeps_the_instance(world, error):
    await world.put(10, 20)
    await world.client.open(None, Receiver())
    world.plane.receivers[0].ended(error)

    assert [await world.ask(), await world.ask()] == [[20], [10]]


async def test_listeners_are_called_with_changed_instances(world):
    await world.put(10, 20)
    await world.delete(10)

    assert world.changes == [[10], [10, 20], [20]]
    assert list(world.client.instances) == [20]


async def test_malformed_instance_record_is_ignored_and_logged(world, caplog):
    prefix = f"{instances.INSTANCES}{NAME.path}/"
    await world.registry.put(prefix + "a", b"no json")
    await world.registry.put(prefix + "not-hex", b"{}")
    await world.put(11, transport={"nats": "somewhere"})
    await world.put(12)

    assert list(world.client.instances) == [12]
    assert len(caplog.records) == 3


async def test_wait_for_instances_returns_when_an_instance_registers(world):
    waiting = asyncio.ensure_future(world.client.wait_for_instances(PATIENT_S))
    await world.settle()
    was_done = waiting.done()
    await world.put(10)
    await waiting

    assert not was_done


async def test_wait_for_instances_gives_up_in_time(world):
    await world.put(10)
    await world.delete(10)
    waiting = asyncio.create_task(world.client.wait_for_instances(PATIENT_S))
    await world.clock.advance(PATIENT_S)
    with pytest.raises(errors.NoWorkers):
        await waiting


ids_ = st.lists(st.integers(1, 2**62), min_size=1, max_size=9, unique=True).map(sorted)


@given(ids_, st.integers(0, 2**62))
def test_round_robin_asks_each_once_before_anyone_twice(ids, last):
    asked = []
    for _ in ids:
        last = client.round_robin(ids, last)
        asked.append(last)

    assert sorted(asked) == ids


def test_round_robin_continues_after_the_last_chosen_instance_left():
    assert client.round_robin([10, 30], 20) == 30
    assert client.round_robin([10, 30], 30) == 10


def test_random_choice_is_uniform_and_reproducible_by_seed():
    draws = [client.at_random([1, 2, 3], random.Random(7).randrange) for _ in range(2)]
    draw = random.Random(7).randrange
    counts = Counter(client.at_random([1, 2, 3], draw) for _ in range(3000))

    assert draws[0] == draws[1]
    assert all(900 < counts[i] < 1100 for i in (1, 2, 3))


def test_all_instances_are_candidates_without_failures():
    ids = (1, 2, 3)

    assert client.candidates(ids, {}, 0.0, ()) is ids


def test_failed_instance_is_no_candidate_until_its_deadline():
    assert client.candidates((1, 2, 3), {2: 5.0}, 4.9, ()) == [1, 3]
    assert client.candidates((1, 2, 3), {2: 5.0}, 5.0, ()) == [1, 2, 3]


def test_failed_instances_are_candidates_if_no_other_is_left():
    assert client.candidates((1, 2), {1: 5.0, 2: 5.0}, 4.0, ()) == [1, 2]
    assert client.candidates((1, 2), {2: 5.0}, 4.0, {1}) == [2]


@given(ids_, st.data())
def test_tried_instances_are_never_candidates_again(ids, data):
    tried = data.draw(st.sets(st.sampled_from(ids)))
    down = data.draw(st.dictionaries(st.sampled_from(ids), st.floats(0, 10)))
    found = client.candidates(ids, down, 5.0, tried)

    assert set(found) <= set(ids) - tried
    assert bool(found) == (set(ids) != tried)


async def test_silent_instance_is_given_up_only_for_one_that_can_take_over(world):
    await world.put(10, 20)
    serving = {10}
    await world.ask(instance_id=10, alternatives=lambda: serving)
    verdicts = [world.plane.may_move()]
    serving.add(20)
    verdicts.append(world.plane.may_move())
    world.client.report_down(20)
    verdicts.append(world.plane.may_move())
    await world.delete(10)
    verdicts.append(world.plane.may_move())

    assert verdicts == [False, True, False, True]


async def test_instance_whose_connection_has_ended_is_down(world):
    await world.put(10, 20)
    world.plane.ended = {10}

    assert [world.client.is_down(number) for number in (10, 20)] == [True, False]


async def test_lost_instance_that_answers_again_is_not_down_though_no_request_comes(world):
    await world.put(10)
    world.client.report_down(10)
    world.plane.answering = {10}
    verdicts = [world.client.is_down(10)]
    await world.clock.advance(5)
    verdicts.append(world.client.is_down(10))

    assert verdicts == [True, False]


async def test_lost_instance_that_does_not_answer_stays_down(world):
    await world.put(10)
    world.client.report_down(10)
    await world.clock.advance(60)

    assert world.client.is_down(10)


async def test_instance_that_discovery_has_lost_is_asked_last_though_it_answers(world):
    await world.put(10, 20)
    await world.doubt(10)
    await world.ask(instance_id=10)
    await world.clock.advance(60)
    asked = [await world.ask() for _ in range(3)]
    await world.delete(20)
    asked.append(await world.ask())

    assert asked == [[20], [20], [20], [10]]


async def test_instance_that_discovery_confirms_again_takes_its_turn(world):
    await world.put(10, 20)
    await world.doubt(10)
    await world.put(10)
    asked = [await world.ask() for _ in range(2)]

    assert sorted(asked) == [[10], [20]]


async def test_silent_instance_is_always_given_up_by_those_who_need_not_ask_it(world):
    await world.put(10)
    await world.ask()

    assert world.plane.may_move is None


async def test_request_names_the_instance_that_was_chosen(world):
    await world.put(10)
    await world.client.open(None, Receiver())

    assert world.plane.instance_id == 10
