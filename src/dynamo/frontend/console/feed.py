"""The events of the console: once a second a frame for each open page, and nothing at all while no page is open.

Pages that show the same views to viewers with the same rights get the same bytes, made once. A page that does not read
is cut off by its connection, as any stream is; more than `MAX_STREAMS` pages are refused.

The planners of the frontend's namespaces are asked for their reports while a console shows them. Other frontends and
routers are looked for in discovery, where each frontend has a record.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo.base import errors, tasks
from dynamo.console import request_rows, topology
from dynamo.frontend.console import recorder as recording
from dynamo.frontend.console import views
from dynamo.frontend.delivery import sse
from dynamo.frontend.model_registry import registry
from dynamo.protocols import instances, planner_report
from dynamo.runtime import client, component, events
from dynamo.runtime.http import exchange

_FIND_S = 0.5  # for discovery to show the planners of a namespace, the first time
_ANSWER_S = 5.0
_LOOK_S = 2.0  # between two looks into discovery for other frontends and routers
_decode_frontend = msgspec.json.Decoder(instances.FrontendRecord).decode
_decode_instance = msgspec.json.Decoder(instances.Instance).decode


class PlannerPage(msgspec.Struct, frozen=True, kw_only=True):
    """The reports of all planners, those that act first."""

    planners: Sequence[planner_report.PlannerReport]


class Planners:
    """Finds the planners of the models' namespaces."""

    def __init__(
        self,
        runtime: component.DistributedRuntime,
        models: registry.ModelRegistry,
        namespace: str,
    ) -> None:
        self._runtime, self._models, self._namespace = runtime, models, namespace
        self._clients: dict[str, client.EndpointClient] = {}

    async def ask(self, query: planner_report.PlannerQuery) -> PlannerPage:
        """Ask all planners; one that does not answer is left out."""
        namespaces = _namespaces_of(self._models, self._namespace)
        for namespace in namespaces - self._clients.keys():
            name = instances.EndpointName(namespace, "planner", "decisions")
            self._clients[namespace] = endpoint = self._runtime.client(name)
            with contextlib.suppress(errors.NoWorkers):
                await endpoint.wait_for_instances(_FIND_S)
        reports = await asyncio.gather(
            *(
                self._ask_one(endpoint, instance_id, query)
                for endpoint in self._clients.values()
                for instance_id in list(endpoint.instances)
            )
        )
        answered = [report for report in reports if report is not None]
        answered.sort(key=lambda report: not any(each.is_leader for each in report.decisions[:1]))
        return PlannerPage(planners=answered)

    async def _ask_one(
        self, endpoint: client.EndpointClient, instance_id: int, query: planner_report.PlannerQuery
    ) -> planner_report.PlannerReport | None:
        try:
            return await endpoint.call(
                query,
                reply_type=planner_report.PlannerReport,
                instance_id=instance_id,
                timeout_s=_ANSWER_S,
            )
        except errors.DynamoError:
            return None


class OtherProcesses:
    """Finds the other frontends, and the routers that are processes of their own; looks at most every `_LOOK_S`."""

    def __init__(
        self,
        runtime: component.DistributedRuntime,
        models: registry.ModelRegistry,
        describe_self: Callable[[], instances.FrontendRecord],
    ) -> None:
        self._runtime, self._models, self._describe_self = runtime, models, describe_self
        self._rows: Sequence[topology.ProcessRow] = ()
        self._looked_at = -math.inf

    def list_all(self) -> Sequence[topology.ProcessRow]:
        """Return this frontend, then what was found last."""
        own = _frontend_row(self._describe_self(), is_self=True)
        return [own, *(row for row in self._rows if row.instance != own.instance)]

    async def look(self) -> None:
        """Look into discovery, unless that was done a short time ago; what cannot be read stays as it was."""
        now = self._runtime.clock.now()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        with contextlib.suppress(errors.Unavailable):
            self._rows = [*await self._find_frontends(), *await self._find_routers()]

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await self._runtime.clock.sleep(_LOOK_S)

    async def _find_frontends(self) -> list[topology.ProcessRow]:
        own, rows = self._describe_self().namespace, []
        found = await self._runtime.discovery.get_prefix(instances.FRONTENDS)
        for value in found.values():
            with contextlib.suppress(msgspec.MsgspecError):  # of another version
                record = _decode_frontend(value)
                if record.namespace in ("", own) or instances.covers_namespace(
                    own, record.namespace
                ):
                    rows.append(_frontend_row(record))
        return rows

    async def _find_routers(self) -> list[topology.ProcessRow]:
        rows = []
        for namespace in sorted(_namespaces_of(self._models, self._describe_self().namespace)):
            name = instances.EndpointName(namespace, "router", "generate")
            found = await self._runtime.discovery.get_prefix(f"{instances.INSTANCES}{name.path}/")
            for value in found.values():
                with contextlib.suppress(msgspec.MsgspecError):
                    record = _decode_instance(value)
                    rows.append(
                        topology.ProcessRow(
                            instance=f"{record.instance_id:x}",
                            kind="router",
                            namespace=namespace,
                            address=", ".join(record.transport.values()),
                        )
                    )
        return rows


