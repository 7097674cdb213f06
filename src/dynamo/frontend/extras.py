"""What `nvext.extra_fields` asks to be told beside an answer: who gave it, and how long that took.

Times are the caller's: from the arrival of the request here, in milliseconds, by the original's names. What only a
worker could know (how long a prompt waited there) is not among them.
"""

from collections.abc import Callable, Collection
from typing import Any

from dynamo.base import clock as clocks

CountTokens = Callable[[Any, int], None]


class Extras:
    """Of one request. `clock` is read once per token, which is why nobody has this unasked."""

    def __init__(self, wanted: Collection[str], clock: clocks.Clock) -> None:
        self._wanted = frozenset(wanted)
        self._clock = clock
        self._received_ms = round(clock.wall() * 1000)
        self._started_at = clock.now()
        self._first_at: float | None = None
        self._last_at = self._started_at
        self._num_tokens = 0
        self._num_first = 0  # tokens of the first output
        self._instance_id: int | None = None

    def asked(self, instance_id: int) -> None:
        """This worker has the request, or its latest prompt."""
        self._instance_id = instance_id

    def counting(self, count: CountTokens) -> CountTokens:
        """The same, with a look at the clock."""

        def count_and_time(choice: Any, num_tokens: int) -> None:
            self._tokens(num_tokens)
            count(choice, num_tokens)

        return count_and_time

    def fields(self, *, is_last: bool, cached_share: float = 0.0) -> dict[str, Any]:
        """`nvext` of a chunk or of a whole answer; only the last of a stream has times."""
        found: dict[str, Any] = {}
        if "worker_id" in self._wanted and self._instance_id is not None:
            # one worker does both halves of the work
            names = ("prefill_worker_id", "decode_worker_id")
            found["worker_id"] = dict.fromkeys(names, self._instance_id)
        if "timing" in self._wanted and is_last:
            found["timing"] = self._timing(cached_share)
        return {"nvext": found} if found else {}

    def _tokens(self, num_tokens: int) -> None:
        self._last_at = self._clock.now()
        self._num_tokens += num_tokens
        if self._first_at is None:
            self._first_at, self._num_first = self._last_at, num_tokens

    def _timing(self, cached_share: float) -> dict[str, Any]:
        first_at = self._started_at if self._first_at is None else self._first_at
        num_later = self._num_tokens - self._num_first
        return {
            "request_received_ms": self._received_ms,
            "ttft_ms": (first_at - self._started_at) * 1000,
            "itl_ms": (self._last_at - first_at) * 1000 / num_later if num_later else None,
            "total_time_ms": (self._clock.now() - self._started_at) * 1000,
            "kv_hit_rate": cached_share,
        }
