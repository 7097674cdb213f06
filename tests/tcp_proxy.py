"""A TCP proxy that can break its connections, drop all bytes, as a broken network does, and read and alter them."""

import asyncio
import math
from collections.abc import Callable


class TcpProxy:
    """A proxy on a port of its own in front of `port` of this host."""

    def __init__(
        self,
        port: int,
        *,
        alter: Callable[[bytes], bytes] = bytes,
        bytes_per_s: float = math.inf,
    ) -> None:
        """`alter` gets the bytes of one reading, of either direction, and returns what goes on; each has this speed."""
        self._target, self._alter, self._bytes_per_s = port, alter, bytes_per_s
        self.num_accepted = 0  # connections
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task] = set()
        self._flows = asyncio.Event()
        self._flows.set()

    async def start(self) -> str:
        """Listen, and return the address."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def drop(self) -> None:
        """Drop all bytes from now on, without an error at either side."""
        self._flows.clear()

    def heal(self) -> None:
        """Break the connections whose bytes were dropped, and let new ones work."""
        self.cut()
        self._flows.set()

    def cut(self) -> None:
        """Break all open connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader, writer) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server is away: the road ends
            writer.transport.abort()
            return
        self.num_accepted += 1
        self._writers |= {writer, there[1]}
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source, sink) -> None:
        try:
            while data := await source.read(1 << 16):
                await asyncio.sleep(len(data) / self._bytes_per_s)  # the wire itself
                if self._flows.is_set():
                    sink.write(self._alter(data))
        except OSError:
            pass
        finally:
            sink.transport.abort()
