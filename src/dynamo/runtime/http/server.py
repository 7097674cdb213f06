"""A small HTTP/1.1 server: one asyncio.Protocol per connection, no framework between a callback and the socket.

Measured against ASGI and RSGI servers, writing straight from the callback that brings a token costs about a third
less than the next best, because nothing wakes up: no task, queue or timer exists per token. A task per request
runs the handler, if it is asynchronous. One coarse timer serves all connections.

Requests of one connection are answered in the order they came; while one is answered, at most one more is taken in.
A client that does not read its stream is cut off when `Limits.write_buffer_bytes` are waiting for it.
Sockets have TCP_NODELAY, which asyncio sets on each that it accepts.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, local_users, tasks
from dynamo.runtime import authentication, listening
from dynamo.runtime.http import parser
from dynamo.runtime.http.exchange import ErrorBody, Exchange, Handler, Headers, Request

_MAX_REFUSED = 50  # connections beyond the limit that hear why
_logger = logging.getLogger(__name__)


def plain_error(status: int, message: str, _path: str) -> bytes:
    """Return the body of a refusal, where the application has no shape of its own."""
    return msgspec.json.encode({"error": {"message": message, "code": status}})


class HttpServer:
    """Serves `handler` until closed.

    `error_body` shapes what the server itself refuses; `check_head` refuses a request before its body has come, and
    `open_sink` says where a large body goes as it arrives.
    `cors_headers` are those of what the server itself refuses.
    With `takes_upgrades` the handler gets requests that offer another protocol, and may switch to it
    (`Exchange.switch_protocol`); otherwise such offers are ignored.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        limits: parser.HttpLimits | None = None,
        tls: ssl.SSLContext | None = None,
        error_body: ErrorBody = plain_error,
        check_head: parser.CheckHead | None = None,
        open_sink: parser.OpenSink = lambda request: None,
        cors_headers: Callable[[Request], Headers] = lambda request: (),
        takes_upgrades: bool = False,
    ) -> None:
        self.handler = handler
        self.takes_upgrades = takes_upgrades
        self.check_head = check_head
        self.open_sink = open_sink
        self.cors_headers = cors_headers
        self.limits = limits or parser.HttpLimits()
        self.error_body = error_body
        self.answering: dict[Exchange, asyncio.Task[None]] = {}
        self.connections: set[_Connection] = set()
        self.arriving: set[asyncio.Task[None]] = set()  # handshakes of TLS
        self.is_draining = False
        self._tls = tls
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._outbox: list[_Connection] = []  # with something to write at the end of this turn
        self._idle = asyncio.Event()
        self._num_active = self._kept_body_bytes = 0
        self.is_private = False  # for processes of this user only

    async def start(
        self, host: str, port: int, *, port_flag: str = "--http-port", shares_port: bool = False
    ) -> int:
        """Listen and return the port, which the system chooses for 0. Raises ConfigError, naming `port_flag`.

        The kernel deals connections out to all processes that listen with `shares_port`.
        """
        where: dict[str, Any] = {"host": host, "port": port, "reuse_port": shares_port or None}
        try:
            if host == "::":  # asyncio would listen on IPv6 alone
                where = {"sock": listening.open_dual_socket(port, shares_port=shares_port)}
            return await self._listen(**where)
        except (OSError, UnicodeError) as error:
            raise errors.ConfigError(
                listening.describe_failure(error, host, port, port_flag)
            ) from error

    async def start_on(self, listener: socket.socket) -> int:
        """Answer at a socket that listens already, also what waits there, and return its port."""
        return await self._listen(sock=listener)

    async def _listen(self, **where: Any) -> int:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            self._accept, backlog=listening.ACCEPTED_AT_ONCE, **where
        )
        listening.lengthen_backlogs(self._listener)
        self._sweeper = loop.call_later(self.limits.sweep_s, self._sweep, loop)
        return int(self._listener.sockets[0].getsockname()[1])

    async def start_at(self, path: str) -> None:
        """Listen at a Unix socket, for processes of this user; one that a dead process left there is replaced."""
        self.is_private = True
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(lambda: _Connection(self, loop), path)
        self._sweeper = loop.call_later(self.limits.sweep_s, self._sweep, loop)

    def _accept(self) -> asyncio.Protocol:
        """Make the protocol of a connection, which begins with a handshake if there is TLS."""
        connection = _Connection(self, asyncio.get_running_loop())
        if self._tls is None:
            return connection
        return authentication.TlsArrival(
            connection, self._tls, self.arriving, self._has_room, limit_s=self.limits.request_s
        )

    def _has_room(self) -> bool:
        num_present = len(self.connections) + len(self.arriving)
        return num_present < self.limits.num_connections + _MAX_REFUSED

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no request is being answered; return False if some were after `timeout_s`.

        New requests are still taken (the handler may refuse them); each connection closes after its next answer.
        """
        self.is_draining = True
        for connection in self.connections:
            connection.expect_last_answer()
        if self._num_active == 0:
            return True
        self._idle.clear()
        return await tasks.wait_until_idle(
            self._idle,
            lambda: self._num_active,
            timeout_s=timeout_s,
            clock=clocks.SystemClock(),
            log=_logger,
        )

    async def close(self) -> None:
        """Stop listening and cut all connections off. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.abort()
        await tasks.cancel(self.arriving)
        await tasks.cancel({*self.answering.values()})

    def exchange_began(self) -> None:
        """Count an exchange that begins; called by its connection."""
        self._num_active += 1

    def exchange_ended(self) -> None:
        """Count an exchange that is over; called by its connection."""
        self._num_active -= 1
        if self.is_draining and self._num_active == 0:
            self._idle.set()

    def keep_body_bytes(self, num_bytes: int, connection: "_Connection") -> bool:
        """Take room for bytes of a connection's body; return False if there is none.

        While there is none, the largest body that has not arrived completely is refused: so large bodies that are sent
        slowly, or by many connections, do not lock small ones out.
        """
        while self._kept_body_bytes + num_bytes > self.limits.kept_body_bytes:
            largest = max(self.connections, key=lambda candidate: candidate.num_receiving)
            if largest.num_receiving <= connection.num_receiving:
                return False
            largest.refuse_body()
        self._kept_body_bytes += num_bytes
        return True

    def release_body_bytes(self, num_bytes: int) -> None:
        """Give back the room that a body took."""
        self._kept_body_bytes -= num_bytes

    def flush_soon(self, connection: "_Connection") -> None:
        """For a connection: flush it at the end of this turn of the event loop."""
        self._outbox.append(connection)
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        for connection in outbox:
            connection.flush()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self.connections):
            if connection.deadline < now:
                connection.expire()
        self._sweeper = loop.call_later(self.limits.sweep_s, self._sweep, loop)


