"""A client for operators: what runs behind a frontend, and commands to its workers. It needs no event loop.

    client = Client("http://127.0.0.1:8000", api_key="sk-root-1")
    for worker in client.list_workers():
        print(worker.model, worker.role, worker.state, worker.num_running)
    WorkerClient("http://127.0.0.1:8081").load_lora("poet", "file:///adapters/poet")

A frontend knows workers by their instance ids; commands go to a worker's own system port (`--system-port`). With keys a
client needs one with `admin = true` to see all. The number of workers belongs to what starts them: `dynamo serve`,
a planner (`read_planners` returns its decisions), or a cluster.
"""

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from dynamo.base import errors, membership
from dynamo.console import topology, usage
from dynamo.protocols import planner_report

T = TypeVar("T")
# Without a proxy, which the environment may name for everything and which does not reach this machine's processes.
_open_here = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
_ERROR_BY_STATUS: dict[int, type[errors.DynamoError]] = {
    401: errors.Unauthenticated,
    403: errors.Forbidden,
    409: errors.Conflict,
}


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that clients can ask for; `parent` is the model of a LoRA adapter."""

    id: str
    created: int = 0
    parent: str | None = None


class _ModelList(msgspec.Struct):
    data: list[ServedModel]


class _UsageList(msgspec.Struct):
    rows: list[usage.UsageRow]


class _PlannerList(msgspec.Struct):
    planners: list[planner_report.PlannerReport]


class _Adapters(msgspec.Struct):
    loras: dict[str, int]


class _Reason(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Reason


def read_refusal(body: bytes) -> str:
    """Return the message of a refusal as a frontend or a worker words it; of others the beginning of the body."""
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except (UnicodeDecodeError, msgspec.MsgspecError):
        return body[:500].decode(errors="replace")


class HttpClient:
    """Requests to one process. Raises Unavailable if it does not answer, and a RequestError for what it refuses."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s

    def is_healthy(self) -> bool:
        """Return whether the process answers and says that it can serve."""
        try:
            self._ask("GET", "/health", Any)
        except errors.DynamoError:
            return False
        return True

    def read(self, path: str) -> str:
        """Return the text at a path, for example `/metrics`."""
        return self._send("GET", path).decode(errors="replace")

    def _ask(self, method: str, path: str, answer_type: type[T] | Any, body: object = None) -> T:
        try:
            result: T = msgspec.json.decode(self._send(method, path, body), type=answer_type)
        except (UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise errors.RemoteProtocolError(f"{method} {self.url}{path}: {error}") from error
        return result

    def _send(self, method: str, path: str, body: object = None) -> bytes:
        content = None if body is None else msgspec.json.encode(body)
        headers = {**self._headers, "content-type": "application/json"}
        request = urllib.request.Request(
            self.url + path, data=content, method=method, headers=headers
        )
        try:
            return self._read_answer(request)
        except (OSError, UnicodeError, http.client.HTTPException) as error:  # no name, no HTTP
            raise errors.Unavailable(f"{self.url} does not answer: {error}") from error

    def _read_answer(self, request: urllib.request.Request) -> bytes:
        """Return the body of an answer. Raises a DynamoError for a status that is an error."""
        is_here = membership.is_loopback(urlsplit(self.url).hostname or "")
        open_url = _open_here if is_here else urllib.request.urlopen
        try:
            with open_url(request, timeout=self._timeout_s) as answer:
                page: bytes = answer.read()
                return page
        except urllib.error.HTTPError as error:
            reason = read_refusal(error.read())
            default = errors.InvalidRequest if error.code < 500 else errors.Unavailable
            raised = _ERROR_BY_STATUS.get(error.code, default)
            message = f"{request.method} {request.full_url}: {error.code}: {reason}"
            raise raised(message) from error


class Client(HttpClient):
    """A frontend."""

    def list_models(self) -> Sequence[ServedModel]:
        """Return the models, LoRA adapters included."""
        listed: _ModelList = self._ask("GET", "/v1/models", _ModelList)
        return listed.data

    def list_workers(self, model: str = "") -> Iterator[topology.WorkerRow]:
        """Yield all workers, or those of one model, page by page; those that left within a minute are `gone`."""
        offset = 0
        while True:
            query = urlencode({"model": model, "offset": offset})
            page: topology.TopologyPage = self._ask(
                "GET", f"/console/api/topology?{query}", topology.TopologyPage
            )
            yield from page.workers
            offset += len(page.workers)
            if len(page.workers) < topology.MAX_PAGE:
                return

    def list_usage(self, *, since: str = "", **filters: str) -> Sequence[usage.UsageRow]:
        """Return the sums by day from `since` (2026-11-23) on; filters are key, tenant and model."""
        query = urlencode({"since": since, **filters})
        listed: _UsageList = self._ask("GET", f"/usage?{query}", _UsageList)
        return listed.rows

    def read_planners(self, factor: float | None = None) -> Sequence[planner_report.PlannerReport]:
        """Return the reports of all planners; with `factor`, what they would do under so many times the load."""
        query = "" if factor is None else f"?factor={factor}"
        listed: _PlannerList = self._ask("GET", f"/console/api/planner{query}", _PlannerList)
        return listed.planners

    def clear_kv_blocks(self) -> dict[str, Any]:
        """Clear the prefix caches of all workers; return the reply of each."""
        return self._ask("POST", "/clear_kv_blocks", dict[str, Any])


class WorkerClient(HttpClient):
    """A worker, at its system port."""

    def list_loras(self) -> dict[str, int]:
        """Return the loaded LoRA adapters with their numbers."""
        adapters: _Adapters = self._ask("GET", "/v1/loras", _Adapters)
        return adapters.loras

    def load_lora(self, name: str, uri: str) -> None:
        """Load an adapter; clients can use it when this returns."""
        self._ask("POST", "/v1/loras", Any, {"lora_name": name, "source": {"uri": uri}})

    def unload_lora(self, name: str) -> None:
        """Unload an adapter; requests that run go on."""
        self._ask("DELETE", f"/v1/loras/{quote(name)}", Any)

    def sleep(self, level: int = 1) -> None:
        """Drain the worker and release its engine's memory; `wake_up` brings it back."""
        self._ask("POST", "/engine/sleep", Any, {"level": level})

    def wake_up(self) -> None:
        """Take the memory back, and serve again."""
        self._ask("POST", "/engine/wake_up", Any, {})

    def drain(self) -> None:
        """Let the worker finish its requests and end, as SIGTERM does; a supervisor may start another."""
        self._ask("POST", "/engine/drain", Any, {})
