"""The trace context of a request, as W3C's headers carry it (https://www.w3.org/TR/trace-context-1/).

There are two headers: `traceparent` (trace id, id of the caller's span, sampling decision) and `tracestate` (values of
tracing vendors). A malformed header counts as absent: a request is never refused for its trace.
"""  # decider

import re
from collections.abc import Mapping

import msgspec

SAMPLED = 1
_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<rest>-.*)?"
)
_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_MEMBER = re.compile(rf"({_KEY})=[ -+\--<>-~]{{0,255}}[!-+\--<>-~]")
_MAX_MEMBERS = 32
_MAX_STATE = 512  # characters; each process must forward at least this many
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """The identity of one span of a trace."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    flags: int = 0
    state: str = ""

    @property
    def is_sampled(self) -> bool:
        """True if spans of this trace are recorded."""
        return bool(self.flags & SAMPLED)

    def child(self, span_id: str) -> "TraceContext":
        """Return the context of another span of the same trace."""
        return TraceContext(self.trace_id, span_id, self.flags, self.state)

    def headers(self) -> dict[str, str]:
        """Return the headers that carry this context to another process."""
        headers = {"traceparent": f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"}
        if self.state:
            headers["tracestate"] = self.state
        return headers


def read(headers: Mapping[str, str]) -> TraceContext | None:
    """Read the context from headers (names in lower case). Returns None without a valid `traceparent`."""
    if (traceparent := headers.get("traceparent")) is None:
        return None
    parts = _PARENT.fullmatch(traceparent.strip())
    if parts is None or parts["version"] == "ff":
        return None
    if parts["version"] == "00" and parts["rest"]:
        return None  # only a later version may have more parts
    if parts["trace"] == _NO_TRACE or parts["span"] == _NO_SPAN:
        return None
    flags = int(parts["flags"], 16) & SAMPLED
    return TraceContext(
        parts["trace"], parts["span"], flags, _valid_state(headers.get("tracestate", ""))
    )


def _valid_state(text: str) -> str:
    """Return a `tracestate` without blanks; the empty text if one of its members is malformed."""
    if not text:
        return ""
    members = [member.strip(" \t") for member in text.split(",")]
    members = [member for member in members if member]
    state = ",".join(members)
    keys = [match[1] for member in members if (match := _MEMBER.fullmatch(member))]
    is_valid = len(keys) == len(set(keys)) == len(members) <= _MAX_MEMBERS
    return state if is_valid and len(state) <= _MAX_STATE else ""
