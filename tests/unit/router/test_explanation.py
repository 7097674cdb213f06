"""The explanation of a decision has the very costs by which the worker was selected."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynamo.protocols import blocks
from dynamo.router import explanation, policies
from dynamo.router.api import Candidates, Prompt, Worker
from dynamo.router.worker_load import Capacity, DecodeSlowdown, PrefillSpeed, WorkerLoad

POLICIES = [
    policies.EstimatedTtft(),
    policies.Dynamo(draw=lambda: 0.0),
    policies.LMetric(draw=lambda: 0.0),
]
LOADS = st.lists(
    st.tuples(
        st.integers(0, 10), st.integers(0, 50), st.integers(0, 900), st.integers(0, 20), st.floats(0, 1e5)
    ),
    min_size=1, max_size=6,
)  # fmt: skip


def candidates_of(rows, block_size=16):
    loads, cached, in_flight = {}, {}, {}
    slowdown, speed = DecodeSlowdown(), PrefillSpeed()
    speed.observe(1_000, 0.1)
    for tokens in range(20):
        slowdown.observe(1 + tokens / 1e4, tokens)
    for number, (num_requests, active_blocks, tokens, overlap, inserted) in enumerate(rows):
        load = WorkerLoad(Capacity(), speed, num_requests, active_blocks, decode_slowdown=slowdown)
        if tokens and num_requests:
            load.add_prefill("other", tokens, 0.0)
        load.inserted_tokens = inserted
        worker = Worker(number)
        loads[worker] = load
        cached[worker] = float(overlap)
        in_flight[worker] = overlap // 2
    return Candidates(loads, cached, in_flight)


def make_prompt(num_blocks=20, **fields):
    hashes = blocks.sequence_hashes(range(num_blocks))
    return Prompt(num_tokens=16 * num_blocks + 3, block_size=16, sequence_hashes=hashes, **fields)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@given(rows=LOADS)
@example(rows=[(0, 0, 0, 0, 5e-324)])  # a share of nearly nothing is no pressure
def test_selected_worker_has_the_lowest_explained_cost(policy, rows):
    candidates, asked = candidates_of(rows), make_prompt()
    explained = explanation.explain(policy, asked, candidates, 0.0)
    decision = policy.select_worker(asked, candidates, 0.0)
    costs = {one.instance: one.cost for one in explained.candidates}

    assert costs[f"{decision.worker.instance_id:x}"] == pytest.approx(min(costs.values()))
    assert explained.unit
    assert not explained.reason


def test_parts_make_the_cost_and_the_best_comes_first():
    candidates = candidates_of([(2, 5, 100, 0, 0.0), (0, 0, 0, 20, 0.0)])
    explained = explanation.explain(POLICIES[0], make_prompt(), candidates, 0.0)
    first, second = explained.candidates

    assert (first.instance, first.cached_blocks) == ("1", 20.0)
    assert second.cost == pytest.approx(sum(second.parts.values()))
    assert second.parts["queued tokens"] == 100
    assert (explained.num_tokens, explained.num_blocks, explained.num_candidates) == (323, 20, 2)


@pytest.mark.parametrize(
    ("fields", "policy", "reason"),
    [
        ({"pinned": Worker(1)}, POLICIES[0], "names its worker"),
        ({"is_prefilled": True}, POLICIES[0], "prefill worker"),
        ({}, policies.RoundRobin(), "compares no costs"),
    ],
)
def test_decision_without_costs_says_why(fields, policy, reason):
    candidates = candidates_of([(0, 0, 0, 0, 0.0), (0, 0, 0, 0, 0.0)])
    explained = explanation.explain(policy, make_prompt(**fields), candidates, 0.0)

    assert reason in explained.reason
    assert {one.cost for one in explained.candidates} == {None}


def test_explanation_of_a_thousand_workers_is_short():
    candidates = candidates_of([(0, 0, 0, number % 7, 0.0) for number in range(1000)])
    explained = explanation.explain(POLICIES[0], make_prompt(), candidates, 0.0)

    assert explained.num_candidates == 1000
    assert len(explained.candidates) == explanation.MAX_CANDIDATES
    assert {one.cached_blocks for one in explained.candidates} == {6.0}


def test_route_in_turn_says_that_nothing_was_compared():
    explained = explanation.explain_turn("round-robin", range(20))

    assert "round-robin" in explained.reason
    assert (explained.num_candidates, len(explained.candidates)) == (20, 8)
