"""`dynamo serve`: one frontend and some workers as child processes, watched over until Ctrl-C.

It is ready when the frontend lists the model, and says so; until then it says what it waits for, and it gives up when
a child dies or the time is over. Afterwards a worker that dies is started again, each time a little later and not for
ever; a frontend that dies ends it all, because nobody could reach the workers.

Each run has its own discovery directory unless DYN_FILE_KV names one, so that two runs on one machine do not mix.
"""

import asyncio
import contextlib
import errno
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dynamo.base import clock as clocks
from dynamo.base import errors, processes, restarts, tasks
from dynamo.cli import readiness
from dynamo.cli.topology import Topology
from dynamo.worker import engines, model_source

PROBE_INTERVAL_S = 0.1
STOP_TIMEOUT_S = 35.0  # a worker drains for at most 30 s
PROMPT = "Tell me a story about a brave cat"
_DISCOVERY = "DYN_FILE_KV"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the user asked for."""

    model: str | None
    model_name: str | None
    engine: str
    topology: Topology
    http_host: str
    http_port: int
    ready_timeout_s: float
    worker_flags: tuple[str, ...] = ()


def serve(options: ServeOptions) -> int:
    """Run until told to stop; gives the exit code. Raises ConfigError."""
    _check_port(options.http_host, options.http_port)
    kind = engines.kind_of(options.engine)
    directory = model_source.resolve(options.model, with_weights=kind.needs_weights)
    name = options.model_name or model_source.display_name(options.model)
    with _environment() as environ:
        return asyncio.run(_Supervisor(options, directory, name, environ).run())


def _check_port(host: str, port: int) -> None:
    """Before anything starts: whoever answers there would be taken for our frontend."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise errors.ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        raise errors.ConfigError(
            f"port {port} is in use: stop the other process or choose --http-port (make run PORT=...)"
        ) from error


