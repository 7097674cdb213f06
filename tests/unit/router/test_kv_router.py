"""The KV router of one model: sessions, decisions, queue and the bookkeeping of requests."""

import asyncio

import pytest
from routing_rig import Receiver, Worker, card, request

from dynamo.base import errors
from dynamo.protocols import generate
from dynamo.router import api, kv_scheduler, route
from waiting import PATIENT_S

HERE, THERE = api.Worker(1), api.Worker(2)


def test_session_keeps_its_worker_for_its_ttl():
    sessions = kv_scheduler.SessionAffinity(10)
    sessions.assign_worker("s", HERE, now=100)

    assert sessions.find_worker("s", {HERE, THERE}, now=109) == HERE
    assert sessions.find_worker("s", {HERE, THERE}, now=110) is None


def test_each_request_renews_the_ttl_of_a_session():
    sessions = kv_scheduler.SessionAffinity(10)
    sessions.assign_worker("s", HERE, now=100)
    sessions.assign_worker("s", HERE, now=109)

    assert sessions.find_worker("s", {HERE}, now=115) == HERE


def test_lost_worker_is_not_returned_for_a_session():
    sessions = kv_scheduler.SessionAffinity(10)
    sessions.assign_worker("s", HERE, now=100)

    assert sessions.find_worker("s", {THERE}, now=101) is None


def test_unknown_session_has_no_worker():
    assert kv_scheduler.SessionAffinity(10).find_worker("s", {HERE}, now=0) is None


def test_least_recently_used_sessions_are_forgotten_first():
    sessions = kv_scheduler.SessionAffinity(10, max_sessions=2)
    for name in ("a", "b", "a", "c"):
        sessions.assign_worker(name, HERE, now=0)

    assert len(sessions) == 2
    assert sessions.find_worker("b", {HERE}, now=1) is None
    assert sessions.find_worker("a", {HERE}, now=1) == HERE


LONG = range(400)  # tokens


def in_flight(world):
    return sum(load.num_requests for load in world.made.scheduler.selector.active.loads.values())


async def test_two_different_prompts_go_to_two_workers(world):
    await world.route(2)

    await world.open(*range(100))
    await world.open(*range(1000, 1100))

    assert [len(worker.calls) for worker in world.workers] == [1, 1]


async def test_same_prompt_follows_the_one_in_flight(world):
    await world.route(2)
    await world.open(*LONG)
    first = next(worker for worker in world.workers if worker.calls)

    await world.open(*LONG)

    assert len(first.calls) == 2


async def test_load_estimate_has_queue_and_blocks_in_use(world):
    await world.route(1, {"max_num_batched_tokens": 200})
    await world.open(*LONG)

    found = world.made.estimate_load(request(*range(1000, 1100)))

    assert (found.num_new, found.num_ahead, found.num_steps_ahead) == (100, 400, 2)
    assert found.share_in_use == (100 + 25) / 10_000


class FailingPolicy:
    """A user's policy that selects the first worker, until `fails` says what it does instead."""

    uses_cache = waits_for_worker = True
    fails = None

    def select_worker(self, prompt, candidates, now):
        if FailingPolicy.fails is not None:
            return FailingPolicy.fails()
        return api.Decision(min(candidates.loads), 0)


def raise_key_error():
    raise KeyError("no such tenant")


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (raise_key_error, "KeyError: 'no such tenant'"),
        (lambda: None, "expected a Decision for one of the candidates, got None"),
        (lambda: api.Decision(api.Worker(9), 0), "got Decision"),
    ],
)
async def test_policy_of_a_user_that_fails_costs_one_warning_and_workers_are_still_followed(
    world, monkeypatch, caplog, fails, reason
):
    policy = f"{__name__}:FailingPolicy"
    await world.route(1, {"max_num_seqs": 1}, router_policy=policy, router_queue_threshold=1.0)
    await world.open(*range(100))
    queued = asyncio.ensure_future(world.made.open_stream(request(*range(1000, 1100)), Receiver()))
    await world.until(lambda: world.made.scheduler.selector.num_waiting)
    monkeypatch.setattr(FailingPolicy, "fails", staticmethod(fails))
    late = await world.runtime()
    world.workers.append(Worker(late, {}))
    world.made.set_model_cards({worker.id: card() for worker in world.workers})
    await world.workers[1].join()
    await world.until(lambda: len(world.client.instances) == 2)
    async with asyncio.timeout(PATIENT_S):
        await queued
    await world.workers[1].runtime.close()
    await world.until(lambda: len(world.client.instances) == 1)

    (warning,) = [each for each in caplog.messages if "FailingPolicy" in each]
    assert reason in warning


