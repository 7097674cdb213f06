"""The waiting queue, compared with a plain list that is sorted each time."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.admission import queue

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(-2, 2), st.integers(1, 9)),
        st.tuples(st.just("leave"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("next"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(actions=ACTIONS, limit=st.integers(0, 6))
def test_queue_is_sorted_by_priority_then_arrival(actions, limit):
    waiting_queue, positions, waiting = queue.WaitingQueue(limit), [], []
    for number, (action, value, num_tokens) in enumerate(actions):
        if action == "join" and not waiting_queue.is_full:
            positions.append(waiting_queue.append(number, priority=value, num_tokens=num_tokens))
            waiting.append((-value, number, num_tokens))
            waiting.sort()
        elif action == "leave" and positions:
            position = positions[value % len(positions)]
            held = [one for one in waiting if one[1] == position.waiter]
            assert waiting_queue.remove(position) == bool(held)
            waiting = [one for one in waiting if one not in held]
        elif action == "next" and waiting:
            assert waiting_queue.pop_first().waiter == waiting.pop(0)[1]
        assert len(waiting_queue) == len(waiting) <= limit
        assert waiting_queue.is_full == (len(waiting) == limit)
        assert waiting_queue.num_tokens == sum(one[2] for one in waiting)


@given(
    inside=st.integers(0, 9), limit=st.none() | st.integers(1, 9), free=st.none() | st.integers(0, 9)
)  # fmt: skip
def test_admissible_requests_are_bounded_by_the_tightest_limit(inside, limit, free):
    room = queue.count_admissible(inside, limit, free)

    assert (room is None) == (limit is None and free is None)
    assert room is None or room >= 0
    assert limit is None or room <= max(0, limit - inside)
    assert free is None or room <= free


def test_wait_is_estimated_from_recent_completions():
    rate = queue.CompletionRate()
    unknown = rate.estimate_wait_s(100, 0.0)
    for second in range(100):
        rate.record_completion(2.0 * second)

    assert unknown == 1
    assert 18 <= rate.estimate_wait_s(9, 198.0) <= 22
    assert rate.estimate_wait_s(1000, 198.0) == 60
    assert rate.estimate_wait_s(0, 198.0) >= 1


def test_estimated_wait_grows_while_nothing_ends():
    rate = queue.CompletionRate()
    for second in range(3):
        rate.record_completion(float(second))

    assert rate.estimate_wait_s(0, 33.0) == 11
