"""Routing headers, by which a gateway names the worker of a request. They override the body's `nvext`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynamo.base import errors
from dynamo.preprocess import inputs, preprocessor

INSTANCE = ("x-worker-instance-id", "x-dynamo-worker-instance-id")
RANK = ("x-dp-rank", "x-dynamo-dp-rank")
SESSION = ("x-dynamo-session-id",)
_ALL = frozenset((*INSTANCE, *RANK, *SESSION))
MAX_SESSION_ID = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHeaders:
    """The values of the routing headers; None: the header is absent."""

    instance_id: int | None = None
    data_parallel_rank: int | None = None
    session_id: str | None = None

    def apply(self, prompts: Sequence[preprocessor.Prepared]) -> Sequence[preprocessor.Prepared]:
        """Return the requests with the rank and session of the headers."""
        if self is NO_ROUTING:
            return prompts
        values = {"data_parallel_rank": self.data_parallel_rank, "session_id": self.session_id}
        changes = {name: value for name, value in values.items() if value is not None}
        return [
            prompt._replace(request=msgspec.structs.replace(prompt.request, **changes))
            for prompt in prompts
        ]

    def instance_of(self, request: inputs.GenerationInput) -> int | None:
        """Return the worker that the request is for; None: any."""
        return request.instance_id if self.instance_id is None else self.instance_id


NO_ROUTING = RoutingHeaders()


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
    for name in SESSION:
        value = headers.get(name)
        if value is not None and not 0 < len(value) <= MAX_SESSION_ID:
            raise _make_error(name, f"1 to {MAX_SESSION_ID} characters", value)
        if value is not None:
            return value
    return None


def _make_error(name: str, expected: str, value: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"{name}: expected {expected}, got {value[:40]!r}", param=name)