async def test_first_output_ends_prefill_and_end_frees_the_request(world):
    await world.route(1)
    _, receiver = await world.open(*LONG)
    (load,) = world.made.scheduler.selector.active.loads.values()
    assert load.prefill_tokens == 400

    world.workers[0].answer()
    await world.until(lambda: load.prefill_tokens == 0)
    assert in_flight(world) == 1
    world.workers[0].finish()
    assert await receiver.over is None

    assert in_flight(world) == 0


async def test_outputs_that_came_together_reach_the_receiver_together(world, monkeypatch):
    class Together(Receiver):
        def receive_all(self, outputs):
            self.outputs.append(outputs)

    async def open_stream(body, receiver, **options):
        opened.append(receiver)

    opened = []
    await world.route(1)
    monkeypatch.setattr(world.made._client, "open", open_stream)
    apart, together = Receiver(), Together()
    await world.made.open_stream(request(*LONG), apart)
    await world.made.open_stream(request(*LONG), together)
    (load,) = world.made.scheduler.selector.active.loads.values()

    assert opened[0].receive_all is None
    opened[1].receive_all([generate.Output((1,), cached_tokens=0), generate.Output((2,))])

    assert [[output.token_ids for output in outputs] for outputs in together.outputs] == [
        [(1,), (2,)]
    ]
    assert load.prefill_tokens == 400  # those of the other request


async def test_cancelled_stream_frees_the_request(world):
    await world.route(1)
    stream, _ = await world.open()

    stream.cancel()

    assert in_flight(world) == 0


async def test_broken_response_frees_the_request_and_is_reported(world):
    await world.route(1)
    _, receiver = await world.open()

    world.workers[0].calls[0].fail(errors.EngineFailed("no"))

    assert isinstance(await receiver.over, errors.EngineFailed)
    assert in_flight(world) == 0


async def test_unreachable_worker_is_skipped(world):
    await world.route(2)
    lost, living = world.workers
    await lost.runtime.requests.close()  # it is still listed

    for _ in range(4):
        await world.open(*LONG)

    assert len(living.calls) == 4
    assert in_flight(world) == 4


async def test_no_reachable_worker_is_an_error_and_frees_the_request(world):
    await world.route(2)
    for worker in world.workers:
        await worker.runtime.requests.close()

    with pytest.raises(errors.NoWorkers, match="can be reached"):
        await world.made.open_stream(request(), Receiver())

    assert in_flight(world) == 0


async def test_no_worker_is_an_error(world):
    await world.route(0)

    with pytest.raises(errors.NoWorkers, match="no worker serves this model"):
        await world.made.open_stream(request(), Receiver())


async def test_named_worker_is_used_and_an_unknown_one_refused(world):
    await world.route(2)

    await world.open(instance_id=world.workers[1].id)

    assert len(world.workers[1].calls) == 1
    with pytest.raises(errors.InvalidRequest, match="expected the id of a worker"):
        await world.made.open_stream(request(), Receiver(), route.RoutingOptions(instance_id=7))


async def test_session_stays_with_its_worker(world):
    await world.route(4, router_session_affinity_ttl_secs=60.0)

    for turn in range(6):
        await world.open(*range(turn * 1000, turn * 1000 + 100), session_id="s")

    assert sorted(len(worker.calls) for worker in world.workers) == [0, 0, 0, 6]


async def test_session_of_a_lost_worker_moves_to_another(world):
    await world.route(2, router_session_affinity_ttl_secs=60.0)
    await world.open(session_id="s")
    lost = next(worker for worker in world.workers if worker.calls)
    other = next(worker for worker in world.workers if worker is not lost)
    await lost.runtime.requests.close()  # it is still listed

    for _ in range(3):
        await world.open(session_id="s")

    assert len(other.calls) == 3


async def test_session_respects_allowed_instances(world):
    await world.route(2, router_session_affinity_ttl_secs=60.0)
    await world.open(session_id="s")
    lost = next(worker for worker in world.workers if worker.calls)
    other = next(worker for worker in world.workers if worker is not lost)
    await world.made.open_stream(
        request(session_id="s"), Receiver(), route.RoutingOptions(allowed_instances={other.id})
    )
    await world.until(lambda: other.calls)

    assert len(other.calls) == 1


async def test_data_parallel_ranks_count_as_separate_workers(world):
    await world.route(1, facts={"data_parallel_size": 2})

    await world.open(*range(100))
    await world.open(*range(1000, 1100))

    ranks = [one.data_parallel_rank for one in world.workers[0].requests]
    assert sorted(ranks) == [0, 1]  # told even if it is 0: else the worker would choose


