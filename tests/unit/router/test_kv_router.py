"""The router of one model: it sends, learns from what comes back, and forgets what is over."""

import asyncio

import pytest
from routing_rig import Receiver, request

from dynamo.base import errors
from dynamo.router import route

LONG = range(400)  # tokens


def in_flight(world):
    return sum(load.num_requests for load in world.made.selector.active.loads.values())


async def test_two_different_prompts_go_to_two_workers(world):
    await world.route(2)

    await world.open(*range(100))
    await world.open(*range(1000, 1100))

    assert [len(worker.calls) for worker in world.workers] == [1, 1]


async def test_a_prompt_in_flight_draws_the_same_prompt(world):
    await world.route(2)
    await world.open(*LONG)
    first = next(worker for worker in world.workers if worker.calls)

    await world.open(*LONG)

    assert len(first.calls) == 2


async def test_a_prospect_tells_what_waits_and_what_would_be_in_use(world):
    await world.route(1, {"max_num_batched_tokens": 200})
    await world.open(*LONG)

    found = world.made.estimate_load(request(*range(1000, 1100)))

    assert (found.num_new, found.num_ahead, found.num_steps_ahead) == (100, 400, 2)
    assert found.share_in_use == (100 + 25) / 10_000


async def test_the_first_output_ends_the_prefill_and_the_end_frees(world):
    await world.route(1)
    _, receiver = await world.open(*LONG)
    (load,) = world.made.selector.active.loads.values()
    assert load.prefill_tokens == 400

    world.workers[0].answer()
    await world.until(lambda: load.prefill_tokens == 0)
    assert in_flight(world) == 1
    world.workers[0].finish()
    assert await receiver.over is None

    assert in_flight(world) == 0


async def test_a_cancelled_stream_frees(world):
    await world.route(1)
    stream, _ = await world.open()

    stream.cancel()

    assert in_flight(world) == 0


async def test_an_answer_that_breaks_frees_and_is_told(world):
    await world.route(1)
    _, receiver = await world.open()

    world.workers[0].calls[0].fail(errors.EngineFailed("no"))

    assert isinstance(await receiver.over, errors.EngineFailed)
    assert in_flight(world) == 0


async def test_a_worker_that_cannot_be_reached_is_passed_over(world):
    await world.route(2)
    lost, living = world.workers
    await lost.runtime.requests.close()  # it is still listed

    for _ in range(4):
        await world.open(*LONG)

    assert len(living.calls) == 4
    assert in_flight(world) == 4


async def test_none_that_can_be_reached_is_an_error_and_leaves_nothing(world):
    await world.route(2)
    for worker in world.workers:
        await worker.runtime.requests.close()

    with pytest.raises(errors.NoWorkers, match="can be reached"):
        await world.made.open_stream(request(), Receiver())

    assert in_flight(world) == 0


async def test_without_workers_it_says_so(world):
    await world.route(0)

    with pytest.raises(errors.NoWorkers, match="no worker serves this model"):
        await world.made.open_stream(request(), Receiver())


async def test_a_named_worker_gets_it_and_an_unknown_one_is_refused(world):
    await world.route(2)

    await world.open(instance_id=world.workers[1].id)

    assert len(world.workers[1].calls) == 1
    with pytest.raises(errors.InvalidRequest, match="expected the id of a worker"):
        await world.made.open_stream(request(), Receiver(), route.RoutingOptions(instance_id=7))


async def test_a_session_stays_with_its_worker(world):
    await world.route(4, router_session_affinity_ttl_secs=60.0)

    for turn in range(6):
        await world.open(*range(turn * 1000, turn * 1000 + 100), session_id="s")

    assert sorted(len(worker.calls) for worker in world.workers) == [0, 0, 0, 6]