_NEVER = float("inf")
# that wait for a client while a long stream is sent, and that it reads of what waits before a deadline, or is cut off
_PACED_BYTES = 2**20


class _Connection(asyncio.Protocol):
    """One client. It reads (a request may be midway), answers (an exchange is active), lingers, or idles."""

    __slots__ = ("_active", "_advancing", "_drained", "_kept_body_bytes", "_lingering", "_loop", "_parser",
                 "_pending", "_read_paused", "_receiver", "_server", "_transport", "_unread_bytes", "_waiting",
                 "_write_paused", "deadline")  # fmt: skip

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._pending: deque[Request | parser.Refusal] = deque()
        self._active: Exchange | None = None
        self._advancing = self._lingering = self._write_paused = self._read_paused = False
        self._unread_bytes = 0  # that waited for the client when it was last looked at
        self._waiting: list[bytes] = []  # to be written at the end of this turn
        self._kept_body_bytes = 0  # that count, of all its requests
        self._drained: asyncio.Future[None] | None = None  # while a writer waits for the client
        self._receiver: Callable[[bytes], None] | None = None  # after a switch of protocols
        self.deadline = _NEVER  # when `expire` is due

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = parser.RequestParser(
            self._server.limits,
            listening.peer_name(transport),
            self._server.check_head,
            self._keep_body_bytes,
            self._server.open_sink,
        )
        self._parser.takes_upgrades = self._server.takes_upgrades
        if self._server.is_private and not local_users.is_own_user(transport):
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=self._server.limits.write_buffer_bytes)
        num_over = len(self._server.connections) - self._server.limits.num_connections
        if num_over >= _MAX_REFUSED:  # of these, each takes one of the files in reserve
            self._transport.abort()
            return
        self._server.connections.add(self)
        if num_over >= 0:
            self._refuse(parser.Refusal(503, "too many connections: try again later"))
        else:
            self.deadline = self._loop.time() + self._server.limits.request_s

    def data_received(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver(data)
        if self._lingering or self._receiver is not None:
            return
        was_midway, was_idle = self._parser.is_midway, self._active is None
        self._pending.extend(self._parser.feed(data))
        if was_idle:
            if self._parser.is_midway and (self._parser.has_sink or not was_midway):
                self.deadline = self._loop.time() + self._server.limits.request_s
            self._advance()
        if self._pending and not self._read_paused and (not was_idle or self._is_blocked()):
            self._read_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """A client that will send nothing more counts as gone; asyncio then closes, once the client has read."""
        self._drop()
        self.deadline = min(self.deadline, self._loop.time() + self._server.limits.request_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._parser.abandon()
        self._drop()
        self._release_bytes(self._kept_body_bytes)

    def write(self, data: bytes) -> None:
        """Send it now, after all that waits."""
        if self._waiting:
            self._waiting.append(data)
            self.flush()
        else:
            self._transport.write(data)

    def write_soon(self, data: bytes) -> None:
        """Send it at the end of this turn of the event loop."""
        self._waiting.append(data)
        if len(self._waiting) == 1:
            self._server.flush_soon(self)

    def keep_body(self, num_bytes: int) -> bool:
        """Take room for a body of this length; return False if there is none."""
        return self._keep_body_bytes(parser.counted_bytes(num_bytes))

    async def drain(self) -> None:
        """Wait until the client has read most of what was written, or is gone."""
        self.flush()
        if self._transport.get_write_buffer_size() <= _PACED_BYTES or self._active is None:
            return
        self._drained = self._loop.create_future()
        self._transport.set_write_buffer_limits(high=_PACED_BYTES)  # pauses at once
        await self._drained
        self._drained = None
        self._transport.set_write_buffer_limits(high=self._server.limits.write_buffer_bytes)

    def expect_last_answer(self) -> None:
        """Have the answer that is under way say that the connection closes after it, unless its head is made."""
        if self._active is not None:
            self._active.request = self._active.request.as_last()

    def divert(self, receive: Callable[[bytes], None]) -> None:
        """Pass all further bytes of the client to `receive`."""
        self._receiver = receive

    def release_body(self, num_bytes: int) -> None:
        """Give back the room of a body of this length."""
        self._release_bytes(parser.counted_bytes(num_bytes))

    @property
    def num_receiving(self) -> int:
        """The bytes that count of a body that has not arrived completely; 0 while a request is answered."""
        return 0 if self._active is not None else self._kept_body_bytes

    def refuse_body(self) -> None:
        """Refuse the request with a body that is arriving, to make room."""
        self._parser.abandon()
        self._refuse(parser.NO_ROOM)

    def _keep_body_bytes(self, num_bytes: int) -> bool:
        has_room = self._server.keep_body_bytes(num_bytes, self)
        self._kept_body_bytes += num_bytes if has_room else 0
        return has_room

    def _release_bytes(self, num_bytes: int) -> None:
        num_bytes = min(num_bytes, self._kept_body_bytes)  # a refusal has given all of it back
        self._kept_body_bytes -= num_bytes
        self._server.release_body_bytes(num_bytes)

    def flush(self) -> None:
        """Send the waiting bytes."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._transport.write(waiting[0] if len(waiting) == 1 else b"".join(waiting))

    def _drop(self) -> None:
        """Forget all requests, because the client is gone."""
        self._clear_pending()
        self._waiting = []
        exchange, self._active = self._active, None
        if exchange is not None:
            self._server.exchange_ended()
            exchange.disconnected()
            if exchange.request.sink is not None:
                exchange.request.sink.close()
        self._end_wait()

    def _end_wait(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _clear_pending(self) -> None:
        for item in self._pending:
            if isinstance(item, Request) and item.sink is not None:
                item.sink.close()
        self._pending.clear()

    def pause_writing(self) -> None:
        self._write_paused = True
        self._unread_bytes = self._transport.get_write_buffer_size()
        if self._drained is None and self._active is not None and self._active.is_streaming:
            _logger.info("a client reads its stream too slowly: it is cut off")
            self.abort()
        else:
            self.deadline = self._loop.time() + self._server.limits.request_s

    def resume_writing(self) -> None:
        self._write_paused = False
        self.deadline = self._loop.time() + self._server.limits.idle_s
        if self._drained is not None:
            self.deadline = _NEVER
            self._end_wait()
        self._advance()

    def abort(self) -> None:
        """Cut the client off now."""
        self._transport.abort()
        self._drop()

    def expire(self) -> None:
        """The deadline has passed; a client that goes on to read a large answer gets another one."""
        num_before, self._unread_bytes = self._unread_bytes, self._transport.get_write_buffer_size()
        has_read = num_before - self._unread_bytes >= min(_PACED_BYTES, num_before) > 0
        if has_read and not self._lingering:
            self.deadline = self._loop.time() + self._server.limits.request_s
        elif self._parser.is_midway and self._active is None and not self._lingering:
            limit_s = self._server.limits.request_s
            self._parser.abandon()
            self._refuse(parser.Refusal(408, f"the request did not arrive within {limit_s:g} s"))
        else:
            self.abort()

    def _advance(self) -> None:
        """Answer what is pending, one after the other. A loop, because an answer may come at once."""
        if self._advancing:
            return
        self._advancing = True
        while self._pending and self._active is None and not self._is_blocked():
            item = self._pending.popleft()
            if isinstance(item, parser.Refusal):
                self._refuse(item)
            else:
                self._begin(item)
        self._advancing = False
        is_waiting = self._read_paused or self._parser.wants_continue
        if is_waiting and self._active is None and not self._is_blocked():
            self._await_next()

    def _is_blocked(self) -> bool:
        return self._write_paused or self._lingering or self._transport.is_closing()

    def _await_next(self) -> None:
        if self._parser.wants_continue:
            self._parser.wants_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._read_paused:
            self._read_paused = False
            self._transport.resume_reading()

    def _begin(self, request: Request) -> None:
        if self._server.is_draining and request.keeps_alive:
            request = request.as_last()
        self.deadline = _NEVER
        self._server.exchange_began()
        exchange = self._active = Exchange(request, self, self._answered)
        try:
            result = self._server.handler(exchange)
        except Exception:  # noqa: BLE001 (the supervisor of all handlers)
            self._give_up(exchange)
            return
        if result is not None:
            task = self._loop.create_task(self._supervise(exchange, result))
            self._server.answering[exchange] = task

    async def _supervise(self, exchange: Exchange, result: Awaitable[None]) -> None:
        """Take the task out of `answering` itself: a callback would cost as much as the task."""
        try:
            await result
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 (what it awaits may be cancelled)
            if isinstance(error, Exception) or not exchange.is_closed:
                self._give_up(exchange)
        finally:
            del self._server.answering[exchange]

    def _give_up(self, exchange: Exchange) -> None:
        """The handler raised, which is a bug of ours: it is in the log, and the client learns no more than that."""
        _logger.exception("%s %s failed", exchange.request.method, exchange.request.path)
        if exchange.is_streaming:
            self.abort()
        else:
            message = "internal error: the server's log says more"
            exchange.respond(500, self._server.error_body(500, message, exchange.request.path))

    def _answered(self) -> None:
        """The active exchange is complete."""
        exchange, self._active = self._active, None
        if exchange is None:
            return
        self._server.exchange_ended()
        if self._kept_body_bytes:
            self.release_body(len(exchange.request.body))
        if exchange.request.sink is not None:
            exchange.request.sink.close()
        limits = self._server.limits
        self._unread_bytes = self._transport.get_write_buffer_size()
        wait_s = limits.request_s if self._parser.is_midway else limits.idle_s
        self.deadline = self._loop.time() + wait_s
        if exchange.request.keeps_alive and not self._server.is_draining:
            self._advance()
        else:
            self._transport.close()

    def _refuse(self, refusal: parser.Refusal) -> None:
        """Answer, then let the client finish talking for a moment: a reset could take the answer away from it."""
        self._clear_pending()
        self._release_bytes(self._kept_body_bytes)
        self._lingering = True
        self.deadline = self._loop.time() + self._server.limits.linger_s
        body = refusal.body
        if body is None:
            body = self._server.error_body(refusal.status, refusal.message, refusal.path)
        exchange = Exchange(refusal.as_request(), self, lambda: None)
        exchange.cors_headers = self._server.cors_headers(exchange.request)
        exchange.respond(refusal.status, body, headers=refusal.headers)
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has gone
                self._transport.write_eof()
