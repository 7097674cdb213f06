"""What a key and its tenant may use: requests and tokens per minute, answers at the same time.

A bucket holds a minute's share and fills up evenly, so a burst may take what was saved, and nobody waits for a full
minute to turn. A request costs its prompt when it begins and its answer when it ends: how long an answer gets is
known only then, so tokens may go into debt, and the next request waits until it is paid. Time is passed in.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from dynamo.base import errors

_MINUTE_S = 60.0
_RETRY_STREAM_S = 1.0  # when an answer ends cannot be known
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class RateLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None: no limit."""

    requests_per_minute: _AtLeastOne | None = None
    tokens_per_minute: _AtLeastOne | None = None
    concurrent_streams: _AtLeastOne | None = None


class TokenBucket:
    """Fills by `per_minute` in a minute, and holds as much."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """What can be taken now; negative if it is in debt."""
        elapsed_s = max(0.0, now - self._at)
        return min(self.per_minute, self._level + elapsed_s * self.per_minute / _MINUTE_S)

    def wait_s(self, amount: float, now: float) -> float:
        """How long until it holds `amount`, or is full, where `amount` is more than it can hold; 0: now."""
        missing = min(amount, self.per_minute) - self.level(now)
        return max(0.0, missing * _MINUTE_S / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Take it, if need be on credit. A negative amount is given back."""
        self._level = min(self.per_minute, self.level(now) - amount)
        self._at = max(self._at, now)

    def resized(self, per_minute: int, now: float) -> "TokenBucket":
        """One of another size, in which no more and no less is used."""
        made = TokenBucket(per_minute, now)
        made.take(self.per_minute - self.level(now), now)
        return made


class RateAccount:
    """What one key, or one tenant, has used."""

    def __init__(self, name: str, limits: RateLimits, now: float) -> None:
        self.name = name  # as it is told to the caller
        self.limits = RateLimits()
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.num_streams = 0
        self.change(limits, now)

    def change(self, limits: RateLimits, now: float) -> None:
        """Other limits from now on; what was used stays used."""
        self.requests = _resized(self.requests, limits.requests_per_minute, now)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute, now)
        self.limits = limits

    @property
    def is_streaming_enough(self) -> bool:
        """Does it have all the answers at once that it may?"""
        most = self.limits.concurrent_streams
        return most is not None and self.num_streams >= most


def _resized(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    return TokenBucket(per_minute, now) if bucket is None else bucket.resized(per_minute, now)


def charge_request(accounts: Iterable[RateAccount], now: float) -> None:
    """One request, from all of them or from none. Raises RateLimited."""
    buckets = [(one, one.requests) for one in accounts if one.requests is not None]
    for account, bucket in buckets:
        _check(account, bucket, 1, now, "requests per minute")
    for _, bucket in buckets:
        bucket.take(1, now)


def start_response(accounts: Iterable[RateAccount], num_prompt_tokens: int, now: float) -> None:
    """An answer begins, by all of them or by none. Raises RateLimited."""
    accounts = tuple(accounts)
    for account in accounts:
        if account.is_streaming_enough:
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
    """Tokens were used, or (negative) were not used after all."""
    for account in accounts:
        if account.tokens is not None:
            account.tokens.take(num_tokens, now)


def finish_response(accounts: Iterable[RateAccount], num_tokens: int, now: float) -> None:
    """An answer of so many tokens is over."""
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


def limit_headers(accounts: Sequence[RateAccount], now: float) -> tuple[tuple[str, str], ...]:
    """OpenAI's `x-ratelimit-*`, of the account that has least left."""
    requests = [one.requests for one in accounts if one.requests is not None]
    tokens = [one.tokens for one in accounts if one.tokens is not None]
    return (*_headers_of("requests", requests, now), *_headers_of("tokens", tokens, now))


def _headers_of(
    kind: str, buckets: Sequence[TokenBucket], now: float
) -> tuple[tuple[str, str], ...]:
    if not buckets:
        return ()
    tightest = min(buckets, key=lambda one: one.level(now))
    return (
        (f"x-ratelimit-limit-{kind}", str(tightest.per_minute)),
        (f"x-ratelimit-remaining-{kind}", str(max(0, int(tightest.level(now))))),
        (f"x-ratelimit-reset-{kind}", format_duration(tightest.wait_s(tightest.per_minute, now))),
    )


def format_duration(seconds: float) -> str:
    """As OpenAI writes it: `17ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < _MINUTE_S:
        return f"{round(seconds, 1):g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
