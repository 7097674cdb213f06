"""The start of a worker, as its system port shows it: which stage, how far, and whether it stands still.

A model may take an hour to download, so no limit on the whole start tells a slow one from a dead one. A worker opens
its system port before it does anything else, and `/live` is 200 while the start moves: while the model's folder in the
hub's cache grows, which it does too if another process fetches the model there, and while this process and its children
compute or read. An engine that spins in a deadlock is taken for one that computes.

`StartPort` answers from a thread until the model is loaded, since engines block the event loop while they load, and
then leaves its socket to the worker's system port, so no connection is refused in between.
"""

import contextlib
import errno
import http.server
import logging
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dynamo.base import addresses, errors
from dynamo.base import clock as clocks
from dynamo.runtime import listening
from dynamo.runtime.http import server

_logger = logging.getLogger(__name__)
_LEAST_CPU_S = 3.0  # that count as work: a process that only waits uses less in minutes
_LEAST_BYTES = 2**20
# that are read: bytes left unread would break the answer's connection
_MAX_COMMAND_BYTES = 64 * 1024
_CLIENT_S = 2.0  # for a client of the early port to send its request


AfterLoad = Callable[[], Awaitable[None]]


async def nothing_follows() -> None:
    """Do nothing after the load of a model."""


class WorkDone(msgspec.Struct, frozen=True):
    """What the processes of a worker have done so far."""

    cpu_s: float = 0.0
    bytes_read: int = 0


class StartProgress:
    """How far the start of a worker is; asked for by any thread. `measure_work` tells what its processes have done."""

    def __init__(
        self,
        clock: clocks.Clock,
        stall_s: float,
        measure_work: Callable[[], WorkDone] | None = None,
    ) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._measure_work = measure_work or measure_processes
        self._lock = threading.Lock()
        self._began_at = self._moved_at = clock.now()
        self._work = WorkDone()
        self._is_over = self._is_given_up = False
        self._model = ""
        self._folder: Path | None = None  # of a download
        self._left: dict[str, int] = {}  # what earlier downloads that were cut off have left
        self._done_bytes = 0
        self._total_bytes: int | None = None

    def begin_download(self, model: str, folder: Path, total_bytes: int | None) -> None:
        """A model is being fetched into a folder, by this process or by another."""
        with self._lock:
            self._model, self._folder, self._total_bytes = model, folder, total_bytes
            sizes = sizes_of_blobs(folder)
            self._left = {name: size for name, size in sizes.items() if _is_partial(name)}
            self._moved_at = self._clock.now()

    def begin_load(self) -> None:
        """The files are complete: the engine loads them from now on."""
        with self._lock:
            self._folder, self._moved_at = None, self._clock.now()

    def finish(self) -> None:
        """The worker serves: whatever it does from now on is no start."""
        self._is_over = True

    @property
    def uptime_s(self) -> float:
        """Return the seconds since the process began."""
        return self._clock.now() - self._began_at

    def report(self) -> dict[str, Any] | None:
        """Return stage and progress, None after the start."""
        if self._is_over:
            return None
        with self._lock:
            still_s = self._look()
            report: dict[str, Any] = {"stage": "load", "stillSecs": int(still_s)}
            if self._folder is not None:
                report |= {
                    "stage": "download",
                    "model": self._model,
                    "doneBytes": min(self._done_bytes, self._total_bytes or self._done_bytes),
                    "totalBytes": self._total_bytes,
                }
        return report

    def is_stalled(self) -> bool:
        """Return True during a start that has stood still for too long."""
        with self._lock:
            is_stalled = not self._is_over and self._look() > self._stall_s
            # the last line of the log, which a cluster shows
            if is_stalled and not self._is_given_up:
                stage = f"download of {self._model}" if self._folder is not None else "load"
                _logger.error(
                    "the %s has stood still for %g s: /live fails now, so that a supervisor starts this worker again",
                    stage,
                    self._stall_s,
                )
            self._is_given_up = is_stalled
        return is_stalled

    def _look(self) -> float:
        """Return the seconds since the last movement that was seen."""
        now, work = self._clock.now(), self._measure_work()
        has_moved = (
            work.cpu_s - self._work.cpu_s >= _LEAST_CPU_S
            or work.bytes_read - self._work.bytes_read >= _LEAST_BYTES
        )
        self._work = work if has_moved else self._work
        if self._folder is not None:
            sizes = sizes_of_blobs(self._folder)
            present = [size for name, size in sizes.items() if size != self._left.get(name)]
            has_moved |= sum(present) != self._done_bytes
            self._done_bytes = sum(present)
        self._moved_at = now if has_moved else self._moved_at
        return now - self._moved_at