@contextlib.contextmanager
def _environment() -> Iterator[dict[str, str]]:
    """The children's environment, with a discovery directory of their own."""
    environ = dict(os.environ)
    if _DISCOVERY in environ:
        yield environ
        return
    directory = tempfile.mkdtemp(prefix="dynamo-serve-")
    try:
        yield environ | {_DISCOVERY: directory}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Supervisor:
    """Owns the children."""

    def __init__(
        self, options: ServeOptions, directory: Path, name: str, environ: dict[str, str]
    ) -> None:
        self._options = options
        self._directory = directory
        self._name = name
        self._environ = environ
        self._clock = clocks.SystemClock()
        self._running = tasks.Tasks()
        self._stop = asyncio.Event()
        self._death: processes.ChildDied | None = None
        self._child_by_name: dict[str, processes.Child] = {}
        self._topology = _fitting(options.topology, directory)
        self._argv_by_worker = {
            name: self._worker_argv(mode) for name, mode in self._topology.modes.items()
        }

    async def run(self) -> int:
        """Serve until told to stop, or until a child dies that we need; leave no process behind."""
        self._listen_to_signals()
        end, exit_code = "stopped", 0
        async with self._running:
            try:
                await self._serve()
            except processes.ChildDied as death:
                end, exit_code = str(death), death.exit_code
            finally:
                await self._stop_children()
        readiness.say(end)
        return exit_code

    async def _serve(self) -> None:
        """Start, wait until the model answers, watch. Raises ChildDied."""
        await self._start("frontend", self._frontend_argv())
        for name, argv in self._argv_by_worker.items():
            await self._start(name, argv)
        if await self._until_ready():
            print(self._banner(), flush=True)
            await self._watch()

    def _listen_to_signals(self) -> None:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # what nohup asks for
            numbers.append(signal.SIGHUP)
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._interrupted)

    def _interrupted(self) -> None:
        if not self._stop.is_set():
            readiness.say("stopping; running requests finish first (once more: at once)")
            self._stop.set()
            return
        for child in self._child_by_name.values():
            child.kill()

    async def _start(self, name: str, argv: list[str]) -> processes.Child:
        child = await processes.start(name, argv, self._environ, self._running)
        self._child_by_name[name] = child
        return child

    async def _stop_children(self) -> None:
        self._stop.set()
        children = self._child_by_name.values()
        await asyncio.gather(*(child.stop(STOP_TIMEOUT_S) for child in children))

    def _frontend_argv(self) -> list[str]:
        options = self._options
        flags = ["--http-host", options.http_host, "--http-port", str(options.http_port)]
        return [sys.executable, "-m", "dynamo.frontend", *flags]

    def _worker_argv(self, mode: str | None) -> list[str]:
        role = ("--disaggregation-mode", mode) if mode is not None else ()
        flags = ["--model", str(self._directory), "--model-name", self._name]
        module = f"dynamo.{self._options.engine}"
        return [sys.executable, "-m", module, *flags, *role, *self._options.worker_flags]

    async def _until_ready(self) -> bool:
        """Wait for the model to answer; False if we were told to stop. Raises ChildDied."""
        options = self._options
        progress = readiness.Progress(
            f"waiting for {self._name}", limit_s=options.ready_timeout_s, clock=self._clock
        )
        while not self._stop.is_set():
            for child in self._child_by_name.values():
                if child.exit_code is not None:
                    raise await child.death()
            if await readiness.lists_model(options.http_host, options.http_port, self._name):
                return True
            if progress.is_over:
                words = self._first_answering.last_words
                raise processes.ChildDied(
                    f"{self._name} did not answer within {options.ready_timeout_s:g} s; "
                    f"the worker's last words: {words}"
                )
            progress.show()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), PROBE_INTERVAL_S)
        return False

    async def _watch(self) -> None:
        """Until told to stop. Raises ChildDied when serving has become impossible."""
        self._running.start("watch over the frontend", self._watch_frontend())
        for name in self._argv_by_worker:
            self._running.start(f"watch over {name}", self._watch_worker(name))
        await self._running.run_until(self._stop)
        if self._death is not None:
            raise self._death

    def _end_by(self, death: processes.ChildDied) -> None:
        if not self._stop.is_set():
            self._death = death
            self._stop.set()

    async def _watch_frontend(self) -> None:
        self._end_by(await self._child_by_name["frontend"].death())

    async def _watch_worker(self, name: str) -> None:
        policy = restarts.Restarts()
        while True:
            started_at = self._clock.now()
            death = await self._child_by_name[name].death()
            pause_s = policy.pause_s(self._clock.now() - started_at)
            if self._stop.is_set():
                return
            if pause_s is None:
                self._end_by(death)
                return
            readiness.say(f"{death}; starting it again in {pause_s:g} s")
            await self._clock.sleep(pause_s)
            if not self._stop.is_set():
                await self._start(name, self._argv_by_worker[name])

    @property
    def _first_answering(self) -> processes.Child:
        return self._child_by_name[self._topology.answering[0]]

    def _banner(self) -> str:
        options = self._options
        host = "127.0.0.1" if options.http_host == "0.0.0.0" else options.http_host
        url = f"http://{host}:{options.http_port}"
        join = shlex.join(self._argv_by_worker[self._topology.answering[0]])
        pids = ", ".join(f"{name} {child.pid}" for name, child in self._child_by_name.items())
        return (
            f"\n{self._name} answers at {url}\n\n"
            f"  workers {self._topology.describe()}\n"
            f"  pids    dynamo {os.getpid()}, {pids}\n"
            f"  engine  {options.engine}, model {self._directory}\n"
            f"  join    {_DISCOVERY}={self._environ[_DISCOVERY]} {join}\n"
            f"  stop    Ctrl-C\n\n"
            f"  {curl_line(url, self._name)}\n"
        )


def _fitting(wanted: Topology, directory: Path) -> Topology:
    """A model that embeds has no prompts to compute apart."""
    if model_source.task("auto", directory) == "embed":
        return Topology(num_answering=wanted.num_answering)
    return wanted


def curl_line(url: str, model: str) -> str:
    """What a user can paste into a shell to read a story."""
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 200}
    return (
        f"curl {url}/v1/chat/completions \\\n"
        f"    -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps(body))}"
    )
