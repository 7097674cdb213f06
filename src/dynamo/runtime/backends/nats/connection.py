"""A process's one connection to NATS, which its planes share.

nats-py connects again by itself and restores the subscriptions. What it cannot do is here:

- `publish` does not wait. Messages go into an *outbox*, and one task hands them to nats-py, where
  `publish` may have to wait for the server. The outbox is bounded; messages that do not fit are lost, and their reader
  finds a number missing.
- Messages that are published while there is no server are dropped, not sent late: the connections that sent them are
  over by then (`on_lost`), and old events mislead.
- At start, an absent server is waited for, within bounds; one that refuses the credentials is an error at once.
"""

import asyncio
import collections
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js import JetStreamContext

from dynamo.base import clock, errors, tasks
from dynamo.runtime import credentials
from dynamo.runtime.backends.nats.access import NatsAccess

log = logging.getLogger(__name__)
OnMessage = Callable[[str, str, bytes], None]
"""Takes subject, reply subject and data. Empty data is the server's report that the subject has no subscriber."""

# twice what a link may have waiting, so that links are dropped by name first
OUTBOX_BYTES = 128 * 2**20
_PENDING_BYTES = 2 * 2**20  # what nats-py may hold before its publish waits for the socket
_SUBSCRIPTION_MESSAGES = 65_536  # that wait for one subscription before it misses some
_SUBSCRIPTION_BYTES = 128 * 2**20
_PING_S = 2  # a server that does not answer three of them is left
_AGAIN_S = 0.25  # between attempts to connect
_CLOSE_S = 2.0
_SETTLE_S = 2
_WITHOUT = "to run without it: DYN_REQUEST_PLANE=tcp DYN_EVENT_PLANE=zmq DYN_PREFILL_QUEUE=direct"


