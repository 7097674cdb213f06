import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.protocols import load as load_events
from dynamo.router.active_sequences import ActiveSequences
from dynamo.router.api import Worker
from dynamo.router.worker_load import Capacity

WORKERS = [Worker(1), Worker(2), Worker(2, dp_rank=1)]
BLOCK_SIZE = 4


def tracker(workers=WORKERS, stride=1):
    active = ActiveSequences(BLOCK_SIZE, stride=stride)
    active.set_workers(dict.fromkeys(workers, Capacity()))
    return active


def add(active, request_id, worker, chain, *, isl=40, overlap=0.0, now=0.0):
    active.add(request_id, worker, chain, isl=isl, overlap=overlap, now=now)


def chains():
    """Paths in a small tree: prefixes are shared in every way, and a name always has the same parent."""
    steps = st.lists(st.integers(0, 2), max_size=6)
    return steps.map(lambda path: [hash(tuple(path[: i + 1])) for i in range(len(path))])


class Naive:
    """The same by sets of requests."""

    def __init__(self):
        self.requests = {}

    def runs(self, chain):
        found = {}
        for worker in WORKERS:
            held = [set(c) for w, c, _ in self.requests.values() if w == worker]
            run = 0
            while run < len(chain) and any(chain[run] in names for names in held):
                run += 1
            if run:
                found[worker] = run
        return found

    def blocks(self, worker):
        return len({name for w, c, _ in self.requests.values() if w == worker for name in c})

    def tokens(self, worker):
        return sum(left for w, _, left in self.requests.values() if w == worker)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_tracker_equals_a_naive_model_after_any_history(data):
    active, naive = tracker(), Naive()
    for _ in range(data.draw(st.integers(0, 25))):
        request_id = data.draw(st.sampled_from("abcdef"))
        match data.draw(st.sampled_from(("add", "add", "complete", "free", "leave"))):
            case "add":
                worker, chain = data.draw(st.sampled_from(WORKERS)), data.draw(chains())
                isl = data.draw(st.integers(0, 30))
                add(active, request_id, worker, chain, isl=isl)
                naive.requests.setdefault(request_id, (worker, chain, isl))
            case "complete":
                active.mark_prefill_completed(request_id, 1.0)
                if request_id in naive.requests:
                    naive.requests[request_id] = (*naive.requests[request_id][:2], 0)
            case "free":
                active.free(request_id, 1.0)
                naive.requests.pop(request_id, None)
            case "leave":
                worker = data.draw(st.sampled_from(WORKERS))
                others = {w: Capacity() for w in WORKERS if w != worker}
                assert active.set_workers(others) == [worker]
                active.set_workers(dict.fromkeys(WORKERS, Capacity()))
                naive.requests = {k: v for k, v in naive.requests.items() if v[0] != worker}

    question = data.draw(chains())
    assert active.prefix_lengths(question) == naive.runs(question)
    for worker in WORKERS:
        load = active.loads[worker]
        assert load.active_blocks == naive.blocks(worker)
        assert load.prefill_tokens == naive.tokens(worker)
        assert load.num_requests == sum(w == worker for w, _, _ in naive.requests.values())


def test_stride_counts_shared_blocks_in_multiples_and_loses_none():
    active = tracker(stride=4)
    add(active, "a", WORKERS[0], list(range(11)))
    add(active, "b", WORKERS[0], [*range(7), 70, 80, 90])
    load = active.loads[WORKERS[0]]
    both, run = load.active_blocks, active.prefix_lengths([*range(7), 71, 81])

    active.free("a", 1.0)
    one = load.active_blocks
    active.free("b", 1.0)

    assert (both, run, one, load.active_blocks) == (11 + 6, {WORKERS[0]: 4}, 10, 0)


def test_unknown_requests_and_workers_are_ignored():
    active = tracker()

    active.mark_prefill_completed("?", 0.0)
    active.free("?", 0.0)
    add(active, "a", Worker(99), [1])

    assert "a" not in active


def test_overlapping_blocks_need_no_prefill():
    active = tracker()

    add(active, "a", WORKERS[0], [1, 2, 3], isl=13, overlap=2.0)

    assert active.loads[WORKERS[0]].prefill_tokens == 5


