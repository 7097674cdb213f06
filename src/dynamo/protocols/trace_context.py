"""Which trace a request belongs to, as W3C Trace Context says it (https://www.w3.org/TR/trace-context-1/).

Two headers: `traceparent` (the trace, the span that asks, and whether it is recorded) and `tracestate` (what tracing
vendors keep beside). What is broken counts as absent: a request is never refused for its trace.
"""

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
_MAX_STATE = 512  # characters; the least that everybody must pass on
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """One span of one trace."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    flags: int = 0
    state: str = ""

    @property
    def is_sampled(self) -> bool:
        """Is this trace recorded?"""
        return bool(self.flags & SAMPLED)

    def child(self, span_id: str) -> "TraceContext":
        """Another span of the same trace."""
        return TraceContext(self.trace_id, span_id, self.flags, self.state)

    def headers(self) -> dict[str, str]:
        """What tells others of it."""
        told = {"traceparent": f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"}
        if self.state:
            told["tracestate"] = self.state
        return told


def read(headers: Mapping[str, str]) -> TraceContext | None:
    """What these headers (names in lower case) tell; None if there is no valid `traceparent`."""
    if (told := headers.get("traceparent")) is None:
        return None
    found = _PARENT.fullmatch(told.strip())
    if found is None or found["version"] == "ff":
        return None
    if found["version"] == "00" and found["rest"]:
        return None  # only a later version may have more
    if found["trace"] == _NO_TRACE or found["span"] == _NO_SPAN:
        return None
    flags = int(found["flags"], 16) & SAMPLED
    return TraceContext(found["trace"], found["span"], flags, _state(headers.get("tracestate", "")))


def _state(text: str) -> str:
    """The list if it is valid, else nothing: one bad member spoils it."""
    if not text:
        return ""
    members = [member.strip(" \t") for member in text.split(",")]
    members = [member for member in members if member]
    state = ",".join(members)
    keys = [found[1] for member in members if (found := _MEMBER.fullmatch(member))]
    is_valid = len(keys) == len(set(keys)) == len(members) <= _MAX_MEMBERS
    return state if is_valid and len(state) <= _MAX_STATE else ""
