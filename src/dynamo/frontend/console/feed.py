"""The events of the console: once a second a frame for each open page, and nothing at all while no page is open.

Pages that show the same views to viewers with the same rights get the same bytes, made once. A page that does not read
is cut off by its connection, as any stream is; more than `MAX_STREAMS` pages are refused.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dynamo.base import errors, tasks
from dynamo.console import request_rows, topology
from dynamo.frontend.console import planners, views
from dynamo.frontend.console import recorder as recording
from dynamo.frontend.delivery import sse
from dynamo.frontend.model_registry import registry
from dynamo.runtime import events
from dynamo.runtime.http import exchange

INTERVAL_S = 1.0
MAX_STREAMS = 16
VIEWS = ("topology", "requests", "metrics", "cache", "log")
ADMIN_VIEWS = frozenset(("cache", "log"))
_FIRST_REQUESTS = request_rows.RequestQuery()
_FIRST_WORKERS = topology.WorkerQuery()


@dataclass(eq=False, slots=True, kw_only=True)
class _Stream:
    client: exchange.Exchange
    viewer: views.Viewer
    names: Sequence[str]
    last_line: int = field(default=0)  # of the log, that was sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """The console of one frontend."""

    recorder: recording.ConsoleRecorder
    views: views.Views
    feed: "Feed"
    planners: planners.Planners


class Feed:
    """The event streams of all open pages."""

    def __init__(
        self,
        shown: views.Views,
        models: registry.ModelRegistry,
        event_plane: events.EventPlane,
    ) -> None:
        self._views = shown
        self._recorder: recording.ConsoleRecorder = shown.recorder
        self._models = models
        self._event_plane = event_plane
        self._streams: list[_Stream] = []
        self._tasks = tasks.Tasks()
        self._running: list[asyncio.Task[None]] = []

    def open(self, client: exchange.Exchange, viewer: views.Viewer, names: Sequence[str]) -> None:
        """Begin a stream of these views. Raises Overloaded if too many are open."""
        if len(self._streams) >= MAX_STREAMS:
            raise errors.Overloaded(
                f"{MAX_STREAMS} consoles are open already: close one, or try again later"
            )
        stream = _Stream(client=client, viewer=viewer, names=names)
        client.start_stream(
            200, content_type=sse.CONTENT_TYPE, headers=(("cache-control", "no-cache"),)
        )
        client.on_disconnect(lambda: self._remove(stream))
        self._streams.append(stream)
        self._recorder.num_viewers = len(self._streams)
        self._send([stream])
        if not self._running:
            self._running = [
                self._tasks.start("send frames to consoles", self._send_for_ever()),
                self._tasks.start(
                    "follow loads for consoles",
                    self._recorder.follow_loads(self._models, self._event_plane),
                ),
            ]

    def end_all(self) -> None:
        """End all streams, because the frontend stops."""
        for stream in list(self._streams):
            stream.client.end()
            self._remove(stream)

    async def close(self) -> None:
        """End all streams and the tasks behind them."""
        self.end_all()
        await self._tasks.close()

    def _remove(self, stream: _Stream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)
        self._recorder.num_viewers = len(self._streams)
        if not self._streams:
            for task in self._running:
                task.cancel()
            self._running = []

    async def _send_for_ever(self) -> None:
        while True:
            await self._recorder.clock.sleep(INTERVAL_S)
            self._send(list(self._streams))

    def _send(self, streams: Sequence[_Stream]) -> None:
        made: dict[tuple[str, views.Viewer], bytes] = {}
        for stream in streams:
            frame = b""
            for name in stream.names:
                if name == "log":
                    lines = self._recorder.log.after(stream.last_line)
                    stream.last_line = lines[-1].number if lines else stream.last_line
                    frame += _encode_event(name, lines) if lines else b""
                    continue
                key = (name, stream.viewer)
                if key not in made:
                    made[key] = _encode_event(name, self._make(name)(stream.viewer))
                frame += made[key]
            stream.client.write(frame or b": nothing new\n\n")

    def _make(self, name: str) -> Callable[[views.Viewer], object]:
        return {
            "topology": lambda viewer: self._views.show_topology(viewer, _FIRST_WORKERS),
            "requests": lambda viewer: self._views.list_requests(viewer, _FIRST_REQUESTS),
            "metrics": lambda _: self._recorder.history.latest(),
            "cache": lambda _: self._views.show_cache(),
        }[name]


def _encode_event(name: str, value: object) -> bytes:
    return f"event: {name}\n".encode() + b"data: " + sse.encode(value) + b"\n\n"