def _frontend_row(
    record: instances.FrontendRecord, *, is_self: bool = False
) -> topology.ProcessRow:
    return topology.ProcessRow(
        instance=f"{record.instance_id:x}",
        kind="frontend",
        namespace=record.namespace,
        host=record.host,
        address=record.url,
        router_mode=record.router_mode,
        state="draining" if record.is_draining else "ready",
        is_self=is_self,
    )


def _namespaces_of(models: registry.ModelRegistry, own: str) -> set[str]:
    """Return the namespaces of the models that are served, and that of the frontend itself."""
    names = {endpoint.namespace for model in models.ready for endpoint in model.replicas}
    return names | {own or "dynamo"}


INTERVAL_S = 1.0
MAX_STREAMS = 16
VIEWS = ("topology", "requests", "metrics", "cache", "log")
ADMIN_VIEWS = frozenset(("cache", "log"))
_FIRST_REQUESTS = request_rows.RequestQuery()
_FIRST_WORKERS = topology.WorkerQuery()


@dataclass(eq=False, slots=True, kw_only=True)
class _Stream:
    client: exchange.Exchange
    authorize: Callable[[], views.Viewer]
    names: Sequence[str]
    last_line: int = field(default=0)  # of the log, that was sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """The console of one frontend."""

    recorder: recording.ConsoleRecorder
    views: views.Views
    feed: "Feed"
    planners: Planners
    processes: OtherProcesses


class Feed:
    """The event streams of all open pages."""

    def __init__(
        self,
        shown: views.Views,
        models: registry.ModelRegistry,
        event_plane: events.EventPlane,
        processes: OtherProcesses,
    ) -> None:
        self._views = shown
        self._processes = processes
        self._recorder: recording.ConsoleRecorder = shown.recorder
        self._models = models
        self._event_plane = event_plane
        self._streams: list[_Stream] = []
        self._tasks = tasks.Tasks()
        self._running: list[asyncio.Task[None]] = []

    def open(
        self,
        client: exchange.Exchange,
        authorize: Callable[[], views.Viewer],
        names: Sequence[str],
    ) -> None:
        """Begin a stream of these views; it ends when `authorize` raises RequestError.

        Raises Overloaded if too many are open.
        """
        if len(self._streams) >= MAX_STREAMS:
            raise errors.Overloaded(
                f"{MAX_STREAMS} consoles are open already: close one, or try again later"
            )
        stream = _Stream(client=client, authorize=authorize, names=names)
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
                self._tasks.start("follow processes for consoles", self._processes.follow()),
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
            try:
                viewer = stream.authorize()
            except errors.RequestError:  # its key was removed, or has fewer rights
                stream.client.end()
                self._remove(stream)
                continue
            frame = b""
            for name in stream.names:
                if name == "log":
                    lines = self._recorder.log.after(stream.last_line)
                    stream.last_line = lines[-1].number if lines else stream.last_line
                    frame += _encode_event(name, lines) if lines else b""
                    continue
                key = (name, viewer)
                if key not in made:
                    made[key] = _encode_event(name, self._make(name)(viewer))
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
