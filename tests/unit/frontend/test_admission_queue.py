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


def in_order(waiting_queue):
    return [waiting_queue.pop_first().waiter for _ in range(len(waiting_queue))]


def fill(waiting_queue, *tenants, priority=0):
    """Add requests named by their tenant and number."""
    for number, tenant in enumerate(tenants):
        waiting_queue.append(f"{tenant}{number}", priority=priority, num_tokens=1, tenant=tenant)


def test_tenants_of_one_priority_take_turns():
    waiting_queue = queue.WaitingQueue(9)
    fill(waiting_queue, *"aaabba")

    assert in_order(waiting_queue) == ["a0", "b3", "a1", "b4", "a2", "a5"]


def test_tenant_that_comes_later_waits_for_one_request_of_each_other():
    waiting_queue = queue.WaitingQueue(99)
    fill(waiting_queue, *"aaaaaa", *"bbbbb")
    taken = [waiting_queue.pop_first().waiter for _ in range(5)]
    waiting_queue.append("c", priority=0, num_tokens=1, tenant="c")

    assert taken == ["a0", "b6", "a1", "b7", "a2"]
    assert in_order(waiting_queue)[:4] == ["b8", "c", "a3", "b9"]


def test_turns_of_one_priority_do_not_delay_another():
    waiting_queue = queue.WaitingQueue(99)
    fill(waiting_queue, *"aaa")
    fill(waiting_queue, *"aaaaa", priority=1)
    fill(waiting_queue, *"b")

    assert in_order(waiting_queue) == ["a0", "a1", "a2", "a3", "a4", "a0", "b0", "a1", "a2"]


def test_full_queue_gives_way_to_a_tenant_that_has_fewer():
    waiting_queue = queue.WaitingQueue(4)
    fill(waiting_queue, *"aaab")

    assert waiting_queue.displace(priority=0, tenant="a") is None
    assert waiting_queue.displace(priority=0, tenant="c").waiter == "a2"
    assert waiting_queue.num_tokens == 3
    assert waiting_queue.displace(priority=0, tenant="b") is None  # each has one more at most
    assert in_order(waiting_queue) == ["a0", "b3", "a1"]


def test_full_queue_does_not_give_way_to_a_lower_priority():
    waiting_queue = queue.WaitingQueue(3)
    fill(waiting_queue, *"aaa", priority=1)

    assert waiting_queue.displace(priority=0, tenant="b") is None
    assert waiting_queue.displace(priority=1, tenant="b").waiter == "a2"


def test_queue_without_room_displaces_nobody():
    assert queue.WaitingQueue(0).displace(priority=0, tenant="a") is None


@given(actions=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_tenants_that_wait_all_the_time_are_served_equally(actions):
    waiting_queue = queue.WaitingQueue(99)
    fill(waiting_queue, *"aaabbbccc" * 3)
    for tenant, is_removed in actions:
        fill(waiting_queue, tenant)
        if is_removed:
            waiting_queue.pop_first()
    waiting = [each.waiter[0] for each in waiting_queue._positions]
    rounds = min(map(waiting.count, "abc"))
    served = [waiting_queue.pop_first().waiter[0] for _ in range(3 * rounds)]
    for number in range(1, rounds + 1):
        counts = [served[: 3 * number].count(tenant) for tenant in "abc"]
        assert max(counts) - min(counts) <= 2


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
