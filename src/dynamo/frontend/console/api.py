"""The operations of the console: its page at `/` and `/console`, its files, and the API under `/console/api`.

The page has no script of its own and loads nothing from elsewhere, which its Content-Security-Policy holds it to. Page
and files are open to all, because a browser asks for them before a person can give a key; what they show is not.
"""

import functools
import importlib.resources
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec

from dynamo.base import distribution, errors, membership
from dynamo.console import log_lines, request_rows, topology, usage
from dynamo.frontend.admission import authentication
from dynamo.frontend.apis import error_dialects
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    ANY_NAME,
    HTML,
    Operation,
    add_request_id,
)
from dynamo.frontend.console import feed, views
from dynamo.frontend.delivery import delivery, sse
from dynamo.frontend.processes import peers
from dynamo.protocols import planner_report
from dynamo.runtime.http import exchange, json_body

Q = TypeVar("Q", bound=msgspec.Struct)
API = "/console/api"
EVENTS = f"{API}/events"
USAGE = "/usage"
_ADMIN_PATHS = frozenset((f"{API}/cache", f"{API}/log", f"{API}/planner"))
_OTHER_ERRORS = {f"{API}/requests/{ANY_NAME}": (404,), EVENTS: (503,)}
_FILES = {
    "/": ("index.html", HTML),
    "/console": ("index.html", HTML),
    "/console/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/console/app.css": ("app.css", "text/css; charset=utf-8"),
    "/console/icon.svg": ("icon.svg", "image/svg+xml"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
)
Answer = Callable[[exchange.Exchange, views.Viewer, Any], object]


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of a view that takes none."""


class ModelQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model to show the metrics of; empty: all together."""

    model: str = ""


class LogQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which lines of the log to list."""

    after: int = 0
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "DEBUG"
    limit: Annotated[int, msgspec.Meta(ge=1, le=log_lines.MAX_LINES)] = 200


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which usage to list: rows of these values, and days from `since` on, as 2026-11-23."""

    format: Literal["json", "csv"] = "json"
    since: Annotated[str, msgspec.Meta(pattern=r"^(\d{4}-\d{2}-\d{2})?$")] = ""
    key: str = ""
    tenant: str = ""
    model: str = ""

    def matches(self, row: usage.UsageRow) -> bool:
        """Return whether a row is listed."""
        return (
            row.day >= self.since
            and self.key in ("", row.key)
            and self.tenant in ("", row.tenant)
            and self.model.lower() in ("", row.model)
        )


class PlannerPageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A what-if: the multiple of the last load for which each planner simulates its decisions."""

    factor: Annotated[float, msgspec.Meta(ge=0, le=planner_report.MOST_FACTOR)] | None = None


class EventQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The views of a stream, separated by commas."""

    views: str = "topology"


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the last lines of this process's log, the oldest first."""

    lines: Sequence[log_lines.LogLine]


class UsagePage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage, the latest day first."""

    rows: Sequence[usage.UsageRow]


class ConsoleApi:
    """The handlers of the console's API."""

    def __init__(
        self, console: feed.Console, rights: authentication.ClientRights, siblings: peers.Peers
    ) -> None:
        self._console = console
        self._rights = rights
        self._siblings = siblings

    def make_handler(
        self, query_type: type[Q], answer: Answer, *, for_admins: bool = False
    ) -> exchange.Handler:
        """Return a handler that decodes the query and answers what `answer` returns, or what it returns later.

        None: it has answered itself.
        """

        def handle(client: exchange.Exchange) -> Awaitable[None] | None:
            try:
                viewer = self._find_viewer(client)
                if for_admins:
                    _check_administrator(viewer, client.request.path)
                result = answer(client, viewer, decode_query(client.request.query, query_type))
                if inspect.isawaitable(result):
                    return _answer_later(client, result)
                if result is not None:
                    client.respond(200, sse.encode(result))
            except errors.DynamoError as error:
                delivery.respond_error(client, error, error_dialects.OPENAI)
            return None

        return add_request_id(handle)

    def _find_viewer(self, client: exchange.Exchange) -> views.Viewer:
        """Return the viewer with the rights that the key has now. Raises Unauthenticated."""
        api_key = self._rights.api_key_of(client)
        return views.Viewer(
            entry=None if api_key is None else api_key.entry,
            is_local=membership.is_loopback(client.request.peer.rpartition(":")[0]),
        )

    def show_session(
        self, _: exchange.Exchange, viewer: views.Viewer, __: NoQuery
    ) -> views.ConsoleSession:
        """Return the key and the rights of the viewer, and the process that answers."""
        return views.ConsoleSession(
            key="" if viewer.entry is None else viewer.entry.name,
            may_administer=viewer.may_administer,
            version=distribution.version(),
            process=self._siblings.name or "",
            router_mode=self._console.views.router_mode,
            started_at=self._console.recorder.started_at,
            keeps_usage=self._console.recorder.keeps_usage,
        )

    async def show_topology(
        self, _: exchange.Exchange, viewer: views.Viewer, query: topology.WorkerQuery
    ) -> topology.TopologyPage:
        """Return some of the workers, and the other processes."""
        await self._console.processes.look()
        return self._console.views.show_topology(viewer, query)

    def list_requests(
        self, _: exchange.Exchange, viewer: views.Viewer, query: request_rows.RequestQuery
    ) -> request_rows.RequestPage:
        return self._console.views.list_requests(viewer, query)

    def show_request(
        self, client: exchange.Exchange, viewer: views.Viewer, _: NoQuery
    ) -> request_rows.RequestRow | None:
        """Return one request, or answer that it is not kept."""
        request_id = client.request.path.removeprefix(f"{API}/requests/")
        row = self._console.views.find_request(viewer, request_id)
        if row is None:
            message = (
                f"no request {request_id[:100]!r} is kept here: only those in flight and the last "
                "ended ones are"
            )
            client.respond(404, error_dialects.OPENAI.refusal(404, message))
        return row

    def show_metrics(
        self, _: exchange.Exchange, viewer: views.Viewer, query: ModelQuery
    ) -> views.MetricPage:
        """Return the last hour. Raises Forbidden for a model that the viewer may not see."""
        if not viewer.sees_model(query.model) and query.model:
            raise errors.Forbidden(f"this key may not see the model {query.model[:100]!r}")
        return self._console.views.show_metrics(viewer, query.model)

    def show_models(self, _: exchange.Exchange, viewer: views.Viewer, __: NoQuery) -> object:
        return self._console.views.show_models(viewer)

    def show_cache(self, _: exchange.Exchange, __: views.Viewer, ___: NoQuery) -> object:
        """Return the shared prefixes."""
        return self._console.views.show_cache()

    def show_log(self, _: exchange.Exchange, __: views.Viewer, query: LogQuery) -> LogPage:
        """Return lines of the log."""
        least_level = logging.getLevelNamesMapping()[query.level]
        return LogPage(
            lines=self._console.recorder.log.after(
                query.after, least_level=least_level, limit=query.limit
            )
        )

    def show_planners(
        self, _: exchange.Exchange, __: views.Viewer, query: PlannerPageQuery
    ) -> Awaitable[feed.PlannerPage]:
        """Return the reports of all planners, with a simulated future if the query asks for one."""
        return self._console.planners.ask(planner_report.PlannerQuery(factor=query.factor))

    async def show_usage_of_all(self, client: exchange.Exchange) -> None:
        """Answer the usage of all processes at this port: the sums of each, added up."""
        own = self._console.recorder.usage
        table = usage.UsageTable() if self._siblings.name else own
        for body in (await self._siblings.ask_all("GET", USAGE)).values():
            table.load(msgspec.json.decode(body, type=list[usage.UsageRow]))
        if table is not own:
            table.load(own.rows())
        self.make_handler(UsageQuery, functools.partial(self.show_usage, table))(client)

    def show_usage(
        self,
        table: usage.UsageTable,
        client: exchange.Exchange,
        viewer: views.Viewer,
        query: UsageQuery,
    ) -> UsagePage | None:
        """Return the usage, or answer it as CSV."""
        rows = table.rows(lambda row: query.matches(row) and viewer.sees_key(row.key))
        if query.format == "json":
            return UsagePage(rows=rows)
        client.respond(200, usage.to_csv(rows).encode(), content_type="text/csv; charset=utf-8")
        return None

    def open_events(self, client: exchange.Exchange, _: views.Viewer, query: EventQuery) -> None:
        """Begin a stream of views, which ends when the viewer may no longer see them."""
        names = tuple(dict.fromkeys(query.views.split(",")))
        for name in names:
            if name not in feed.VIEWS:
                raise errors.InvalidRequest.of_param(
                    "views", f"expected some of {', '.join(feed.VIEWS)}, got {name[:100]!r}"
                )

        def authorize() -> views.Viewer:
            viewer = self._find_viewer(client)
            for name in feed.ADMIN_VIEWS.intersection(names):
                _check_administrator(viewer, f"the view {name!r}")
            return viewer

        authorize()
        if client.request.method == "HEAD":
            client.respond(200, b"", content_type=sse.CONTENT_TYPE)
        else:
            self._console.feed.open(client, authorize, names)


def operations(
    console: feed.Console, rights: authentication.ClientRights, siblings: peers.Peers
) -> Sequence[Operation]:
    api = ConsoleApi(console, rights, siblings)
    views_by_path: dict[str, tuple[type, Answer, type | str, str]] = {
        f"{API}/session": (NoQuery, api.show_session, views.ConsoleSession, "The viewer, and the process"),
        f"{API}/topology": (topology.WorkerQuery, api.show_topology, topology.TopologyPage, "The workers, live"),
        f"{API}/requests": (
            request_rows.RequestQuery, api.list_requests, request_rows.RequestPage,
            "The requests in flight and the last ended ones",
        ),
        f"{API}/requests/{ANY_NAME}": (
            NoQuery, api.show_request, request_rows.RequestRow, "One of them, with the router's decisions"
        ),
        f"{API}/metrics": (ModelQuery, api.show_metrics, views.MetricPage, "The last hour"),
        f"{API}/models": (NoQuery, api.show_models, views.ModelPage, "The models, by their cards"),
        f"{API}/cache": (
            NoQuery, api.show_cache, views.CachePage, "Which workers have the prefixes that recent prompts share"
        ),
        f"{API}/planner": (
            PlannerPageQuery, api.show_planners, feed.PlannerPage,
            "The planners: load, prediction, decisions and reasons; ?factor=2 simulates twice the load",
        ),
        f"{API}/log": (LogQuery, api.show_log, LogPage, "The last lines of this process's log"),
        EVENTS: (EventQuery, api.open_events, sse.CONTENT_TYPE, "Once a second some of these views, for ever"),
    }  # fmt: skip
    files = [
        Operation(
            method="GET",
            path=path,
            handler=functools.partial(_show_file, name, media_type),
            summary="The console" if media_type == HTML else f"The console's {name}",
            tag="Console",
            answer=media_type,
        )
        for path, (name, media_type) in _FILES.items()
    ]
    data = [
        Operation(
            method="GET",
            path=path,
            handler=api.make_handler(query_type, answer, for_admins=path in _ADMIN_PATHS),
            summary=summary,
            tag="Console",
            answer=answer_type,
            errors=(400, *ACCESS_ERRORS, *_OTHER_ERRORS.get(path, ())),
        )
        for path, (query_type, answer, answer_type, summary) in views_by_path.items()
    ]
    sums = Operation(
        method="GET",
        path=USAGE,
        handler=api.show_usage_of_all,
        summary="Requests and tokens by day, API key, tenant, model and API; ?format=csv",
        tag="Console",
        answer=UsagePage,
        errors=(400, *ACCESS_ERRORS),
    )
    return (*files, *data, sums)


async def _answer_later(client: exchange.Exchange, result: Awaitable[object]) -> None:
    try:
        client.respond(200, sse.encode(await result))
    except errors.DynamoError as error:
        delivery.respond_error(client, error, error_dialects.OPENAI)


def answer_usage(console: feed.Console, client: exchange.Exchange) -> None:
    """Answer a sibling process at this port with all sums of this one."""
    client.respond(200, sse.encode(console.recorder.usage.rows()))


def _check_administrator(viewer: views.Viewer, name: str) -> None:
    if not viewer.may_administer:
        raise errors.Forbidden(
            f"{name}: expected an administrator's API key (admin = true), or without keys a request from this machine"
        )


def decode_query(query: str, query_type: type[Q]) -> Q:
    """Return the decoded query of a URL. Raises InvalidRequest."""
    try:
        return msgspec.convert(values := dict(parse_qsl(query)), query_type, strict=False)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(json_body.explain(query_type, values, error)) from None


@functools.cache
def _read_file(name: str) -> bytes:
    return importlib.resources.files(__package__).joinpath("assets", name).read_bytes()


def _show_file(name: str, media_type: str, client: exchange.Exchange) -> None:
    client.respond(200, _read_file(name), content_type=media_type, headers=_HEADERS)
