"""The rate limits of a key and its tenant: requests and tokens per minute, and concurrent responses.

A token bucket holds the amount of one minute and fills up evenly, so a burst may take what was saved, and no client
waits for a full minute to turn. A request is charged for its prompt when it begins and for its output when it ends:
the length of an output is known only then, so a bucket may go into debt, and the next request waits until the debt is
paid. Time is passed in.

Several processes at one port (`--http-workers`) have accounts of the same names, and report to each other what was
charged at each (`peers.SharedUsage`). What the others report is charged here, too: all buckets have the same level but
for the last second; what that granted beyond the limit is a debt.
"""  # decider

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from dynamo.base import errors

_MINUTE_S = 60.0
_RETRY_STREAM_S = 1.0  # it cannot be known when a response ends
STALE_S = 5.0  # after which the answers of a process that reports no more are over
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class RateLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a key or tenant; None: no limit."""

    requests_per_minute: _AtLeastOne | None = None
    tokens_per_minute: _AtLeastOne | None = None
    concurrent_streams: _AtLeastOne | None = None


class AccountUsage(msgspec.Struct, frozen=True, array_like=True):
    """What one process charged to an account since its last report, and the answers that it has now."""

    num_requests: int
    num_tokens: int  # negative if more was given back
    num_streams: int


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
        self.num_streams = 0  # in this process
        self._num_new_requests = self._num_new_tokens = 0  # charged since the last report
        self._num_reported_streams = 0
        self._streams_elsewhere: dict[str, tuple[int, float]] = {}  # by process, with the time
        self.set_limits(limits, now)

    def set_limits(self, limits: RateLimits, now: float) -> None:
        """Replace the limits; what was used stays used."""
        self.requests = _resize(self.requests, limits.requests_per_minute, now)
        self.tokens = _resize(self.tokens, limits.tokens_per_minute, now)
        self.limits = limits

    def count_streams(self, now: float) -> int:
        """Return the answers at the same time, those of other processes by their last reports included."""
        fresh = (
            num_streams
            for num_streams, reported_at in self._streams_elsewhere.values()
            if now - reported_at <= STALE_S
        )
        return self.num_streams + sum(fresh)

    def charge_request(self, now: float) -> None:
        """Take one request."""
        if self.requests is not None:
            self.requests.take(1, now)
            self._num_new_requests += 1

    def charge_tokens(self, num_tokens: int, now: float) -> None:
        """Take tokens; a negative number gives them back."""
        if self.tokens is not None:
            self.tokens.take(num_tokens, now)
            self._num_new_tokens += num_tokens

    def take_report(self) -> AccountUsage | None:
        """Return the usage here that other processes do not know yet; None if there is none."""
        has_limit = self.limits.concurrent_streams is not None
        num_streams = self.num_streams if has_limit else 0
        usage = AccountUsage(self._num_new_requests, self._num_new_tokens, num_streams)
        is_idle = usage == AccountUsage(0, 0, 0) and not self._num_reported_streams
        self._num_new_requests = self._num_new_tokens = 0
        self._num_reported_streams = num_streams
        return None if is_idle else usage

    def add_usage(self, process: str, usage: AccountUsage, now: float) -> None:
        """Charge what another process reported."""
        if self.requests is not None:
            self.requests.take(usage.num_requests, now)
        if self.tokens is not None:
            self.tokens.take(usage.num_tokens, now)
        self._streams_elsewhere[process] = (usage.num_streams, now)


def _resize(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    return TokenBucket(per_minute, now) if bucket is None else bucket.resize(per_minute, now)


def charge_request(accounts: Iterable[RateAccount], now: float) -> None:
    """Charge one request to all accounts, or to none. Raises RateLimited."""
    buckets = [(account, account.requests) for account in accounts if account.requests is not None]
    for account, bucket in buckets:
        _check(account, bucket, 1, now, "requests per minute")
    for account, _ in buckets:
        account.charge_request(now)


def start_response(accounts: Iterable[RateAccount], num_prompt_tokens: int, now: float) -> None:
    """Charge a response and its prompt to all accounts, or to none. Raises RateLimited."""
    accounts = tuple(accounts)
    for account in accounts:
        max_streams = account.limits.concurrent_streams
        if max_streams is not None and (num_streams := account.count_streams(now)) >= max_streams:
            raise errors.RateLimited(
                f"{account.name} has {num_streams} answers at the same time, "
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
        account.charge_tokens(num_tokens, now)


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
