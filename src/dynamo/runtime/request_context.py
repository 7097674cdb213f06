"""The context of one request of a service: its id, its trace, and whether its answer is still wanted."""

import asyncio
from collections.abc import Mapping

from dynamo.base import ids
from dynamo.protocols import trace_context

_ID_HEADER = "x-request-id"


class Context:
    """One request, as its handler and the requests that it makes of others see it.

    It is *stopped* when no further items are wanted, and *killed* when its client is gone.
    """

    def __init__(self, id: str | None = None, *, headers: Mapping[str, str] = {}) -> None:  # noqa: A002 (theirs; read only)
        """`id` is made up if it is not given; `headers` are those of the request that a handler answers."""
        self._id = id or headers.get(_ID_HEADER) or ids.new_request_id()
        self._trace = trace_context.read(headers)
        self._is_stopped = self._is_killed = False
        self._waiting: set[asyncio.Future[bool]] = set()

    def id(self) -> str:
        """Return the id of the request, which it has in each process."""
        return self._id

    def is_stopped(self) -> bool:
        """Return whether no further items are wanted."""
        return self._is_stopped

    def is_killed(self) -> bool:
        """Return whether the client is gone."""
        return self._is_killed

    def stop_generating(self) -> None:
        """Have the handler of the request end its answer behind the present item. Idempotent."""
        self._is_stopped = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(True)

    def kill(self) -> None:
        """Take note that the client is gone. Idempotent."""
        self._is_killed = True
        self.stop_generating()

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        """Return what is done when the request is killed or stopped; it may be cancelled."""
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._is_stopped:
            waiting.set_result(True)
        else:
            self._waiting.add(waiting)
            waiting.add_done_callback(self._waiting.discard)
        return waiting

    @property
    def trace_id(self) -> str | None:
        """The id of the trace that the request belongs to, 32 hexadecimal digits; None without one."""
        return self._trace.trace_id if self._trace is not None else None

    @property
    def span_id(self) -> str | None:
        """None: a handler has no span of its own here, and those that it makes are children of `parent_span_id`."""
        return None

    @property
    def parent_span_id(self) -> str | None:
        """The id of the span of the caller, 16 hexadecimal digits; None without a trace."""
        return self._trace.span_id if self._trace is not None else None

    def trace_headers(self) -> dict[str, str] | None:
        """Return the headers that carry the trace to an engine; None without a trace."""
        return self._trace.headers() if self._trace is not None else None

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers by which another process names this request."""
        return {_ID_HEADER: self._id, **(self.trace_headers() or {})}