async def test_a_session_whose_worker_is_lost_goes_to_another(world):
    await world.route(2, router_session_affinity_ttl_secs=60.0)
    await world.open(session_id="s")
    lost = next(worker for worker in world.workers if worker.calls)
    other = next(worker for worker in world.workers if worker is not lost)
    await lost.runtime.requests.close()  # it is still listed

    for _ in range(3):
        await world.open(session_id="s")

    assert len(other.calls) == 3


async def test_a_session_does_not_go_where_it_should_not(world):
    await world.route(2, router_session_affinity_ttl_secs=60.0)
    await world.open(session_id="s")
    lost = next(worker for worker in world.workers if worker.calls)
    other = next(worker for worker in world.workers if worker is not lost)
    await world.made.open_stream(
        request(session_id="s"), Receiver(), route.RoutingOptions(allowed_instances={other.id})
    )
    await world.until(lambda: other.calls)

    assert len(other.calls) == 1


async def test_data_parallel_ranks_are_workers_of_their_own(world):
    await world.route(1, facts={"data_parallel_size": 2})

    await world.open(*range(100))
    await world.open(*range(1000, 1100))

    ranks = [one.data_parallel_rank for one in world.workers[0].requests]
    assert sorted(ranks) == [0, 1]  # told even if it is 0: else the worker would choose


async def test_a_rank_that_the_caller_names_is_kept_and_an_unknown_one_refused(world):
    await world.route(2, facts={"data_parallel_size": 2})

    for number in range(4):
        await world.open(*range(number * 1000, number * 1000 + 100), data_parallel_rank=1)

    asked = [one.data_parallel_rank for worker in world.workers for one in worker.requests]
    assert asked == [1] * 4
    with pytest.raises(errors.InvalidRequest, match="data_parallel_rank: expected at most 1"):
        await world.open(data_parallel_rank=2)


async def test_a_worker_without_ranks_is_told_none(world):
    await world.route(1)

    await world.open()

    assert [one.data_parallel_rank for one in world.workers[0].requests] == [None]


async def test_requests_wait_while_their_worker_is_busy_and_go_when_it_is_not(world):
    await world.route(1, facts={"max_num_batched_tokens": 100})
    await world.open(*LONG)
    waiting = asyncio.create_task(world.made.open_stream(request(*range(5000, 5400)), Receiver()))
    await world.until(lambda: world.metric("dynamo_frontend_router_queue_pending_requests") == 1)
    assert world.num_calls == 1

    world.workers[0].answer()
    await waiting

    assert world.metric("dynamo_frontend_router_queue_pending_requests") == 0
    await world.until(lambda: world.num_calls == 2)


async def test_one_that_gives_up_waiting_leaves_the_queue(world):
    await world.route(1, facts={"max_num_batched_tokens": 100})
    await world.open(*LONG)
    waiting = asyncio.create_task(world.made.open_stream(request(*range(5000, 5400)), Receiver()))
    await world.until(lambda: world.made.selector.num_waiting == 1)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert world.made.selector.num_waiting == 0
    assert world.metric("dynamo_frontend_router_queue_pending_requests") == 0


async def test_a_caller_that_goes_while_it_waits_leaves_the_queue(world):
    await world.route(1, facts={"max_num_batched_tokens": 100})
    await world.open(*LONG)
    gone = []
    waiting = asyncio.create_task(
        world.made.open_stream(
            request(*range(5000, 5400)),
            Receiver(),
            route.RoutingOptions(add_disconnect_callback=gone.append),
        )
    )
    await world.until(lambda: world.made.selector.num_waiting == 1)

    gone[0]()
    with pytest.raises(errors.Cancelled):
        await waiting

    assert world.made.selector.num_waiting == 0


async def test_one_that_waits_too_long_is_refused_as_overload(world):
    await world.route(1, facts={"max_num_batched_tokens": 100}, router_queue_timeout_secs=0.01)
    await world.open(*LONG)

    with pytest.raises(errors.Overloaded, match="have been busy"):
        await world.made.open_stream(request(*range(5000, 5400)), Receiver())

    assert world.made.selector.num_waiting == 0
    assert world.metric("dynamo_frontend_router_queue_backpressure_total") == 1


