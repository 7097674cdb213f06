"""The request plane over any network that carries ordered bytes: one kept connection per client process and address.

The life of a stream, and what is refused, is settled by `client_connection` and `server_connection` on a
`frame_connection`. A network only listens and connects: `tcp.TcpNetwork`, `memory.MemoryNetwork`, `nats.planes`.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dynamo.base import clock, errors, tasks
from dynamo.protocols import wire
from dynamo.runtime import authentication, requests
from dynamo.runtime.backends import client_connection, frame_connection, server_connection

_log = logging.getLogger(__name__)
_NO_HEADERS: Mapping[str, str] = {}
_Target = tuple[str, int]  # address, and the instance that is meant there; 0: any
_MAX_GONE = 1024  # instances that are remembered as gone
# After a peer has died, others may have died with it, as on one host, and their ends are not read yet: so long it is
# asked whether a request has arrived, because one that had arrived at peers that died is suspected. It is asked of a
# connection that was idle for so long as well: its peer may have died, as over NATS, which reports that with the next
# message.
_DEATHS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkListener:
    """A place where peers connect. `close` takes no new connections; those that are there stay."""

    address: str
    close: Callable[[], object]


class Network(Protocol):
    """The way in which a `MultiplexedPlane` makes its connections: TCP, NATS, or memory."""

    @property
    def name(self) -> str:
        """The key of its addresses in `Instance.transport`."""
        ...

    async def listen(self, make_protocol: authentication.MakeProtocol) -> NetworkListener:
        """Give each peer that connects a new protocol. Raises ConfigError."""
        ...

    async def connect(self, address: str, make_protocol: authentication.MakeProtocol) -> None:
        """Connect a new protocol to the peer at `address`. Raises WorkerLost."""
        ...


class MultiplexedPlane:
    """A `requests.RequestPlane`: both sides, for one process. Items that are sent and received have `item_type`."""

    def __init__(
        self,
        network: Network,
        limits: frame_connection.ConnectionLimits = frame_connection.ConnectionLimits(),  # noqa: B008 (a frozen value)
        *,
        item_type: Any = Any,
        time: clock.Clock | None = None,
        instance_id: int = 0,
    ) -> None:
        """`instance_id` is what this process is registered as; requests that mean another one are refused."""
        self.name = network.name
        self._network = network
        self._settings = frame_connection.ConnectionSettings(
            limits=limits, time=time or clock.SystemClock(), decode=wire.make_decoder(item_type)
        )
        self._state = server_connection.ServerState(self._settings, instance_id)
        self._listener: NetworkListener | None = None
        self._listening = asyncio.Lock()
        self._connections: dict[_Target, client_connection.ClientConnection] = {}
        self._connecting: dict[
            _Target, asyncio.Task[client_connection.ClientConnection | errors.WorkerLost]
        ] = {}
        # ids of instances that ended their connection, the last at the end
        self._gone: dict[int, None] = {}
        self._died_at: float | None = None  # when the last one was seen to
        self._tasks = tasks.Tasks()
        self._is_closed = False
        self._log = authentication.RefusalLog(_log, self._settings.time.now)

    @property
    def traffic(self) -> requests.Traffic:
        return self._settings.traffic

    @property
    def is_away(self) -> bool:
        return False  # there is no server between two processes

    async def listen(self) -> str:
        async with self._listening:
            if self._listener is None:
                self._listener = await self._network.listen(
                    lambda: server_connection.ServerConnection(self._state).frames
                )
            return self._listener.address

    async def serve(self, endpoint: str, handler: requests.Handler) -> str:
        if self._is_closed or endpoint in self._state.handlers:
            raise errors.LocalProtocolError(
                f"{endpoint} is served already, or the request plane is closed"
            )
        self._state.handlers[endpoint] = handler
        self._state.ended_endpoints.discard(endpoint)
        try:
            return await self.listen()
        except errors.ConfigError:
            del self._state.handlers[endpoint]
            raise

    def stop_serving(self, endpoint: str) -> None:
        if self._state.handlers.pop(endpoint, None) is not None:
            self._state.ended_endpoints.add(endpoint)

    async def open(  # noqa: PLR0913 (as declared by `requests.RequestPlane`)
        self,
        address: str,
        endpoint: str,
        body: Any,
        receiver: requests.Receiver,
        *,
        instance_id: int | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        may_move: Callable[[], bool] | None = None,
        gives_up_early: bool = False,
    ) -> requests.Stream:
        target = address, instance_id or 0
        connection = self._connections.get(target)
        if connection is None:
            connection = await self._share_connection(target)
        died_at, now = self._died_at, self._settings.time.now
        has_death = died_at is not None and now() - died_at < _DEATHS_S
        was_idle = not connection.num_streams and now() - connection.idle_since >= _DEATHS_S
        return connection.open_stream(
            endpoint,
            body,
            receiver,
            headers or _NO_HEADERS,
            timeout_s,
            may_move,
            gives_up_early=gives_up_early,
            needs_proof=was_idle or has_death,
        )

    def is_answering(self, instance_id: int, address: str | None = None) -> bool | None:
        for target, connection in self._connections.items():
            if target[1] == instance_id:
                if address is not None:
                    connection.check_idle_peer()
                return None if connection.is_silent else connection.takes_requests
        if instance_id in self._gone or self._is_closed:
            return False
        if address is not None and (address, instance_id) not in self._connecting:
            self._start_connecting((address, instance_id))
        return None

    async def drain(self, timeout_s: float) -> bool:
        if self._listener is not None:
            self._listener.close()
        return await self._state.drain(timeout_s)

    async def close(self) -> None:
        self._is_closed = True
        if self._listener is not None:
            self._listener.close()
        await self._tasks.close()
        await asyncio.gather(
            *(connection.close() for connection in self._state.connections),
            *(connection.frames.close() for connection in self._connections.values()),
        )

    async def _share_connection(self, target: _Target) -> client_connection.ClientConnection:
        """Connect to an instance; concurrent callers wait for the same connection."""
        if self._is_closed:
            raise errors.WorkerLost("our request plane is closed")
        task = self._connecting.get(target) or self._start_connecting(target)
        await asyncio.wait((task,))
        if task.cancelled():
            raise errors.WorkerLost("our request plane was closed")
        result = task.result()
        if isinstance(result, errors.WorkerLost):
            raise type(result)(str(result)) from result
        return result

    def _start_connecting(
        self, target: _Target
    ) -> asyncio.Task[client_connection.ClientConnection | errors.WorkerLost]:
        task = self._tasks.start(f"connect to {target[0]}", self._connect(target))
        self._connecting[target] = task
        task.add_done_callback(lambda _: self._connecting.pop(target, None))
        return task

    async def _connect(
        self, target: _Target
    ) -> client_connection.ClientConnection | errors.WorkerLost:
        """Return the connection, or why there is none: a value, because several callers may wait for it."""
        address, instance_id = target
        connection = client_connection.ClientConnection(
            self._settings,
            address=address,
            instance_id=instance_id,
            name=f"process {os.getpid()}",
            on_lost=self._remove,
        )
        limit_s = self._settings.limits.connect_s
        lost: errors.WorkerLost
        try:
            async with self._settings.time.timeout(limit_s):
                await self._network.connect(address, lambda: connection.frames)
                await connection.welcomed
            if not connection.frames.is_lost:
                self._connections[target] = connection
                self._gone.pop(instance_id, None)
                return connection
            lost = errors.WorkerLost(f"worker at {address} closed the connection at once")
        except errors.WorkerLost as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                self._note_gone(instance_id)
            lost = error
        except TimeoutError:
            lost = errors.WorkerLost(f"worker at {address} did not answer within {limit_s:g} s")
        finally:
            if target not in self._connections:
                connection.frames.drop("was not reached")
        self._log.warning(address, "%s", lost)
        return lost

    def _remove(self, connection: client_connection.ClientConnection) -> None:
        target = connection.address, connection.instance_id
        if self._connections.get(target) is connection:
            del self._connections[target]
        if connection.frames.was_ended_by_peer:
            self._died_at = self._settings.time.now()
            self._note_gone(connection.instance_id)

    def _note_gone(self, instance_id: int) -> None:
        self._gone[instance_id] = None
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]