async def test_named_rank_is_used_and_an_unknown_one_refused(world):
    await world.route(2, facts={"data_parallel_size": 2})

    for number in range(4):
        await world.open(*range(number * 1000, number * 1000 + 100), data_parallel_rank=1)

    asked = [one.data_parallel_rank for worker in world.workers for one in worker.requests]
    assert asked == [1] * 4
    with pytest.raises(errors.InvalidRequest, match="data_parallel_rank: expected at most 1"):
        await world.open(data_parallel_rank=2)


async def test_unknown_rank_of_a_named_worker_is_refused_as_a_rank(world):
    await world.route(2, facts={"data_parallel_size": 2})

    with pytest.raises(errors.InvalidRequest, match="data_parallel_rank: expected at most 1"):
        await world.open(instance_id=world.workers[0].id, data_parallel_rank=2)


@pytest.mark.parametrize("mode", ["kv", "direct"])
async def test_requests_for_a_named_worker_are_spread_over_its_ranks(world, mode):
    await world.route(2, facts={"data_parallel_size": 2}, router_mode=mode)
    named = world.workers[0]

    for number in range(4):
        await world.open(*range(number * 1000, number * 1000 + 100), instance_id=named.id)

    assert sorted(one.data_parallel_rank for one in named.requests) == [0, 0, 1, 1]
    await world.open(instance_id=named.id, data_parallel_rank=0)
    assert named.requests[-1].data_parallel_rank == 0


async def test_named_rank_comes_before_that_of_the_session(world):
    await world.route(1, facts={"data_parallel_size": 2}, router_session_affinity_ttl_secs=60.0)
    await world.open(session_id="s", data_parallel_rank=0)
    await world.open(session_id="s", data_parallel_rank=1)
    await world.open(session_id="s")

    assert [one.data_parallel_rank for one in world.workers[0].requests] == [0, 1, 1]


async def test_worker_with_one_rank_gets_no_rank(world):
    await world.route(1)

    await world.open()

    assert [one.data_parallel_rank for one in world.workers[0].requests] == [None]


async def test_queued_request_starts_when_its_worker_is_free(world):
    await world.route(1, facts={"max_num_batched_tokens": 100})
    await world.open(*LONG)
    waiting = asyncio.create_task(world.made.open_stream(request(*range(5000, 5400)), Receiver()))
    await world.until(lambda: world.metric("dynamo_frontend_router_queue_pending_requests") == 1)
    assert world.num_calls == 1

    world.workers[0].answer()
    await waiting

    assert world.metric("dynamo_frontend_router_queue_pending_requests") == 0
    await world.until(lambda: world.num_calls == 2)


async def test_worker_that_left_after_it_was_selected_is_passed_over(world, monkeypatch):
    await world.route(2)
    select, decisions = world.made.scheduler.selector.select, []

    def select_departed(*args):
        decision = select(*args)
        if not decisions:  # the first decision names a worker that has left discovery since
            decision = decision._replace(worker=api.Worker(7, 0))
        decisions.append(decision)
        return decision

    monkeypatch.setattr(world.made.scheduler.selector, "select", select_departed)
    await world.open(*LONG)

    assert len(decisions) == 2
    assert in_flight(world) == 1


async def test_cancelled_wait_leaves_the_queue(world):
    await world.route(1, facts={"max_num_batched_tokens": 100})
    await world.open(*LONG)
    waiting = asyncio.create_task(world.made.open_stream(request(*range(5000, 5400)), Receiver()))
    await world.until(lambda: world.made.scheduler.selector.num_waiting == 1)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert world.made.scheduler.selector.num_waiting == 0
    assert world.metric("dynamo_frontend_router_queue_pending_requests") == 0


async def test_disconnected_client_leaves_the_queue(world):
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
    await world.until(lambda: world.made.scheduler.selector.num_waiting == 1)

    gone[0]()
    with pytest.raises(errors.Cancelled):
        await waiting

    assert world.made.scheduler.selector.num_waiting == 0


async def test_queue_timeout_is_refused_as_overload(world):
    await world.route(1, facts={"max_num_batched_tokens": 100}, router_queue_timeout_secs=0.01)
    await world.open(*LONG)

    with pytest.raises(errors.Overloaded, match="have been busy"):
        await world.made.open_stream(request(*range(5000, 5400)), Receiver())

    assert world.made.scheduler.selector.num_waiting == 0
    assert world.metric("dynamo_frontend_router_queue_backpressure_total") == 1


async def test_count_of_requests_of_a_lost_worker_is_shown_no_more(world):
    await world.route(num_workers=2)
    for worker in world.workers:
        await world.open(instance_id=worker.id)
    rows = [f'worker_id="{worker.id:x}"' for worker in world.workers]

    def shown():
        text = world.registry.render().decode()
        counts = [row for row in text.splitlines() if "component_router_requests_total{" in row]
        return [row for row in rows if any(row in count for count in counts)]

    before = shown()
    await world.workers[0].runtime.close()
    await world.until(lambda: len(world.client.instances) == 1)

    assert (before, shown()) == (rows, rows[1:])


