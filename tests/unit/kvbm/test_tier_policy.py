"""What is worth a copy, when copying was in vain, and when loading pays."""

import pytest

from dynamo.kvbm import tier_policy
from dynamo.protocols import kv_events

DEVICE, HOST, DISK = kv_events.TIERS[:3]
FREQUENCY, LFU = tier_policy.FilterKind.FREQUENCY, tier_policy.FilterKind.PRESENCE_LFU


@pytest.mark.parametrize("kind", [tier_policy.FilterKind.PRESENCE, tier_policy.FilterKind.PASS_ALL])
def test_filter_by_presence_admits_every_block(kind):
    assert tier_policy.OffloadFilter(kind, max_counts=8).admits(1)


@pytest.mark.parametrize(("kind", "num_refused"), [(FREQUENCY, 1), (LFU, 3)])
def test_filter_by_frequency_admits_a_block_that_was_seen_often(kind, num_refused):
    one = tier_policy.OffloadFilter(kind, max_counts=8)

    assert [one.admits(1) for _ in range(num_refused + 1)] == [False] * num_refused + [True]


def test_frequency_decays_with_time():
    one = tier_policy.OffloadFilter(FREQUENCY, max_counts=2)
    one.admits(1)
    for name in (1_000, 1_001):
        one.admits(name)

    assert not one.admits(1)


def test_counts_are_bounded():
    one = tier_policy.OffloadFilter(FREQUENCY, max_counts=4)
    for name in range(100):
        one.admits(name)

    assert not one.admits(0)  # forgotten


def test_evictions_of_unread_blocks_turn_offloading_down():
    guard = tier_policy.ChurnGuard(100)

    assert not guard.record_evictions(99, 99)
    assert guard.record_evictions(1, 1)
    assert guard.is_down
    assert tier_policy.describe(guard).startswith("turned down")


def test_evictions_of_read_blocks_do_not():
    guard = tier_policy.ChurnGuard(100)
    guard.record_evictions(100, 90)

    assert not guard.is_down
    assert tier_policy.describe(guard) == "on"


def test_prompts_that_miss_what_was_not_copied_turn_offloading_up():
    guard = tier_policy.ChurnGuard(64)
    guard.record_evictions(64, 64)
    for name in range(8):
        guard.record_skipped(name)
    unknown = guard.record_miss(99)
    missed = [guard.record_miss(name) for name in range(4)]

    assert not unknown
    assert missed == [False, False, False, True]
    assert not guard.is_down


def test_loading_pays_while_nothing_is_measured():
    cost = tier_policy.LoadCost()

    assert cost.pays(5.0, 1)
    assert cost.max_wait_s(1) <= 1.0


def test_loading_pays_if_it_takes_at_most_half_of_computing():
    cost = tier_policy.LoadCost()
    cost.record_step(100, 1.0)

    assert cost.pays(0.49, 100)
    assert not cost.pays(0.51, 100)
    assert cost.max_wait_s(100) == pytest.approx(0.5)


def test_short_steps_say_nothing_of_how_fast_prompts_are_computed():
    cost = tier_policy.LoadCost()
    cost.record_step(1, 1.0)

    assert cost.s_per_token is None
    assert cost.step_s > 0


def test_step_takes_at_least_its_prompt_at_the_best_speed_so_far():
    cost = tier_policy.LoadCost()
    assert cost.least_step_s(1000) == 0

    cost.record_step(200, 1.0)
    cost.record_step(16, 0.5)  # sixteen answers, slow per token

    assert cost.least_step_s(400) == pytest.approx(2.0)
    assert cost.least_step_s(1) == cost.step_s


def test_speed_of_copies_is_learned():
    cost = tier_policy.LoadCost()
    assumed = cost.copy_s((DISK, HOST), 10**9)
    cost.record_copy((DISK, HOST), 10**9, 100.0)

    assert cost.copy_s((DISK, HOST), 10**9) > 90 > assumed
    assert cost.copy_s((HOST, DEVICE), 10**9) < 1


def test_speed_that_was_not_measured_is_that_of_the_other_direction():
    cost = tier_policy.LoadCost()
    cost.record_copy((DEVICE, HOST), 10**9, 0.01)

    assert cost.bytes_per_s((HOST, DEVICE)) == pytest.approx(1e11)


def test_slow_load_is_tried_again_in_time():
    cost = tier_policy.LoadCost()
    cost.record_copy((DISK, HOST), 10**6, 1.0)
    before = cost.bytes_per_s((DISK, HOST))
    for _ in range(40):
        cost.record_declined((DISK, HOST))

    assert cost.bytes_per_s((DISK, HOST)) > 2 * before
