"""Token buckets and accounts: no key exceeds its limits, and no request waits without need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.frontend.admission import rate_limits

STEPS = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=40)


def account(name="key 'alice'", **fields):
    return rate_limits.RateAccount(name, rate_limits.RateLimits(**fields), now=0.0)


@given(per_minute=st.integers(1, 100), steps=STEPS)
def test_bucket_passes_at_most_its_size_and_its_refill(per_minute, steps):
    bucket, now, passed = rate_limits.TokenBucket(per_minute, 0.0), 0.0, []
    for pause_s, amount in steps:
        now += pause_s
        if amount <= per_minute and bucket.wait_s(amount, now) == 0:
            bucket.take(amount, now)
            passed.append((now, amount))

    for start, (since, _) in enumerate(passed):
        for end in range(start, len(passed)):
            total = sum(amount for _, amount in passed[start : end + 1])
            assert total <= per_minute * (1 + (passed[end][0] - since) / 60) + 1e-6


@given(per_minute=st.integers(1, 100), steps=STEPS)
def test_amount_is_available_after_the_reported_wait_and_not_before(per_minute, steps):
    bucket, now = rate_limits.TokenBucket(per_minute, 0.0), 0.0
    for pause_s, amount in steps:
        now += pause_s
        wait_s = bucket.wait_s(amount, now)
        assert wait_s == 0 or bucket.wait_s(amount, now + wait_s * 0.99) > 0
        assert bucket.wait_s(amount, now + wait_s + 1e-6) == 0
        bucket.take(amount, now)  # on credit, where it was not there


def test_prompt_larger_than_the_bucket_passes_when_full_and_leaves_a_debt():
    bucket = rate_limits.TokenBucket(60, 0.0)
    wait_s = bucket.wait_s(180, 0.0)
    bucket.take(180, 0.0)

    assert wait_s == 0
    assert bucket.level(0.0) == -120
    assert bucket.wait_s(1, 0.0) == 121


def test_resized_bucket_keeps_its_usage():
    bucket = rate_limits.TokenBucket(60, 0.0)
    bucket.take(20, 0.0)

    assert bucket.resize(100, 0.0).level(0.0) == 80
    assert bucket.resize(10, 0.0).level(0.0) == -10


def test_bucket_does_not_fill_while_the_clock_stands_or_goes_back():
    bucket = rate_limits.TokenBucket(60, 100.0)
    bucket.take(60, 100.0)

    assert bucket.level(50.0) == 0


def test_request_is_charged_to_key_and_tenant_or_to_neither():
    key, tenant = account(requests_per_minute=10), account("tenant 'acme'", requests_per_minute=1)
    rate_limits.charge_request((key, tenant), 0.0)
    with pytest.raises(errors.RateLimited) as caught:
        rate_limits.charge_request((key, tenant), 0.0)

    assert key.requests.level(0.0) == 9
    assert caught.value.retry_after_s == 60
    assert str(caught.value) == (
        "tenant 'acme' has reached its limit of 1 requests per minute: try again in 1m0s"
    )


def test_output_is_charged_when_the_response_ends():
    key = account(tokens_per_minute=100)
    rate_limits.start_response((key,), 60, 0.0)
    rate_limits.finish_response((key,), 90, 0.0)

    assert key.tokens.level(0.0) == -50
    with pytest.raises(errors.RateLimited, match="tokens per minute"):
        rate_limits.start_response((key,), 1, 0.0)


def test_concurrent_responses_are_counted_until_they_end():
    key = account(concurrent_streams=1)
    rate_limits.start_response((key,), 5, 0.0)
    with pytest.raises(errors.RateLimited, match="at the same time"):
        rate_limits.start_response((key,), 5, 0.0)
    rate_limits.finish_response((key,), 5, 0.0)
    rate_limits.start_response((key,), 5, 0.0)

    assert key.num_streams == 1


def test_refusal_by_the_tenant_limit_charges_nothing_to_the_key():
    key, tenant = account(tokens_per_minute=100), account("t", tokens_per_minute=10)
    rate_limits.start_response((key, tenant), 10, 0.0)
    with pytest.raises(errors.RateLimited):
        rate_limits.start_response((key, tenant), 10, 0.0)

    assert key.num_streams == tenant.num_streams == 1
    assert key.tokens.level(0.0) == 90


def test_new_limits_keep_usage_and_running_responses():
    key = account(requests_per_minute=10, concurrent_streams=3)
    rate_limits.charge_request((key,), 0.0)
    rate_limits.start_response((key,), 1, 0.0)
    key.set_limits(rate_limits.RateLimits(requests_per_minute=5, tokens_per_minute=7), 0.0)

    assert (key.requests.level(0.0), key.tokens.level(0.0), key.num_streams) == (4, 7, 1)
    rate_limits.start_response((key,), 1, 0.0)


def report_to(others, sender, name, now):
    """One process tells the others."""
    usage = sender.take_report()
    for other in others if usage is not None else ():
        other.add_usage(name, usage, now)


def test_accounts_of_several_processes_charge_what_each_of_them_reports():
    first, second = [account(requests_per_minute=60, tokens_per_minute=100) for _ in range(2)]
    rate_limits.charge_request((first,), 0.0)
    rate_limits.start_response((first,), 30, 0.0)
    report_to([second], first, "1", 0.0)
    rate_limits.finish_response((first,), 50, 0.0)
    report_to([second], first, "1", 0.0)
    report_to([first], second, "2", 0.0)

    assert (first.requests.level(0.0), first.tokens.level(0.0)) == (59, 20)
    assert (second.requests.level(0.0), second.tokens.level(0.0)) == (59, 20)
    assert first.take_report() is second.take_report() is None
    with pytest.raises(errors.RateLimited, match="tokens per minute"):
        rate_limits.start_response((second,), 21, 0.0)


def test_tokens_of_a_refused_request_are_given_back_in_all_processes():
    first, second = [account(tokens_per_minute=100) for _ in range(2)]
    rate_limits.start_response((first,), 30, 0.0)
    report_to([second], first, "1", 0.0)
    rate_limits.finish_response((first,), -30, 0.0)
    report_to([second], first, "1", 0.0)

    assert second.tokens.level(0.0) == 100


def test_answers_of_other_processes_count_until_they_end_or_their_process_is_silent():
    first, second = [account(concurrent_streams=2) for _ in range(2)]
    rate_limits.start_response((first,), 1, 0.0)
    rate_limits.start_response((first,), 1, 0.0)
    report_to([second], first, "1", 0.0)
    with pytest.raises(errors.RateLimited, match="has 2 answers at the same time"):
        rate_limits.start_response((second,), 1, 1.0)
    rate_limits.finish_response((first,), 1, 2.0)
    report_to([second], first, "1", 2.0)
    rate_limits.start_response((second,), 1, 2.0)

    assert second.count_streams(2.0) == 2
    assert second.count_streams(2.0 + rate_limits.STALE_S) == 2
    assert second.count_streams(2.1 + rate_limits.STALE_S) == 1


def test_running_answers_are_reported_again_and_again_and_their_end_once():
    key = account(concurrent_streams=2)
    rate_limits.start_response((key,), 1, 0.0)
    running = [key.take_report() for _ in range(3)]
    rate_limits.finish_response((key,), 1, 2.0)

    assert [usage.num_streams for usage in running] == [1, 1, 1]
    assert key.take_report().num_streams == 0
    assert key.take_report() is None


@given(
    per_minute=st.integers(1, 100),
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 50)), max_size=60
    ),
)
def test_several_processes_pass_the_share_of_one_and_at_most_what_they_take_in_a_second(
    per_minute, steps
):
    """Each second they report; the excess of a second is a debt, so it does not grow."""
    processes = [account(tokens_per_minute=per_minute) for _ in range(3)]
    now, passed = 0, 0
    for number, pause_s, amount in steps:
        for _ in range(pause_s):
            for name, process in enumerate(processes):
                others = [other for other in processes if other is not process]
                report_to(others, process, str(name), float(now))
            now += 1
        if amount <= per_minute:
            try:
                rate_limits.start_response((processes[number],), amount, float(now))
                passed += amount
            except errors.RateLimited:
                pass

    assert passed <= 3 * per_minute + per_minute * now / 60 + 1e-6


def test_headers_show_the_account_with_the_least_left():
    key, tenant = account(requests_per_minute=60), account("t", requests_per_minute=600)
    rate_limits.charge_request((key, tenant), 0.0)

    assert rate_limits.with_limit_headers((), (key, tenant), 0.0) == (
        ("x-ratelimit-limit-requests", "60"),
        ("x-ratelimit-remaining-requests", "59"),
        ("x-ratelimit-reset-requests", "1s"),
    )
    assert rate_limits.with_limit_headers((), (account(),), 0.0) == ()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0171, "17ms"), (1.54, "1.5s"), (59.9, "59.9s"), (360, "6m0s"), (61, "1m1s")]
)  # fmt: skip
def test_duration_is_formatted_as_openai_does(seconds, text):
    assert rate_limits.format_duration(seconds) == text