async def test_a_worker_that_vanishes_takes_its_requests_from_the_accounts(world):
    await world.route(2)
    await world.open(*LONG)
    busy = next(worker for worker in world.workers if worker.calls)

    await busy.runtime.close()
    await world.until(lambda: len(world.client.instances) == 1)

    assert in_flight(world) == 0
    assert len(world.made.selector.active.loads) == 1


async def test_hits_are_counted_as_predicted_and_as_confirmed(world):
    await world.route(1)
    _, receiver = await world.open(*LONG)
    world.workers[0].answer(cached=100)
    world.workers[0].finish()
    await receiver.over

    assert world.metric("dynamo_router_kv_cache_hit_ratio") == 0.25
    assert world.metric("dynamo_router_kv_cache_predicted_hit_ratio") == 0
    assert world.metric("dynamo_router_overhead_total_ms_count") == 1


async def test_without_events_earlier_choices_tell_what_is_cached(world):
    await world.route(3, kv_events=False)

    for _ in range(4):
        _, receiver = await world.open(*LONG)
        worker = next(worker for worker in world.workers if worker.calls)
        worker.answer()
        worker.finish()
        await receiver.over

    assert sorted(len(worker.calls) for worker in world.workers) == [0, 0, 4]


@pytest.mark.parametrize("mode", ["least-loaded", "power-of-two", "consistent-hash"])
async def test_other_modes_route_too(world, mode):
    await world.route(3, router_mode=mode)

    for turn in range(6):
        await world.open(*range(turn * 1000, turn * 1000 + 100))

    assert world.num_calls == 6


async def test_direct_mode_wants_the_worker_named(world):
    await world.route(2, router_mode="direct")

    with pytest.raises(errors.InvalidRequest, match="direct"):
        await world.made.open_stream(request(), Receiver())
    await world.open(instance_id=world.workers[0].id)

    assert len(world.workers[0].calls) == 1


async def test_plain_modes_take_turns(world):
    await world.route(3, router_mode="round-robin")

    for _ in range(6):
        await world.open(*LONG)

    assert [len(worker.calls) for worker in world.workers] == [2, 2, 2]


@pytest.mark.parametrize(
    ("second", "shares"),
    [("poet", True), ("clerk", False), (None, False)],
    ids=["the same adapter", "another", "none"],
)
async def test_prefixes_are_an_adapter_s_own(world, second, shares):
    await world.route(2)
    await world.open(*LONG, lora_name="poet")

    found = world.made.estimate_load(request(*LONG, lora_name=second))
    index = [prompt_of(world, name).sequence_hashes for name in ("poet", second)]

    assert (index[0] == index[1]) is shares
    assert found.num_requests == (1 if shares else 0)  # else it would go where nobody is
    assert (found.num_new == 400) is not shares


def prompt_of(world, lora_name):
    return world.made._make_prompt(request(*LONG, lora_name=lora_name), None, None)


async def test_who_waits_for_an_adapter_is_refused_when_the_last_that_has_it_is_lost(world):
    full = {"max_num_batched_tokens": 100}
    await world.route(2, full, router_queue_threshold=1.0, router_queue_timeout_secs=30.0)
    for turn in range(2):
        await world.open(*range(turn * 1000, turn * 1000 + 400))
    poet, other = world.workers
    terms = route.RoutingOptions(allowed_instances={poet.id})
    waiting = asyncio.ensure_future(
        world.made.open_stream(request(*LONG, lora_name="poet"), Receiver(), terms)
    )
    await world.until(lambda: world.made.selector.num_waiting == 1)
    num_before = len(other.calls)
    await poet.runtime.close()
    for number in range(num_before):
        other.answer(number)
        other.finish(number)

    with pytest.raises(errors.NoWorkers, match="lost in the wait"):
        await waiting
    assert len(other.calls) == num_before
    await world.until(lambda: in_flight(world) == 0)
