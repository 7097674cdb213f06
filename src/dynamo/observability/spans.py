"""What a process tells of the stages of a request, and which requests it tells of.

A span is made when its stage is over: the times were taken on the way, so a request that runs pays for nothing. The
choice of requests (*sampling*) is OpenTelemetry's `parentbased_traceidratio`: a trace that comes from elsewhere keeps
its mark; of the traces that begin here, the ratio that is asked for is recorded, chosen by the trace's id, so that
all processes choose alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dynamo.base import ids
from dynamo.protocols import trace_context

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stage that is over. Times are seconds since 1970."""

    name: str
    context: trace_context.TraceContext
    parent_id: str | None
    started_at: float
    ended_at: float
    kind: Literal["server", "internal"] = "internal"
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str | None = None


class Exporter(Protocol):
    """Where spans go. `export` returns at once; what there is no room for is dropped."""

    def export(self, spans: Sequence[Span]) -> None:
        """Take these."""
        ...

    def close(self) -> None:
        """Send what waits, within a bounded time. Blocks."""
        ...


Entered = tuple[trace_context.TraceContext | None, str | None]
Enter = Callable[[Mapping[str, str]], Entered]


def pass_on(headers: Mapping[str, str]) -> Entered:
    """Where no spans are told: the trace that came goes on as it is; one that is broken is begun anew."""
    if "traceparent" not in headers:
        return None, None
    found = trace_context.read(headers)
    return found or _new_trace(0), None


def enter(headers: Mapping[str, str], *, ratio: float) -> Entered:
    """The span that a request begins here, and the id of the span that asked for it."""
    parent = trace_context.read(headers)
    if parent is None:
        return _new_trace(ratio), None
    return parent.child(ids.new_span_id()), parent.span_id


def _new_trace(ratio: float) -> trace_context.TraceContext:
    trace_id = ids.new_trace_id()
    is_chosen = int(trace_id[16:], 16) < ratio * 2**64
    return trace_context.TraceContext(trace_id, ids.new_span_id(), int(is_chosen))


Wall = Callable[[float], float]


def wall_of(now: float, wall: float) -> Wall:
    """From times of the steady clock to times since 1970, given both at one moment."""
    return lambda at: wall - (now - at)


def children(
    parent: trace_context.TraceContext,
    stages: Sequence[tuple[str, float | None, float | None]],
    wall: Wall,
) -> list[Span]:
    """A span for each stage (name, begin, end, of the steady clock) that came to its end."""
    return [
        Span(
            name=name,
            context=parent.child(ids.new_span_id()),
            parent_id=parent.span_id,
            started_at=wall(began_at),
            ended_at=wall(ended_at),
        )
        for name, began_at, ended_at in stages
        if began_at is not None and ended_at is not None
    ]