async def test_lost_worker_releases_its_requests(world):
    await world.route(2)
    await world.open(*LONG)
    busy = next(worker for worker in world.workers if worker.calls)

    await busy.runtime.close()
    await world.until(lambda: len(world.client.instances) == 1)

    assert in_flight(world) == 0
    assert len(world.made.scheduler.selector.active.loads) == 1


async def test_hits_are_counted_predicted_and_confirmed(world):
    await world.route(1)
    _, receiver = await world.open(*LONG)
    world.workers[0].answer(cached=100)
    world.workers[0].finish()
    await receiver.over

    assert world.metric("dynamo_router_kv_cache_hit_ratio") == 0.25
    assert world.metric("dynamo_router_kv_cache_predicted_hit_ratio") == 0
    assert world.metric("dynamo_router_overhead_total_ms_count") == 1


async def test_earlier_decisions_predict_the_cache_without_events(world):
    await world.route(3, kv_events=False)

    for _ in range(4):
        _, receiver = await world.open(*LONG)
        worker = next(worker for worker in world.workers if worker.calls)
        worker.answer()
        worker.finish()
        await receiver.over

    assert sorted(len(worker.calls) for worker in world.workers) == [0, 0, 4]


@pytest.mark.parametrize("mode", ["least-loaded", "power-of-two", "consistent-hash"])
async def test_other_load_modes_route_requests(world, mode):
    await world.route(3, router_mode=mode)

    for turn in range(6):
        await world.open(*range(turn * 1000, turn * 1000 + 100))

    assert world.num_calls == 6


async def test_direct_mode_requires_a_named_worker(world):
    await world.route(2, router_mode="direct")

    with pytest.raises(errors.InvalidRequest, match="direct"):
        await world.made.open_stream(request(), Receiver())
    await world.open(instance_id=world.workers[0].id)

    assert len(world.workers[0].calls) == 1


async def test_push_modes_spread_requests(world):
    await world.route(3, router_mode="round-robin")

    for _ in range(6):
        await world.open(*LONG)

    assert [len(worker.calls) for worker in world.workers] == [2, 2, 2]


@pytest.mark.parametrize(
    ("second", "shares"),
    [("poet", True), ("clerk", False), (None, False)],
    ids=["the same adapter", "another", "none"],
)
async def test_lora_adapters_have_prefixes_of_their_own(world, second, shares):
    await world.route(2)
    await world.open(*LONG, lora_name="poet")

    found = world.made.estimate_load(request(*LONG, lora_name=second))
    index = [prompt_of(world, name).sequence_hashes for name in ("poet", second)]

    assert (index[0] == index[1]) is shares
    assert found.num_requests == (1 if shares else 0)  # else it would go where nobody is
    assert (found.num_new == 400) is not shares


def prompt_of(world, lora_name):
    return world.made._make_prompt(request(*LONG, lora_name=lora_name), route.DEFAULT_OPTIONS)


@pytest.mark.parametrize(
    ("fields", "options"),
    [({"lora_name": "poet"}, {}), ({}, {"is_restricted": True})],
    ids=["of an adapter", "that goes on with the weights with which it began"],
)
async def test_queued_request_is_refused_when_the_last_worker_that_can_serve_it_is_lost(
    world, fields, options
):
    full = {"max_num_batched_tokens": 100}
    await world.route(2, full, router_queue_threshold=1.0, router_queue_timeout_secs=30.0)
    for turn in range(2):
        await world.open(*range(turn * 1000, turn * 1000 + 400))
    able, other = world.workers
    terms = route.RoutingOptions(allowed_instances={able.id}, **options)
    waiting = asyncio.ensure_future(
        world.made.open_stream(request(*LONG, **fields), Receiver(), terms)
    )
    await world.until(lambda: world.made.scheduler.selector.num_waiting == 1)
    num_before = len(other.calls)
    await able.runtime.close()
    for number in range(num_before):
        other.answer(number)
        other.finish(number)

    with pytest.raises(errors.NoWorkers, match="lost in the wait"):
        await waiting
    assert len(other.calls) == num_before
    await world.until(lambda: in_flight(world) == 0)


async def test_load_of_a_worker_is_shown_with_its_type(world):
    await world.route(num_workers=1)
    await world.open()

    labels = f'dp_rank="0",worker_id="{world.workers[0].id:x}",worker_type="decode"'
    assert world.metric(f"dynamo_frontend_worker_active_decode_blocks{{{labels}}}") > 0
    assert world.metric(f"dynamo_frontend_worker_active_prefill_tokens{{{labels}}}") > 0
