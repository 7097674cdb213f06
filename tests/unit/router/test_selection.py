from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.views import prompt

from dynamo.base import errors
from dynamo.protocols import blocks
from dynamo.router import api, config
from dynamo.router.api import Worker
from dynamo.router.selection import AGING, QueuedRequest, RequestQueue
from dynamo.router.worker_load import Capacity

SMALL = Capacity(max_num_batched_tokens=160)  # one prompt of ten blocks


class Index:
    """Answers with what it is told."""

    def __init__(self):
        self.device = {}
        self.known = None  # the first hash of the prompts that are known; None: all
        self.removed = []

    def find_matches(self, sequence_hashes):
        is_known = self.known in (None, sequence_hashes[0])
        return api.OverlapScores({"device": self.device} if is_known else {})

    def remove_worker(self, worker):
        self.removed.append(worker)


def selector(num_workers=2, capacity=SMALL, **told):
    index = Index()
    made = config.make_selector(config.RouterConfig(**told), index, block_size=16, draw=lambda: 0.0)
    made.set_workers({Worker(i): capacity for i in range(num_workers)})
    return made, index


def fill(made, num, *, first=0):
    return [made.select(str(first + i), prompt(first=1000 * (first + i)), 0.0) for i in range(num)]


def test_prompt_from_tokens_has_its_full_blocks():
    packed = blocks.pack(range(10))

    made = api.Prompt.from_tokens(packed, 4)

    assert (made.num_tokens, len(made.sequence_hashes)) == (10, 2)
    assert made.sequence_hashes == blocks.sequence_hashes(blocks.local_hashes(packed, 4))


def test_no_workers_means_no_decision():
    made, _ = selector(0)

    with pytest.raises(errors.NoWorkers):
        made.select("a", prompt(), 0.0)


def test_overlap_of_the_index_is_used_and_returned():
    made, index = selector()
    index.device = {Worker(1): 8}

    assert made.select("a", prompt(), 0.0) == (Worker(1), 8)
    assert made.active.loads[Worker(1)].prefill_tokens == 32


def test_requests_in_flight_count_before_the_index_has_their_blocks():
    made, _ = selector(capacity=Capacity())
    first = made.select("a", prompt(40), 0.0)

    second = made.select("b", prompt(42), 0.0)

    assert second == (first.worker, 40)


def test_queued_request_starts_when_a_worker_gets_room():
    made, _ = selector()
    sent = fill(made, 4)

    waits = made.select("w", prompt(first=9000), 0.0)
    too_early = made.admit(0.0)
    made.mark_prefill_completed("0", 1.0)
    admitted = made.admit(1.0)

    assert all(sent)
    assert (waits, too_early) == (None, [])
    assert [request_id for request_id, _ in admitted] == ["w"]
    assert made.num_waiting == 0


def test_request_for_a_busy_worker_does_not_block_a_free_one():
    made, index = selector()
    made.active.add("crowd", Worker(0), [], isl=1200, overlap=0.0, now=0.0)
    made.active.add("other", Worker(1), [], isl=100, overlap=0.0, now=0.0)
    index.device = {Worker(0): 390}
    waits = made.select("home", prompt(400, first=1), 0.0)
    index.known, index.device = 1, {Worker(0): 390}

    other = made.select("cold", prompt(first=5000), 0.0)
    admitted = made.admit(0.0)

    assert (waits, other) == (None, None)
    assert [(request_id, d.worker) for request_id, d in admitted] == [("cold", Worker(1))]
    assert all(load.reserved_tokens == 0 for load in made.active.loads.values())


def test_requests_of_one_turn_are_ordered_before_the_first_is_sent():
    made, _ = selector(1)
    made.select("standing", prompt(first=9000), 0.0)
    for name, num_blocks in (("long", 100), ("short", 2)):
        made.enqueue(name, prompt(num_blocks, first=100 * num_blocks), 0.0)

    made.mark_prefill_completed("standing", 0.0)
    admitted = made.admit(0.0)

    assert [request_id for request_id, _ in admitted] == ["short", "long"][: len(admitted)]
    assert admitted


def test_freed_request_leaves_the_queue():
    made, _ = selector()
    fill(made, 5)

    made.free("4", 1.0)
    for i in range(4):
        made.free(str(i), 1.0)

    assert (made.num_waiting, made.admit(1.0)) == (0, [])


