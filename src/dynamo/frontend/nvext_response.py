"""What `nvext.extra_fields` asks to be told beside an answer: who gave it, and how long that took.

Times are the caller's: from the arrival of the request here, in milliseconds, by the original's names. What only a
worker could know (how long a prompt waited there) is not among them, but for a prompt that another worker computed:
who answers is asked to report how its blocks came (`kv_transfer.TransferReport`).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.preprocess import preprocessor
from dynamo.protocols import generate, kv_transfer
from dynamo.router import route

CountTokens = Callable[[Any, int], None]


class NvextResponse:
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
        self._prefilled: route.PrefillResult | None = None
        self._report: kv_transfer.TransferReport | None = None

    def apply(self, prompts: Sequence[preprocessor.Prepared]) -> Sequence[preprocessor.Prepared]:
        """The requests, asking for a report."""
        return [one._replace(request=_reporting(one.request)) for one in prompts]

    def prefilled(self, prefilled: route.PrefillResult) -> None:
        """Another worker has computed the prompt, or the latest."""
        self._prefilled = prefilled

    def reported(self, params: kv_transfer.KvTransferParams) -> None:
        """Keep the answering worker's report of how the prompt's blocks came, if there is one."""
        if params.report is not None:
            self._report = params.report

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
            found["worker_id"] = {
                "prefill_worker_id": self._prefill_worker_id or self._instance_id,
                "decode_worker_id": self._instance_id,
            }
        if "timing" in self._wanted and is_last:
            found["timing"] = self._timing(cached_share)
        return {"nvext": found} if found else {}

    @property
    def _prefill_worker_id(self) -> int | None:
        """None: one worker has done both halves of the work."""
        if self._prefilled is not None:
            return self._prefilled.instance_id
        return self._report.prefill_worker_id if self._report is not None else None

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
            **self._prefill_timing(),
        }

    def _prefill_timing(self) -> dict[str, Any]:
        """Of a prompt that another worker has computed."""
        report, found = self._report, {}
        if self._prefilled is not None:
            found["prefill_time_ms"] = self._prefilled.duration_s * 1000
        elif report is not None and report.prefill_ms is not None:
            found["prefill_time_ms"] = report.prefill_ms
        if report is not None:
            found["kv_transfer_time_ms"] = report.transfer_ms
            found["kv_transfer_blocks"] = report.num_blocks
        return found


def _reporting(request: generate.Request) -> generate.Request:
    annotations = (*request.annotations, kv_transfer.REPORT_ANNOTATION)
    return msgspec.structs.replace(request, annotations=annotations)
