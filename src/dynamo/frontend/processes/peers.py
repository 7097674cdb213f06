"""The peers of a frontend process: the other processes at the same port, and what they ask one another.

The kernel distributes connections, so whatever one process alone knows has to be asked for: its metrics, a response
that it keeps, a threshold that was set there. Each process listens at a Unix socket in a directory that only the user
of their parent can enter; every socket in the directory is a peer. A peer that does not answer is left out.

The metrics of several processes make one page on which each sample is labelled by its process. Which samples may be
added up (counters, most gauges) and which not (a model's context length) only the reader knows; Prometheus adds by
`sum without (http_worker)`.

The process that gets a request may not be the one that stores the response from which it continues. It asks its peers
for all responses that it does not have at once, and stores what they give, so that a conversation that moves to another
connection moves to its process once. An answer that would be too long has a part of them, and is followed by another.

Each process reports to the others what was charged to API keys at it, every `REPORT_INTERVAL_S` while there is
something to report. So a limit holds for all processes together, but for the requests of the last second. A report that
does not arrive is not repeated. A process that is started anew knows nothing of what was charged before.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend.admission import rate_limits
from dynamo.frontend.processes import response_store
from dynamo.runtime.http import client as http_client
from dynamo.runtime.http import exchange, json_body, server

TIMEOUT_S = 2.0
REPORT_INTERVAL_S = 1.0
STORED_PATH, FETCH_PATH, USAGE_PATH = "/kept/", "/kept", "/usage_of_keys"
WORKER_LABEL = "http_worker"
_MAX_BYTES = 64 << 20
_PART_BYTES = 16 << 20  # of responses in one answer, if it has several
_MAX_REFERENCES = 1000  # the last items of an input, among which they are looked for
_logger = logging.getLogger(__name__)
PeerRoutes = Mapping[tuple[str, str], exchange.Handler]


class Peers:
    """The other processes at this port. `own_socket` is where they ask this process; None: it is alone."""

    def __init__(self, own_socket: str | None) -> None:
        self._own_socket = Path(own_socket) if own_socket else None
        self._server: server.HttpServer | None = None

    @property
    def name(self) -> str | None:
        """Return the name of this process among the peers; None if it is alone."""
        return self._own_socket.stem if self._own_socket else None

    async def start(self, routes: PeerRoutes) -> None:
        """Start to answer requests of peers. Does nothing if this process is alone."""
        if self._own_socket is not None:
            self._server = server.HttpServer(
                exchange.HttpRouter(routes, error_body=server.plain_error)
            )
            await self._server.start_at(str(self._own_socket))

    async def close(self) -> None:
        """Stop answering peers. Does nothing if this process is alone or has stopped."""
        if self._server is not None:
            await self._server.close()

    async def ask_all(self, method: str, target: str, body: bytes = b"") -> dict[str, bytes]:
        """Send a request to all peers at once; return the bodies of their 200 responses, by peer."""
        if self._own_socket is None:
            return {}
        sockets = sorted(set(self._own_socket.parent.glob("*.sock")) - {self._own_socket})
        bodies = await asyncio.gather(
            *(self._ask(socket, method, target, body) for socket in sockets)
        )
        return {
            socket.stem: response
            for socket, response in zip(sockets, bodies, strict=True)
            if response is not None
        }

    async def _ask(self, socket: Path, method: str, target: str, body: bytes) -> bytes | None:
        try:
            url, path = f"http://peer{target}", str(socket)
            status, content = await http_client.request(
                method, url, body, timeout_s=TIMEOUT_S, socket_path=path, max_bytes=_MAX_BYTES
            )
        except errors.Unavailable as error:
            _logger.info("the process at %s: %s", socket.name, error)
            return None
        return content if status == 200 else None


def respond_optional(client: exchange.Exchange, body: bytes | None) -> None:
    """Answer a peer with a body, or with status 404 if there is none."""
    client.respond(404 if body is None else 200, body or b"")


def merge_metrics(text_by_process: Mapping[str, str]) -> str:
    """Merge the expositions of several processes into one; its samples have the label `http_worker`."""
    comments: dict[str, dict[str, None]] = {}  # by family; each line once, in order
    samples: dict[str, list[str]] = {}
    for process, text in text_by_process.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):  # HELP or TYPE, the name, the rest
                family = line.split(" ", 3)[2]
                comments.setdefault(family, {})[line] = None
            elif line:
                samples.setdefault(family, []).append(_add_label(line, process))
    lines = (line for name in comments for line in (*comments[name], *samples.get(name, ())))
    return "".join(f"{line}\n" for line in lines)


def _add_label(sample: str, process: str) -> str:
    name, brace, labels = sample.partition("{")
    if brace:
        return f'{name}{{{WORKER_LABEL}="{process}",{labels}'
    name, _, value = sample.partition(" ")
    return f'{name}{{{WORKER_LABEL}="{process}"}} {value}'


_encode = msgspec.msgpack.Encoder().encode
_decode_stored = msgspec.msgpack.Decoder(dict[str, response_store.StoredResponse]).decode
_decode_ids = msgspec.msgpack.Decoder(list[str]).decode


class _InputItem(msgspec.Struct, frozen=True):
    """The fields of an item that is a reference to one of a stored response."""

    type: Any = None
    id: Any = None


class _Continuation(msgspec.Struct, frozen=True):
    """The fields of a request that name responses from which it continues."""

    previous_response_id: str | None = None
    input: str | list[_InputItem] = ""

    @property
    def response_ids(self) -> Collection[str]:
        """Return the ids of these responses, each once."""
        items = () if isinstance(self.input, str) else self.input[-_MAX_REFERENCES:]
        response_ids = [
            response_store.response_of(item.id)
            for item in items
            if item.type == response_store.ITEM_REFERENCE and isinstance(item.id, str)
        ]
        return dict.fromkeys([*filter(None, (self.previous_response_id,)), *response_ids])


_decode_continuation = json_body.RequestDecoder(_Continuation).decode


class SharedResponses:
    """The response store of this process and those of its peers."""

    def __init__(
        self,
        store: response_store.ResponseStore,
        other_processes: Peers,
        tenant_of: Callable[[exchange.Exchange], str],
    ) -> None:
        self.store = store
        self._peers = other_processes
        self._tenant_of = tenant_of
        self.routes: PeerRoutes = {
            ("POST", FETCH_PATH): self._respond_stored,
            ("DELETE", STORED_PATH + "*"): self._remove,
        }

    def wrap_continuing(self, handler: exchange.Handler) -> exchange.Handler:
        """Return a handler that first fetches the responses from which a request continues."""
        if self._peers.name is None:
            return handler

        async def handle(client: exchange.Exchange) -> None:
            try:
                continuation = await exchange.decode_apart(
                    client.request.body, _decode_continuation
                )
                response_ids = continuation.response_ids
            except errors.InvalidRequest:
                response_ids = ()  # the error is reported where the whole request is decoded
            await self._fetch(response_ids)
            await _finish(handler(client))

        return handle

    def wrap_lookup(
        self, id_of: Callable[[exchange.Exchange], str], handler: exchange.Handler
    ) -> exchange.Handler:
        """Return a handler that fetches the response of `id_of` first; DELETE removes it from all processes."""
        if self._peers.name is None:
            return handler

        async def handle(client: exchange.Exchange) -> None:
            response_id = id_of(client)
            await self._fetch((response_id,))
            is_own = self.store.find(response_id, self._tenant_of(client)) is not None
            if client.request.method == "DELETE" and is_own:
                await self._peers.ask_all("DELETE", STORED_PATH + quote(response_id, safe=""))
            await _finish(handler(client))

        return handle

    async def _fetch(self, response_ids: Collection[str]) -> None:
        missing = [each for each in response_ids if self.store.find_any(each) is None]
        while missing:
            bodies = await self._peers.ask_all("POST", FETCH_PATH, _encode(missing))
            fetched = {
                name: kept
                for body in bodies.values()
                for name, kept in _decode_stored(body).items()
            }
            for response_id, stored in fetched.items():
                self.store.put(response_id, stored)
            missing = [each for each in missing if each not in fetched] if fetched else []

    def _respond_stored(self, client: exchange.Exchange) -> None:
        found: dict[str, response_store.StoredResponse] = {}
        num_bytes = 0
        for response_id in _decode_ids(client.request.body):
            stored = self.store.find_any(response_id)
            if stored is not None:
                num_bytes += stored.num_bytes
                if found and num_bytes > _PART_BYTES:
                    break
                found[response_id] = stored
        client.respond(200, _encode(found))

    def _remove(self, client: exchange.Exchange) -> None:
        was_stored = self.store.remove(client.request.path.removeprefix(STORED_PATH))
        respond_optional(client, b"" if was_stored else None)


async def _finish(answering: Awaitable[None] | None) -> None:
    if answering is not None:
        await answering


class UsageReport(msgspec.Struct, frozen=True, array_like=True):
    """What was charged to API keys at one process since its last report."""

    process: str
    usage_by_account: dict[str, rate_limits.AccountUsage]


_decode_report = msgspec.msgpack.Decoder(UsageReport).decode
ListAccounts = Callable[[], Mapping[str, rate_limits.RateAccount]]


class SharedUsage:
    """The accounts of API keys of this process, which are kept equal to those of its peers."""

    def __init__(self, list_accounts: ListAccounts, siblings: Peers, clock: clocks.Clock) -> None:
        """`list_accounts` returns the accounts of the keys and tenants that are valid now, by name."""
        self._list_accounts = list_accounts
        self._siblings = siblings
        self._clock = clock
        self.routes: PeerRoutes = {("POST", USAGE_PATH): self._receive}

    async def run(self) -> None:
        """Report until cancelled. Does nothing if this process is alone."""
        while self._siblings.name is not None:
            await self._clock.sleep(REPORT_INTERVAL_S)
            reports = {
                name: account.take_report() for name, account in self._list_accounts().items()
            }
            usage = {name: report for name, report in reports.items() if report is not None}
            if usage:
                report = _encode(UsageReport(self._siblings.name, usage))
                with contextlib.suppress(OSError):  # no more files can be open: not reported
                    await self._siblings.ask_all("POST", USAGE_PATH, report)

    def _receive(self, client: exchange.Exchange) -> None:
        """Charge what a peer reports; accounts that are not in our version of the key file are left out."""
        report, accounts = _decode_report(client.request.body), self._list_accounts()
        now = self._clock.now()
        for name, usage in report.usage_by_account.items():
            if name in accounts:
                accounts[name].add_usage(report.process, usage, now)
        client.respond(200, b"")
