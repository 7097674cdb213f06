"""The `nvext` object of a response, as `nvext.extra_fields` requests it: which workers answered, and how long it took.

Times are measured here, from the arrival of the request, in milliseconds, under the original's names. Times that only a
worker could measure (how long a prompt waited there) are left out, except those of a prompt that another worker
computed: the worker that answers is asked to report how its blocks came (`kv_transfer.TransferReport`).

Routing headers, by which a gateway names the worker of a request, override the `nvext` of its body.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend import metrics
from dynamo.preprocess import inputs, preprocessor
from dynamo.protocols import kv_transfer
from dynamo.router import route

INSTANCE = ("x-worker-instance-id", "x-dynamo-worker-instance-id")
RANK = ("x-dp-rank", "x-dynamo-dp-rank")
SESSION = "x-dynamo-session-id"
_ALL = frozenset((*INSTANCE, *RANK, SESSION))
MAX_SESSION_ID = 200
EXPLANATION = "explanation"  # of the router's decisions
EXPLAIN_HEADER = "x-dynamo-explain"  # any value asks for the explanation
CountTokens = Callable[[Any, int], None]


class NvextResponse:
    """The `nvext` object of one request. `clock` is read once per token, so it is made only where it is requested."""

    def __init__(self, requested_fields: Collection[str], clock: clocks.Clock) -> None:
        self._requested_fields = frozenset(requested_fields)
        self._clock = clock
        self._received_ms = round(clock.wall() * 1000)
        self._started_at = clock.now()
        self._first_at: float | None = None
        self._last_at = self._started_at
        self._num_tokens = 0
        self._num_first = 0  # tokens in the first output
        self._num_told = 0  # explanations
        self._report: kv_transfer.TransferReport | None = None

    def apply(self, prompts: Sequence[preprocessor.Prepared]) -> Sequence[preprocessor.Prepared]:
        """Return the requests with an annotation that asks for a transfer report."""
        return [
            prompt.with_request(
                msgspec.structs.replace(
                    prompt.request,
                    annotations=(*prompt.request.annotations, kv_transfer.REPORT_ANNOTATION),
                )
            )
            for prompt in prompts
        ]

    def record_transfer(self, params: kv_transfer.KvTransferParams) -> None:
        """Keep the answering worker's report of how the prompt's blocks came, if there is one."""
        if params.report is not None:
            self._report = params.report

    def wrap_counter(self, count: CountTokens) -> CountTokens:
        """Return a function that counts tokens and records their time."""

        def count_and_time(choice: Any, num_tokens: int) -> None:
            self._record_tokens(num_tokens)
            count(choice, num_tokens)

        return count_and_time

    def build_fields(
        self, request: metrics.RequestMeter, *, is_last: bool, cached_share: float = 0.0
    ) -> dict[str, Any]:
        """Return `nvext` for a chunk or a whole response; only the last chunk has times and explanations."""
        fields: dict[str, Any] = {}
        if "worker_id" in self._requested_fields and request.worker_id is not None:
            fields["worker_id"] = {
                "prefill_worker_id": self._prefill_worker_id(request) or request.worker_id,
                "decode_worker_id": request.worker_id,
            }
        if "timing" in self._requested_fields and is_last:
            fields["timing"] = self._timing(cached_share) | self._prefill_timing(request.prefill)
            if request.tier_tokens:  # loaded from a tier below the engine's memory
                fields["timing"]["kv_tier_tokens"] = dict(request.tier_tokens)
        if EXPLANATION in self._requested_fields and is_last:
            # each once: of many choices all have a last chunk
            untold = (request.explanations or [])[self._num_told :]
            fields[EXPLANATION] = [explained for explained, _ in untold]
            self._num_told += len(untold)
        return {"nvext": fields} if fields else {}

    def _prefill_worker_id(self, request: metrics.RequestMeter) -> int | None:
        """Return the worker that computed the prompt; None: the one that answers."""
        if request.prefill is not None:
            return request.prefill.instance_id
        return self._report.prefill_worker_id if self._report is not None else None

    def _record_tokens(self, num_tokens: int) -> None:
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

    def _prefill_timing(self, prefill: route.PrefillResult | None) -> dict[str, Any]:
        """Return the times of a prompt that another worker has computed."""
        report, times = self._report, {}
        if prefill is not None:
            times["prefill_time_ms"] = prefill.duration_s * 1000
        elif report is not None and report.prefill_ms is not None:
            times["prefill_time_ms"] = report.prefill_ms
        if report is not None:
            times["kv_transfer_time_ms"] = report.transfer_ms
            times["kv_transfer_blocks"] = report.num_blocks
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHeaders:
    """The values of the routing headers; None: the header is absent."""

    instance_id: int | None = None
    data_parallel_rank: int | None = None
    session_id: str | None = None

    def apply(
        self, prompts: Sequence[preprocessor.Prepared], cache_salt: str | None = None
    ) -> Sequence[preprocessor.Prepared]:
        """Return the requests with the rank and session of the headers, and with this salt of their blocks."""
        if self is NO_ROUTING and cache_salt is None:
            return prompts
        values = {
            "data_parallel_rank": self.data_parallel_rank,
            "session_id": self.session_id,
            "cache_salt": cache_salt,
        }
        changes = {name: value for name, value in values.items() if value is not None}
        return [
            prompt.with_request(msgspec.structs.replace(prompt.request, **changes))
            for prompt in prompts
        ]

    def chooses_worker(self, request: inputs.GenerationInput) -> bool:
        """Return whether the request names a worker or asks which one it would get, by a header or in its body."""
        is_query = "query_instance_id" in (request.extensions.annotations or ())
        return is_query or (self.instance_of(request), self.data_parallel_rank) != (None, None)

    def instance_of(self, request: inputs.GenerationInput) -> int | None:
        """Return the worker that the request is for; None: any."""
        return request.instance_id if self.instance_id is None else self.instance_id


NO_ROUTING = RoutingHeaders()


def requested_fields(
    request: inputs.GenerationInput, headers: Mapping[str, str]
) -> Collection[str]:
    """Return the fields of `nvext` that the body or the header `x-dynamo-explain` asks for."""
    extensions = request.nvext
    fields: Collection[str] = () if extensions is None else extensions.extra_fields or ()
    return (*fields, EXPLANATION) if EXPLAIN_HEADER in headers else fields


def parse_headers(headers: Mapping[str, str]) -> RoutingHeaders:
    """Parse the routing headers of a request. Raises InvalidRequest that names a wrong header."""
    if _ALL.isdisjoint(headers):
        return NO_ROUTING
    return RoutingHeaders(
        instance_id=_parse_number(headers, INSTANCE, 2**63 - 1),
        data_parallel_rank=_parse_number(headers, RANK, 2**31 - 1),
        session_id=_parse_session(headers),
    )


def _parse_number(headers: Mapping[str, str], names: tuple[str, ...], highest: int) -> int | None:
    for name in names:
        value = headers.get(name)
        if value is None:
            continue
        if value.isascii() and value.isdigit() and len(value) <= 20 and int(value) <= highest:
            return int(value)
        raise _make_error(name, f"a whole number from 0 to {highest}", value)
    return None


def _parse_session(headers: Mapping[str, str]) -> str | None:
    value = headers.get(SESSION)
    if value is not None and not 0 < len(value) <= MAX_SESSION_ID:
        raise _make_error(SESSION, f"1 to {MAX_SESSION_ID} characters", value)
    return value


def _make_error(name: str, expected: str, value: str) -> errors.InvalidRequest:
    return errors.InvalidRequest.of_param(name, f"expected {expected}, got {value[:40]!r}")