class _PromptClient(Client):
    """A client that leaves a silent server at once.

    nats-py closes the connection first, which waits until the kernel has sent what is left: to a host that is cut off,
    that takes minutes, and for as long as that it would not connect again.
    """

    async def _attempt_reconnect(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        await super()._attempt_reconnect()


class NatsConnection:
    """The connection that a process's planes share; `open` makes it. Belongs to one event loop."""

    def __init__(self, access: NatsAccess, name: str, time: clock.Clock) -> None:
        self.clock = time
        self._name = name
        self.addresses = access.addresses
        self._access = access
        self._client = _PromptClient()
        self._outbox: collections.deque[tuple[str, str, bytes]] = collections.deque()
        self._backlog = 0
        self._has_work = asyncio.Event()
        self._is_connected = asyncio.Event()
        self._refusal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_lost: list[Callable[[str], None]] = []
        self._last_problem = ""  # the last logged one
        self._subscriptions: set[SubjectSubscription] = set()
        self._is_joined = False  # once, at least
        self._lost_at = self.clock.now()  # the server, the last time
        self._back_at: float | None = None  # when it was last found again
        self._is_closing = False
        self._tasks = tasks.Tasks()

    @classmethod
    async def open(
        cls,
        access: NatsAccess,
        *,
        name: str,
        start_timeout_s: float,
        time: clock.Clock | None = None,
    ) -> "NatsConnection":
        """Connect, and try again for `start_timeout_s` if there is no server yet. Raises ConfigError."""
        self = cls(access, name, time or clock.SystemClock())
        connecting = asyncio.ensure_future(self._connect(self._client))
        try:
            await asyncio.wait(
                (connecting, self._refusal),
                timeout=start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            self._check_connected(connecting, start_timeout_s)
        except BaseException:
            await _end(connecting)  # first, or it would begin a connection that is never closed
            await self.close()
            raise
        self._is_joined = True
        self._is_connected.set()
        self._tasks.start("send to NATS", self._send_outbox())
        if access.tls is not None:
            following = credentials.follow_files(
                "the certificate for NATS",
                access.tls_files,
                access.load_tls,
                self.clock,
                stamp=access.tls_stamp,
            )
            self._tasks.start("watch the certificate for NATS", following)
        return self

    @property
    def max_message_bytes(self) -> int:
        """The bytes that this server takes in one message."""
        return self._client.max_payload

    @property
    def backlog_bytes(self) -> int:
        """The bytes in the outbox, which the server has not taken yet."""
        return self._backlog

    @property
    def jetstream(self) -> JetStreamContext:
        """JetStream, for `jetstream.NatsWorkQueue` and `NatsObjectStore`."""
        return self._client.jetstream()

    def on_lost(self, listener: Callable[[str], None]) -> None:
        """Call this with the reason whenever the server is lost: sent messages may not have arrived."""
        self._on_lost.append(listener)

    @property
    def is_connected(self) -> bool:
        """Return whether the server answers, as far as this side knows."""
        return self._is_connected.is_set()

    def is_back_since(self, duration_s: float) -> bool:
        """Return True if the server came back within the last `duration_s`: others may not have found it yet."""
        return self._back_at is not None and self.clock.now() < self._back_at + duration_s

    async def wait_connected(self, limit_s: float) -> None:
        """Wait until connected. Raises Unavailable if the server has been lost for `limit_s`."""
        try:
            async with self.clock.timeout(self._lost_at + limit_s - self.clock.now()):
                await self._is_connected.wait()
        except TimeoutError:
            raise errors.Unavailable(
                f"NATS at {self.addresses} is gone for more than {limit_s:g} s"
            ) from None

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        """Send a message to the subscribers of `subject`. Never waits; a message that cannot be sent is lost."""
        if not self._is_connected.is_set() or self._backlog + len(data) > OUTBOX_BYTES:
            return
        self._backlog += len(data)
        self._outbox.append((subject, reply, data))
        self._has_work.set()

    async def subscribe(self, subject: str, on_message: OnMessage) -> "SubjectSubscription":
        """Subscribe to `subject`, for this server's restarts too. Raises Unavailable."""
        subscription = SubjectSubscription(subject, on_message, self._subscriptions)
        try:
            await subscription.begin(self._client)
        except nats.errors.Error as error:
            if self._is_closing or not isinstance(error, nats.errors.ConnectionClosedError):
                await subscription.close()
                raise errors.Unavailable(
                    f"NATS at {self.addresses} does not let us hear {subject!r}: {error}"
                ) from error
            # else NATS has dismissed us, and `_join_again` subscribes
        await self._settle()
        return subscription

    async def close(self) -> None:
        """Send the outbox and disconnect; bounded in time."""
        self._is_closing = True
        try:
            async with self.clock.timeout(_CLOSE_S):
                while self._outbox and self._is_connected.is_set():
                    await self._send_pending()
                await self._tasks.close()
                await self._client.close()
        except (TimeoutError, nats.errors.Error, OSError) as error:
            log.warning("left NATS at %s without a last word: %s", self.addresses, error)
        await self._tasks.close()
        # nats-py cancels its attempts to connect again once, which may be swallowed: they would go on for ever
        if (connecting := getattr(self._client, "_reconnection_task", None)) is not None:
            await _end(connecting)

    async def _settle(self) -> None:
        """Wait until the server knows the subscription: else the first messages to it could be lost.

        A server that is lost meanwhile gets it again when it is back. Flushed twice, because nats-py writes a ping past
        its pending messages: the first pong may come before the server has got the subscription.
        """
        if self._is_connected.is_set():
            with contextlib.suppress(nats.errors.Error, OSError), tasks.keep_cancellation():
                await self._client.flush(_SETTLE_S)
                await self._client.flush(_SETTLE_S)

    async def _connect(self, client: Client) -> None:
        access = self._access
        options: dict[str, Any] = {"tls": access.tls} if access.tls is not None else {}
        await client.connect(
            list(access.urls),
            name=self._name,
            error_cb=self._report_error,
            disconnected_cb=self._lost,
            reconnected_cb=self._found,
            closed_cb=self._dismissed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_AGAIN_S,  # type: ignore[arg-type]  # it only sleeps so long
            ping_interval=_PING_S,
            pending_size=_PENDING_BYTES,
            flush_timeout=_SETTLE_S,  # else a publish to a client that was given up could wait for ever
            user=access.username,
            password=access.password,
            token=access.token,
            nkeys_seed_str=access.nkey_seed,
            user_credentials=access.credentials_file,
            **options,
        )

    def _check_connected(self, connecting: asyncio.Task[None], waited_s: float) -> None:
        if self._refusal.done():
            raise errors.ConfigError(
                f"NATS at {self.addresses} does not let us in: give NATS_AUTH_USERNAME and NATS_AUTH_PASSWORD,"
                " NATS_AUTH_TOKEN, NATS_AUTH_NKEY or NATS_AUTH_CREDENTIALS_FILE"
            )
        if not connecting.done():
            raise errors.ConfigError(
                f"no NATS server at {self.addresses} (NATS_SERVER) within {waited_s:g} s:"
                f" {self._last_problem}; {_WITHOUT}"
            )
        if (error := connecting.exception()) is not None:
            raise errors.ConfigError(f"NATS at {self.addresses}: {error}") from error

    async def _send_outbox(self) -> None:
        """Hand the messages of the outbox to nats-py."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            await self._send_pending()

    async def _send_pending(self) -> None:
        while self._outbox:
            subject, reply, data = self._outbox.popleft()
            self._backlog -= len(data)
            try:
                await self._client.publish(subject, data, reply)
            except (nats.errors.Error, OSError) as error:
                self._log_problem(f"could not send {len(data)} bytes to {subject}: {error}")

    async def _report_error(self, error: Exception) -> None:
        if "authorization violation" in str(error).lower() and not self._is_joined:
            if not self._refusal.done():
                self._refusal.set_result(None)
            return
        self._log_problem(f"{type(error).__name__} {error}".strip())

    def _log_problem(self, problem: str) -> None:
        """Log a problem, once for each kind that lasts."""
        if problem != self._last_problem:
            self._last_problem = problem
            log.warning("NATS at %s: %s", self.addresses, problem)

    async def _lost(self) -> None:
        if not self._is_connected.is_set():
            return
        self._is_connected.clear()
        self._lost_at = self.clock.now()
        self._outbox.clear()
        self._backlog = 0
        if not self._is_closing:
            log.warning("NATS at %s is gone; connecting again", self.addresses)
        for listener in self._on_lost:
            listener(f"NATS at {self.addresses} is gone")

    async def _dismissed(self) -> None:
        """Connect anew, because nats-py ends for good after some errors of the server."""
        if not self._is_closing and self._is_joined:
            self._tasks.start("join NATS again", self._join_again())

    async def _join_again(self) -> None:
        await self.clock.sleep(_AGAIN_S)
        client = _PromptClient()
        try:
            await self._connect(client)
        except BaseException:
            await client.close()
            raise
        self._client = client  # only now, or what subscribes meanwhile would be subscribed twice
        for subscription in list(self._subscriptions):
            if subscription in self._subscriptions:  # else it was closed meanwhile
                await subscription.begin(client)
        await self._found()

    async def _found(self) -> None:
        self._last_problem = ""
        self._back_at = self.clock.now()
        self._is_connected.set()
        log.warning("NATS at %s is back", self.addresses)


async def _end(connecting: asyncio.Task[None]) -> None:
    """Cancel a task until it is over: `asyncio.wait_for`, which nats-py uses, may swallow a late cancellation."""
    while not connecting.done():
        connecting.cancel()
        await asyncio.wait((connecting,), timeout=_AGAIN_S)


class SubjectSubscription:
    """A subscription to a subject; `living` holds all of them."""

    def __init__(
        self, subject: str, on_message: OnMessage, living: "set[SubjectSubscription]"
    ) -> None:
        self._subject = subject
        self._on_message = on_message
        self._living = living
        self._at_client: NatsSubscription | None = None

    async def begin(self, client: Client) -> None:
        """Subscribe at this client, which restores it by itself when its server restarts."""

        async def deliver(message: Msg) -> None:
            self._on_message(message.subject, message.reply, message.data)

        self._living.add(self)
        self._at_client = await client.subscribe(
            self._subject,
            cb=deliver,
            pending_msgs_limit=_SUBSCRIPTION_MESSAGES,
            pending_bytes_limit=_SUBSCRIPTION_BYTES,
        )

    async def close(self) -> None:
        """Unsubscribe. Idempotent."""
        self._living.discard(self)
        if self._at_client is None:
            return
        try:
            await self._at_client.unsubscribe()
        except nats.errors.Error:
            log.debug("%s was unsubscribed already", self._subject)
