"""Who answers a prompt that is computed already."""

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.test_selection import fill, selector
from tests.unit.router.views import prompt, view

from dynamo.router import baselines
from dynamo.router.api import Worker


def test_the_fewest_blocks_win_and_blocks_to_compute_count():
    asked = prompt(is_prefilled=True)

    assert baselines.select_decode_worker(
        asked, view({"active_blocks": 5}, {"active_blocks": 4}), 0.0
    ) == (
        Worker(1),
        0.0,
    )
    # 32 tokens to compute are two blocks
    busy = view({"active_blocks": 5}, {"active_blocks": 4, "queued": (32,)})
    assert baselines.select_decode_worker(asked, busy, 0.0).worker == Worker(0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_between_equals_it_is_the_fewest_requests(numbers):
    seen = view(*({"num_requests": number} for number in numbers))

    chosen = baselines.select_decode_worker(prompt(is_prefilled=True), seen, 0.0).worker.instance_id
    assert numbers[chosen] == min(numbers)


def test_a_prompt_that_is_computed_goes_by_room_and_not_by_prefix_and_never_waits():
    made, index = selector(2)
    full = fill(made, 4)
    index.device = {Worker(0): 10}
    waits = made.select("waits", prompt(first=5000), 0.0)
    decisions = [made.select(f"p{i}", prompt(is_prefilled=True), 0.0) for i in range(4)]

    assert full[:2] != [None, None]
    assert waits is None
    assert sorted(one.worker.instance_id for one in decisions) == [0, 0, 1, 1]
    assert {one.overlap_blocks for one in decisions} == {0.0}


def test_it_adds_nothing_to_compute_and_teaches_no_pace():
    made, _ = selector(1)
    made.select("a", prompt(is_prefilled=True), 0.0)
    load = made.active.loads[Worker(0)]
    before = load.prefill_tokens, load.active_blocks, load.num_requests
    made.mark_prefill_completed("a", 5.0)
    measured = made.active.prefill_speed.measured
    made.free("a", 6.0)

    assert before == (0, 10, 1)
    assert measured == 0.0
    assert (load.active_blocks, load.num_requests) == (0, 0)


def test_workers_that_only_compute_prompts_are_not_counted_by_blocks():
    made, _ = selector(1)
    made.active._counts_blocks = False
    made.select("a", prompt(), 0.0)
    load = made.active.loads[Worker(0)]

    assert (load.active_blocks, load.prefill_tokens) == (0, 160)
    assert made.active.prefix_lengths(prompt().sequence_hashes)