def sizes_of_blobs(folder: Path) -> dict[str, int]:
    """Return the bytes of the files of a model in the hub's cache, by name, with those that are not complete."""
    sizes = {}
    with contextlib.suppress(OSError), os.scandir(folder / "blobs") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # renamed when it became complete
                sizes[entry.name] = entry.stat().st_size
    return sizes


def _is_partial(name: str) -> bool:
    return name.endswith(".incomplete")


def measure_processes() -> WorkDone:
    """Return what this process and its children have computed and read; of the children only where /proc is."""
    cpu_s, bytes_read = sum(os.times()[:4]), 0
    for pid in _process_tree(os.getpid()):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            bytes_read += int(fields[9]) * os.sysconf("SC_PAGE_SIZE")  # pages of mapped files
            if pid != os.getpid():
                cpu_s += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            bytes_read += int(lines[0].removeprefix("rchar: "))
    return WorkDone(cpu_s, bytes_read)


def _process_tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _process_tree(int(child))


def render_status(status: str, uptime_s: float, **content: Any) -> bytes:
    """Return the body of /live and /health."""
    seconds, fraction = divmod(uptime_s, 1)
    uptime = {"secs": int(seconds), "nanos": int(fraction * 1e9)}
    return msgspec.json.encode({"status": status, "uptime": uptime, **content})


class StartPort:
    """Answers /live and /health at a listening socket until `release`, from a thread of its own."""

    def __init__(self, listener: socket.socket, progress: StartProgress) -> None:
        handler = type("_Handler", (_StartHandler,), {"progress": progress})
        self._server = _StartServer(listener.getsockname()[:2], handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listener
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="start port", daemon=True
        )
        self._thread.start()

    def release(self) -> socket.socket:
        """Answer no more and return the socket; what connects waits until it is listened on again. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        return self._server.socket


class _StartServer(http.server.ThreadingHTTPServer):
    """The server of the early port: a client that goes away is no news, and a slow one keeps no other waiting."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing."""


class _StartHandler(http.server.BaseHTTPRequestHandler):
    """One request of the early port."""

    progress: StartProgress

    def handle(self) -> None:
        """Answer the request if it comes in time; a client that sends it piece by piece has no more."""
        cut_off = threading.Timer(_CLIENT_S, self._cut_off)
        cut_off.daemon = True
        cut_off.start()
        super().handle()
        cut_off.cancel()

    def _cut_off(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """Answer for a worker that does not serve yet."""
        is_moving = self.path == "/live" and not self.progress.is_stalled()
        is_health = self.path in ("/live", "/health")
        body = render_status("notready", self.progress.uptime_s, startup=self.progress.report())
        if not is_health:
            body = server.plain_error(503, "the worker starts", self.path)
        self.send_response(200 if is_moving else 503)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Refuse a command for the worker, which may come again."""
        num_bytes = int(self.headers.get("content-length", 0))
        self.rfile.read(max(0, min(num_bytes, _MAX_COMMAND_BYTES)))
        self.do_GET()

    do_DELETE = do_POST

    def log_message(self, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""


def open_listener(host: str, ports: addresses.PortRange) -> socket.socket:
    """Listen at the first free port. Raises ConfigError if none is free."""
    for port in range(ports.first, ports.last):
        try:
            return listening.open_listener(host, port, port_flag="--system-port")
        except errors.ConfigError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
    return listening.open_listener(host, ports.last, port_flag="--system-port")


@contextlib.contextmanager
def early_port(
    host: str, ports: addresses.PortRange | None, progress: StartProgress
) -> Iterator[StartPort | None]:
    """Answer at the system port, if there is one, while nothing else runs yet. Raises ConfigError."""
    if ports is None:
        yield None
        return
    listener = open_listener(addresses.plain_host(host, "--system-host"), ports)
    start_port = StartPort(listener, progress)
    try:
        yield start_port
    finally:
        start_port.release()
        listener.close()
