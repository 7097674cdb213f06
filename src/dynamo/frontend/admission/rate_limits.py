"""The rate limits of a key and its tenant: requests and tokens per minute, and concurrent responses.

A token bucket holds the amount of one minute and fills up evenly, so a burst may take what was saved, and no client
waits for a full minute to turn. A request is charged for its prompt when it begins and for its output when it ends:
the length of an output is known only then, so a bucket may go into debt, and the next request waits until the debt is
paid. Time is passed in.
"""  # decider

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from dynamo.base import errors

_MINUTE_S = 60.0
_RETRY_STREAM_S = 1.0  # it cannot be known when a response ends
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class RateLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a key or tenant; None: no limit."""

    requests_per_minute: _AtLeastOne | None = None
    tokens_per_minute: _AtLeastOne | None = None
    concurrent_streams: _AtLeastOne | None = None


class TokenBucket:
    """A bucket that holds at most `per_minute` and fills by as much in a minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._updated_at = now

    def level(self, now: float) -> float:
        """Return the amount that can be taken now; negative while the bucket is in debt."""
        elapsed_s = max(0.0, now - self._updated_at)
        return min(self.per_minute, self._level + elapsed_s * self.per_minute / _MINUTE_S)

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` can be taken, or until the bucket is full if it never holds as much."""
        missing = min(amount, self.per_minute) - self.level(now)
        return max(0.0, missing * _MINUTE_S / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, into debt if need be. A negative amount is given back."""
        self._level = min(self.per_minute, self.level(now) - amount)
        self._updated_at = max(self._updated_at, now)

    def resize(self, per_minute: int, now: float) -> "TokenBucket":
        """Return a bucket of another size from which the same amount is taken."""
        bucket = TokenBucket(per_minute, now)
        bucket.take(self.per_minute - self.level(now), now)
        return bucket


class RateAccount:
    """The usage of one key, or of one tenant; `name` is shown to clients."""

    def __init__(self, name: str, limits: RateLimits, now: float) -> None:
        self.name = name
        self.limits = RateLimits()
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.num_streams = 0
        self.set_limits(limits, now)

    def set_limits(self, limits: RateLimits, now: float) -> None:
        """Replace the limits; what was used stays used."""
        self.requests = _resize(self.requests, limits.requests_per_minute, now)
        self.tokens = _resize(self.tokens, limits.tokens_per_minute, now)
        self.limits = limits


def _resize(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    return TokenBucket(per_minute, now) if bucket is None else bucket.resize(per_minute, now)


def charge_request(accounts: Iterable[RateAccount], now: float) -> None:
    """Charge one request to all accounts, or to none. Raises RateLimited."""
    buckets = [(account, account.requests) for account in accounts if account.requests is not None]
    for account, bucket in buckets:
        _check(account, bucket, 1, now, "requests per minute")
    for _, bucket in buckets:
        bucket.take(1, now)


def start_response(accounts: Iterable[RateAccount], num_prompt_tokens: int, now: float) -> None:
    """Charge a response and its prompt to all accounts, or to none. Raises RateLimited."""
    accounts = tuple(accounts)
    for account in accounts:
        max_streams = account.limits.concurrent_streams
        if max_streams is not None and account.num_streams >= max_streams:
            raise errors.RateLimited(
                f"{account.name} has {account.num_streams} answers at the same time, "
                "which is its limit: wait for one to end",
                retry_after_s=_RETRY_STREAM_S,
            )
        if account.tokens is not None:
            _check(account, account.tokens, num_prompt_tokens, now, "tokens per minute")
    for account in accounts:
        account.num_streams += 1
    charge_tokens(accounts, num_prompt_tokens, now)


def charge_tokens(accounts: Iterable[RateAccount], num_tokens: int, now: float) -> None:
    """Take tokens from all accounts; a negative number gives them back."""
    for account in accounts:
        if account.tokens is not None:
            account.tokens.take(num_tokens, now)


def finish_response(accounts: Iterable[RateAccount], num_tokens: int, now: float) -> None:
    """End a response and charge its output of `num_tokens` tokens."""
    accounts = tuple(accounts)
    for account in accounts:
        account.num_streams -= 1
    charge_tokens(accounts, num_tokens, now)


def _check(account: RateAccount, bucket: TokenBucket, amount: float, now: float, unit: str) -> None:
    wait_s = bucket.wait_s(amount, now)
    if wait_s > 0:
        raise errors.RateLimited(
            f"{account.name} has reached its limit of {bucket.per_minute} {unit}: "
            f"try again in {format_duration(wait_s)}",
            retry_after_s=wait_s,
        )


def with_limit_headers(
    headers: Iterable[tuple[str, str]], accounts: Sequence[RateAccount], now: float
) -> tuple[tuple[str, str], ...]:
    """Return the headers with OpenAI's `x-ratelimit-*` of the account with the least left, in place of earlier ones."""
    buckets_by_kind = (
        ("requests", [account.requests for account in accounts if account.requests is not None]),
        ("tokens", [account.tokens for account in accounts if account.tokens is not None]),
    )
    shown = [header for header in headers if not header[0].startswith("x-ratelimit-")]
    for kind, buckets in buckets_by_kind:
        if not buckets:
            continue
        tightest = min(buckets, key=lambda bucket: bucket.level(now))
        reset_s = tightest.wait_s(tightest.per_minute, now)
        shown += [
            (f"x-ratelimit-limit-{kind}", str(tightest.per_minute)),
            (f"x-ratelimit-remaining-{kind}", str(max(0, int(tightest.level(now))))),
            (f"x-ratelimit-reset-{kind}", format_duration(reset_s)),
        ]
    return tuple(shown)


def format_duration(seconds: float) -> str:
    """Format a duration as OpenAI does: `17ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < _MINUTE_S:
        return f"{round(seconds, 1):g}s"
    minutes, remainder_s = divmod(round(seconds), 60)
    return f"{minutes}m{remainder_s}s"