def test_backlog_shrinks_during_prefill_but_not_below_prompts_not_begun():
    active = tracker()
    active.prefill_speed.measured = 10.0
    add(active, "a", WORKERS[0], [], isl=40, now=0.0)
    add(active, "b", WORKERS[0], [], isl=20, now=0.0)
    load = active.loads[WORKERS[0]]

    assert [load.backlog(t) for t in (0.0, 2.0, 100.0)] == [60, 40, 20]


def test_prefill_speed_is_measured_on_completed_prompts():
    active = tracker()
    add(active, "a", WORKERS[0], [], isl=40, now=0.0)
    add(active, "b", WORKERS[0], [], isl=60, now=0.0)

    active.mark_prefill_completed("a", 2.0)
    active.mark_prefill_completed("b", 2.0)  # in the same step

    assert active.prefill_speed.tokens_per_s == pytest.approx(100 / 2, rel=0.05)


def test_prompt_that_is_given_up_in_the_queue_leaves_the_speed_of_the_first_one():
    active = tracker()
    add(active, "a", WORKERS[0], [], isl=100)
    add(active, "b", WORKERS[0], [], isl=100)
    active.free("b", 1.9)
    active.mark_prefill_completed("a", 2.0)

    assert active.prefill_speed.tokens_per_s == pytest.approx(50)


def test_replica_with_all_events_has_the_same_loads():
    rng, first, second = random.Random(3), tracker(), tracker()
    for i in range(50):
        chain = list(range(100 * (i % 5), 100 * (i % 5) + 5))
        worker, overlap = rng.choice(WORKERS), float(i % 3)
        add(first, str(i), worker, chain, isl=20, overlap=overlap)
        added = load_events.AddRequest(
            token_sequence=tuple(chain),
            isl=20,
            overlap=overlap,
            is_prefill_completed=not i % 3,
        )
        event = load_events.ActiveSequenceEvent(
            request_id=str(i),
            worker_id=worker.instance_id,
            dp_rank=worker.dp_rank,
            router_id="r",
            data=added,
        )
        second.apply(event, 2.0)
    for i in range(0, 50, 3):
        first.mark_prefill_completed(str(i), 1.0)

    for i in range(0, 50, 2):
        first.free(str(i), 3.0)
        worker = Worker(1)
        free = load_events.ActiveSequenceEvent(
            request_id=str(i), worker_id=worker.instance_id, router_id="r", data=load_events.Free()
        )
        second.apply(free, 3.0)

    for worker in WORKERS:
        mine, theirs = first.loads[worker], second.loads[worker]
        assert (mine.num_requests, mine.active_blocks) == (
            theirs.num_requests,
            theirs.active_blocks,
        )
        assert mine.prefill_tokens == theirs.prefill_tokens


def test_replica_applies_completed_prefill():
    active = tracker()
    event = load_events.ActiveSequenceEvent(
        request_id="a",
        worker_id=1,
        router_id="r",
        data=load_events.AddRequest(token_sequence=(1,), isl=4),
    )

    active.apply(event, 0.0)
    before = active.loads[WORKERS[0]].prefill_tokens
    active.apply(
        load_events.ActiveSequenceEvent(
            request_id="a", worker_id=1, router_id="r", data=load_events.MarkPrefillCompleted()
        ),
        1.0,
    )

    assert (before, active.loads[WORKERS[0]].prefill_tokens) == (4, 0)


def test_inconsistent_hash_chains_leave_no_load():
    active = tracker()
    for i, chain in enumerate(((1, 2, 2, 1), (2, 1), (2, 2), (1, 3, 1))):
        told = load_events.AddRequest(token_sequence=chain, isl=4)
        event = load_events.ActiveSequenceEvent(
            request_id=str(i), worker_id=1 + i % 2, router_id="r", data=told
        )
        active.apply(event, 0.0)

    for i in range(4):
        active.free(str(i), 1.0)
        active.prefix_lengths([1, 2, 3])

    assert [active.loads[w].active_blocks for w in WORKERS] == [0, 0, 0]
