"""Headers by which a gateway before us says where a request shall go. They count more than the body's `nvext`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynamo.base import errors
from dynamo.preprocess import preprocessor
from dynamo.protocols import generate, openai_fields

INSTANCE = ("x-worker-instance-id", "x-dynamo-worker-instance-id")
RANK = ("x-dp-rank", "x-dynamo-dp-rank")
SESSION = ("x-dynamo-session-id",)
_ALL = frozenset((*INSTANCE, *RANK, *SESSION))
MAX_SESSION_ID = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHeaders:
    """What they say; None: nothing."""

    instance_id: int | None = None
    data_parallel_rank: int | None = None
    session_id: str | None = None

    def apply(self, prompts: Sequence[preprocessor.Prepared]) -> Sequence[preprocessor.Prepared]:
        """The requests, with what they say of them."""
        if self is NO_ROUTING:
            return prompts
        return [one._replace(request=self._tell(one.request)) for one in prompts]

    def _tell(self, request: generate.Request) -> generate.Request:
        told = {"data_parallel_rank": self.data_parallel_rank, "session_id": self.session_id}
        return msgspec.structs.replace(
            request, **{name: value for name, value in told.items() if value is not None}
        )

    def instance_of(self, request: openai_fields.GenerationFields) -> int | None:
        """The worker to ask; None: any."""
        return request.instance_id if self.instance_id is None else self.instance_id


NO_ROUTING = RoutingHeaders()


def parse_headers(headers: Mapping[str, str]) -> RoutingHeaders:
    """Raises InvalidRequest, which names the header."""
    if _ALL.isdisjoint(headers):
        return NO_ROUTING
    return RoutingHeaders(
        instance_id=_number(headers, INSTANCE, 2**63 - 1),
        data_parallel_rank=_number(headers, RANK, 2**31 - 1),
        session_id=_session(headers),
    )


def _number(headers: Mapping[str, str], names: tuple[str, ...], highest: int) -> int | None:
    for name in names:
        value = headers.get(name)
        if value is None:
            continue
        if value.isascii() and value.isdigit() and len(value) <= 20 and int(value) <= highest:
            return int(value)
        raise _wrong(name, f"a whole number from 0 to {highest}", value)
    return None


def _session(headers: Mapping[str, str]) -> str | None:
    for name in SESSION:
        value = headers.get(name)
        if value is not None and not 0 < len(value) <= MAX_SESSION_ID:
            raise _wrong(name, f"1 to {MAX_SESSION_ID} characters", value)
        if value is not None:
            return value
    return None


def _wrong(name: str, wanted: str, value: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"{name}: expected {wanted}, got {value[:40]!r}", param=name)
