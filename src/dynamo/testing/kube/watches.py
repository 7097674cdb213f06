"""Watches over HTTP: what exists, then each change as a line of JSON, with bookmarks and a time limit."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

from dynamo.testing.kube import api, calls, failures, resources, store, tables

Object = dict[str, Any]
_BOOKMARK_S = 60.0
_DEFAULT_S = (1800, 3600)  # a watch without a limit of its own ends after a time between these
_END = "k8s.io/initial-events-end"


def parse_revision(text: str, current: int) -> int:
    """Return the revision of a list request; 0 for the newest. Raises ApiError (400, 504)."""
    if not text:
        return 0
    if not text.isdigit():
        message = (
            f'invalid resource version: resourceVersion: Invalid value: "{text}": '
            f'strconv.ParseUint: parsing "{text}": invalid syntax'
        )
        raise failures.bad_request(message)
    if int(text) > current:
        message = f"Timeout: Too large resource version: {text}, current: {current}"
        causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
        raise failures.ApiError(
            504,
            "Timeout",
            message,
            {"causes": causes, "retryAfterSeconds": 1},
            (("retry-after", "1"),),
        )
    return int(text)


def check_list_options(query: calls.Query, *, is_watch: bool = False) -> None:
    """Refuse combinations of parameters that mean nothing. Raises ApiError (400, 422)."""
    version, match = query.get("resourceVersion"), query.get("resourceVersionMatch")
    findings = []
    if version and query.get("continue") and version != "0":
        text = "specifying resource version is not allowed when using continue"
        raise failures.bad_request(text)
    if query.flag("sendInitialEvents") and not is_watch:
        text = "sendInitialEvents is forbidden for list"
        findings.append(failures.forbidden_value("sendInitialEvents", text))
    elif query.flag("sendInitialEvents") and match != "NotOlderThan":
        text = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
        findings.append(failures.forbidden_value("resourceVersionMatch", text))
    elif match and is_watch and not query.flag("sendInitialEvents"):
        text = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided"
        findings.append(failures.forbidden_value("resourceVersionMatch", text))
    elif match and not version and not is_watch:
        text = "resourceVersionMatch is forbidden unless resourceVersion is provided"
        findings.append(failures.forbidden_value("resourceVersionMatch", text))
    elif match not in ("", "Exact", "NotOlderThan"):
        choices = '"Exact", "NotOlderThan", ""'
        findings.append(failures.unsupported("resourceVersionMatch", f'"{match}"', choices))
    if findings:
        raise failures.invalid("ListOptions.meta.k8s.io", "", findings)


class Watch:
    """One open watch. It writes from the store's own callback, so events keep their order and cost no task.

    Objects that a webhook converts wait in a queue instead, which the request's own task empties.
    """

    def __init__(
        self, served: api.Api, resource: resources.ApiResource, call: calls.ApiCall
    ) -> None:
        self._api = served
        self._resource = resource
        self._call = call
        self._exchange = call.exchange
        query = call.query
        check_list_options(query, is_watch=True)
        fields = query.get("fieldSelector")
        if call.name:  # GET /api/v1/watch/namespaces/x/configmaps/y
            fields = f"metadata.name={call.name}"
        self._test = served.make_test(resource, query.get("labelSelector"), fields)
        self._has_bookmarks = query.flag("allowWatchBookmarks")
        self._is_table_begun = False
        self._revision = query.get("resourceVersion")
        if self._revision and not self._revision.isdigit():
            text = (
                f'resourceVersion: Invalid value: "{self._revision}": strconv.ParseUint: '
                f'parsing "{self._revision}": invalid syntax'
            )
            raise failures.ApiError(500, "", text)
        limit_s = query.number("timeoutSeconds")
        self._limit_s = limit_s or random.uniform(*_DEFAULT_S)
        self._timers: list[asyncio.TimerHandle] = []
        self._unsubscribe: Callable[[], object] = lambda: None
        self._queue: asyncio.Queue[tuple[str, Object] | None] = asyncio.Queue()

    async def start(self) -> None:
        """Begin the stream: existing objects or missed changes, then whatever comes."""
        query, objects = self._call.query, self._api.store
        begins_with_state = self._revision in ("", "0") or query.flag("sendInitialEvents")
        self._exchange.start_stream(200, content_type="application/json")
        self._exchange.send_head()
        if begins_with_state:
            for item in objects.list_items(self._resource.key, self._call.namespace):
                if self._test(item):
                    self._send("ADDED", item)
            if self._has_bookmarks:
                self._bookmark({_END: "true"})
        else:
            try:
                missed = list(objects.changes_after(int(self._revision), self._resource.key))
            except failures.ApiError as error:
                self._exchange.end(_line({"type": "ERROR", "object": error.body}))
                return
            for change in missed:
                self._on_change(change)
        self._unsubscribe = objects.subscribe(self._on_change)
        self._start_timers()
        self._exchange.on_disconnect(self._stop)
        while self._resource.conversion and (event := await self._queue.get()) is not None:
            kind, item = event
            try:
                if kind != "BOOKMARK":
                    (item,) = await self._api.present(self._resource, [item])
            except failures.ApiError as error:
                self._stop()
                self._exchange.end(_line({"type": "ERROR", "object": error.body}))
                return
            self._write(kind, item)

    def _start_timers(self) -> None:
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(self._limit_s, self._expire))
        if self._has_bookmarks:
            for delay_s in (_BOOKMARK_S, self._limit_s - 2, self._limit_s - 1):
                if delay_s > 4:
                    self._timers.append(loop.call_later(delay_s, self._tick))

    def _on_change(self, change: store.Change) -> None:
        if change.table != self._resource.key:
            return
        meta = change.item["metadata"]
        if self._call.namespace and meta.get("namespace") != self._call.namespace:
            return
        if self._revision.isdigit() and change.revision <= int(self._revision):
            return  # a watch from a revision that is still to come
        was_chosen = change.previous is not None and self._test(change.previous)
        is_chosen = change.type != "DELETED" and self._test(change.item)
        if was_chosen and not is_chosen:
            item = change.item
            if change.type != "DELETED" and change.previous is not None:
                version = {"resourceVersion": meta["resourceVersion"]}
                previous = change.previous
                item = {**previous, "metadata": {**previous["metadata"], **version}}
            self._send("DELETED", item)
        elif is_chosen:
            self._send("MODIFIED" if was_chosen else "ADDED", item=change.item)

    def _send(self, kind: str, item: Object) -> None:
        if self._resource.conversion:
            self._queue.put_nowait((kind, item))
        else:
            self._write(kind, self._api.complete(self._resource, item))

    def _write(self, kind: str, shown: Object) -> None:
        if kind == "BOOKMARK":
            self._exchange.write(_line({"type": kind, "object": shown}))
            return
        meta = {"resourceVersion": shown["metadata"]["resourceVersion"]}
        table = tables.present(
            self._resource,
            [shown],
            self._call.accept,
            self._call.query.get("includeObject"),
            shown,
            meta,
        )
        if table is not None:
            if self._is_table_begun and table["kind"] == "Table":
                table["columnDefinitions"] = None
            self._is_table_begun = True
            shown = table
        self._exchange.write(_line({"type": kind, "object": shown}))

    def _bookmark(self, annotations: Object | None = None) -> None:
        meta: Object = {"resourceVersion": str(self._api.store.revision)}
        if annotations:
            meta["annotations"] = annotations
        head = {"kind": self._resource.kind, "apiVersion": self._resource.api_version}
        bookmark = {**head, "metadata": meta}
        if self._resource.conversion:
            self._queue.put_nowait(("BOOKMARK", bookmark))
        else:
            self._write("BOOKMARK", bookmark)

    def _tick(self) -> None:
        self._bookmark()
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(_BOOKMARK_S, self._tick))

    def _expire(self) -> None:
        self._stop()
        self._exchange.end()

    def _stop(self) -> None:
        self._unsubscribe()
        for timer in self._timers:
            timer.cancel()
        self._queue.put_nowait(None)


def _line(event: Object) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"