def test_removed_worker_loses_load_and_blocks():
    made, index = selector()
    fill(made, 4)

    made.set_workers({Worker(1): SMALL})

    assert index.removed == [Worker(0)]
    assert list(made.active.loads) == [Worker(1)]
    assert made.active.loads[Worker(1)].num_requests == 2


def test_pinned_request_is_sent_at_once():
    made, _ = selector()
    fill(made, 4)

    assert made.select("p", prompt(pinned=Worker(1)), 0.0).worker == Worker(1)


def test_pinned_request_to_an_unknown_worker_is_refused():
    made, _ = selector()

    with pytest.raises(errors.InvalidRequest, match="got 7"):
        made.select("p", prompt(pinned=Worker(7)), 0.0)


def test_full_queue_raises_overloaded():
    made, _ = selector(router_queue_size=1)
    fill(made, 5)

    with pytest.raises(errors.Overloaded):
        fill(made, 1, first=5)


def test_other_policies_do_not_queue():
    made, _ = selector(router_policy="dynamo")

    assert all(fill(made, 50))
    assert made.admit(0.0) == []


def test_other_policies_with_a_threshold_queue_while_all_are_full():
    made, _ = selector(router_policy="round-robin", router_queue_threshold=1.0)

    sent = fill(made, 6)

    assert [decision is not None for decision in sent] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("name", get_args(config.PolicyName))
def test_every_policy_name_makes_a_policy(name):
    made, _ = selector(router_policy=name)

    if name == "direct":
        with pytest.raises(errors.InvalidRequest):
            made.select("a", prompt(), 0.0)
    else:
        assert made.select("a", prompt(), 0.0).worker in made.active.loads


def waiting(request_id, arrival=0.0, work_s=1.0, **more):
    return QueuedRequest(
        request_id=request_id, prompt=prompt(1, **more), arrival=arrival, work_s=work_s
    )


def order(queue, now=10.0):
    return "".join(w.request_id for w in queue.in_order(now))


def filled(policy, *entries, **more):
    queue = RequestQueue(policy, **more)
    for entry in entries:
        queue.push(entry)
    return queue


def test_fcfs_orders_by_arrival_minus_priority_seconds():
    queue = filled("fcfs", waiting("a", 1), waiting("b", 2), waiting("c", 3, priority=2.5))

    assert order(queue) == "cab"


def test_lcfs_reverses_the_order_of_arrival():
    assert order(filled("lcfs", waiting("a", 1), waiting("b", 2))) == "ba"


def test_deadline_defaults_to_ten_seconds():
    queue = filled(
        "deadline", waiting("a", 0), waiting("b", 5, deadline=9.0), waiting("c", 6, deadline=20.0)
    )

    assert order(queue) == "bac"


def test_wspt_prefers_short_prompts_unless_much_later():
    queue = filled(
        "wspt",
        waiting("long", 0, work_s=3),
        waiting("short", 1, work_s=0.1),
        waiting("late", 3 * AGING, work_s=0.1),
    )

    assert order(queue) == "shortlonglate"


def test_priority_divides_the_work_of_wspt():
    assert order(filled("wspt", waiting("a", 0, 3), waiting("b", 0, 4, priority=1.0))) == "ba"


@pytest.mark.parametrize("policy", ["fcfs", "wspt", "deadline", "lcfs"])
def test_overdue_request_goes_before_all_others(policy):
    queue = filled(policy, waiting("a", 0, work_s=1e6, deadline=1e6), patience_s=60.0)
    for i in range(5):
        queue.push(waiting(str(i), 70.0, work_s=0.0, deadline=71.0, priority=5.0))

    assert order(queue, now=70.0)[0] == "a"


def test_full_queue_refuses_a_request():
    queue = filled("fcfs", waiting("a"), max_size=1)

    with pytest.raises(errors.Overloaded, match="try again later"):
        queue.push(waiting("b"))


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), max_size=40))
def test_queue_holds_pushed_requests_that_were_not_removed(steps):
    queue, there = RequestQueue("wspt"), {}
    for i, (request_id, comes) in enumerate(steps):
        if comes and request_id not in there:
            there[request_id] = float(i)
            queue.push(waiting(request_id, float(i), work_s=i % 3))
        elif not comes:
            assert queue.remove(request_id) == (there.pop(request_id, None) is not None)

    assert sorted(order(queue, 1000.0)) == sorted(there)
    assert len(queue) == len(there)
    assert all(request_id in queue for request_id in there)
