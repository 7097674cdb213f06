"""Trials of grammars: a process in which a hostile grammar can be ended.

The libraries that compile grammars take a millisecond for most, for ever for some, and cannot be interrupted. So each
grammar is compiled here first. This process has read the tokenizer; each trial has a child that it forked before, under
limits that the kernel enforces:

    worker ──socket for each trial──▶ this process ──the socket──▶ child: compile, answer over the socket, exit

A child waits for a trial with its pages already copied, which is most of what a fork costs. One that exceeds its
processor time, memory or wall-clock time is ended by a signal, and this process says in its place which limit it was. A
worker that closes a trial's socket ends its child; one that is gone closes the control socket, which ends all. Nothing
else runs here, so forking is safe. What compiles is the engine's (`native.grammar_compiler`, `adapters.vllm.grammars`).
"""

import asyncio
import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from dynamo.base import errors, tasks
from dynamo.protocols import generate

MAX_CACHED = 256  # verdicts
MAX_WAITING = 64  # grammars, whichever number of requests has each
MAX_AT_ONCE = 4
# The libraries recurse along the rules of a grammar and the references of a schema, and a stack overflow ends the
# process: `protocols.limits`, with a large stack, stays far from it.
STACK_BYTES = 2**26
WARM_UP = generate.GuidedDecoding(json='{"type":"object"}')
_STACKS = 2 * STACK_BYTES  # of the child's thread, and its heap's first reservation
_COSTLY = "large numbers in multipleOf, patterns in allOf and long repetitions are costly"
_MAX_REASON_CHARS = 300  # of an error of a library
Build = Callable[[generate.GuidedDecoding], object]  # compile; raises InvalidRequest
T = TypeVar("T")
_stack_size_lock = threading.Lock()  # a process has one size, for all threads that it starts


class TrialLimits(NamedTuple):
    """What the compilation of one grammar may take."""

    cpu_s: int
    memory: int  # bytes that it may add
    wall_s: int  # far longer than the processor time takes on a busy machine, so that this bound is named

    def explain(self, ended_by: int) -> str:
        """Return which limit the signal stands for that ended a trial."""
        reasons: dict[int, str] = {
            signal.SIGXCPU: f"it takes more than {self.cpu_s} s of processor time to compile; {_COSTLY}",
            signal.SIGABRT: f"it takes more than {self.memory >> 20} MiB of memory to compile; {_COSTLY}",
            signal.SIGSEGV: "it is nested too deeply",
        }
        return reasons.get(ended_by, f"the signal {ended_by} ended its compilation")


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a trial; an empty one says that the grammar can be compiled within the limits."""

    refusal: str | None = None  # the message of an InvalidRequest
    ended_by: int | None = None  # the signal that ended the child

    @property
    def is_by_chance(self) -> bool:
        """Return whether another trial of the same grammar may end in another way."""
        return self.ended_by in (signal.SIGALRM, signal.SIGKILL, signal.SIGTERM)

    def check(self, guided: generate.GuidedDecoding, limits: TrialLimits) -> None:
        """Raise InvalidRequest if the grammar cannot be compiled, Overloaded if another trial may show that it can."""
        if self.refusal is not None:
            raise errors.InvalidRequest(self.refusal, param=guided.param)
        if self.ended_by == signal.SIGALRM:
            raise errors.Overloaded(f"no grammar was compiled within {limits.wall_s} s; try later")
        if self.is_by_chance:  # as when the machine has no memory left
            raise errors.Overloaded(f"the signal {self.ended_by} ended a compilation; try later")
        if self.ended_by is not None:
            raise refuse(guided, limits.explain(self.ended_by))


class TrialProcess:
    """The worker's end. Used on one event loop."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] = {},
    ) -> None:
        """Start the module, which calls `serve` when it has read the tokenizer; trials wait for that."""
        self._control, remote_end = socket.socketpair()
        with remote_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=remote_end.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the worker
                env={  # threads do not survive a fork
                    **os.environ,
                    "RAYON_NUM_THREADS": "1",
                    **environment,
                },
            )

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended by itself."""
        return self._process.poll() is not None

    def _connect(self) -> socket.socket:
        """Begin a trial; return the socket for the constraint and then the verdict. Raises OSError."""
        local_end, remote_end = socket.socketpair()
        with remote_end:
            try:
                socket.send_fds(self._control, [b"."], [remote_end.fileno()])
            except OSError:
                local_end.close()
                raise
        return local_end

    async def attempt(self, guided: generate.GuidedDecoding) -> Verdict:
        """Return the verdict on a constraint; a trial that is cancelled ends. Raises EngineFailed."""
        try:
            reader, writer = await asyncio.open_connection(sock=self._connect())
            try:
                writer.write(msgspec.msgpack.encode(guided))
                writer.write_eof()
                return msgspec.msgpack.decode(await reader.read(), type=Verdict)
            finally:
                writer.close()
        except (OSError, msgspec.DecodeError) as error:
            raise errors.EngineFailed(
                f"the process that tries grammars has ended: {error}"
            ) from error

    def close(self) -> None:
        """End all trials, and return when the process is gone."""
        self._control.close()
        self._process.wait()


class _Child(NamedTuple):
    """A child: its process id, and the socket that brings its trial, or to which it answers."""

    pid: int
    connection: socket.socket


class TrialServer:
    """The process's loop: it starts, reaps and ends the children."""

    def __init__(self, control: socket.socket, build: Build, limits: TrialLimits) -> None:
        self._control = control
        self._build = build
        self._limits = limits
        self._trials: dict[int, _Child] = {}  # by the file descriptor of the child's process
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._spare = self._fork()

    def run(self) -> None:
        """Serve until the worker closes the control socket."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._trials:
                    self._reap(descriptor)
                elif descriptor != self._control.fileno():
                    self._end(descriptor)
                elif not self._accept():
                    return

    def _fork(self) -> _Child:
        """Fork a child that waits for a trial."""
        local_end, remote_end = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            local_end.close()
            for trial in self._trials.values():
                trial.connection.close()  # or the worker would wait for this child, too
            _run_child(remote_end, self._build, self._limits)
        remote_end.close()
        return _Child(pid, local_end)

    def _accept(self) -> bool:
        """Give the next trial to the waiting child, and fork another; return False if the worker is gone."""
        data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            for child in (self._spare, *self._trials.values()):
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
            return False
        if os.waitpid(self._spare.pid, os.WNOHANG)[0]:  # killed, as without memory
            self._spare.connection.close()
            self._spare = self._fork()
        pid, handoff = self._spare
        with handoff, contextlib.suppress(OSError):  # if it was killed: `_reap` follows
            socket.send_fds(handoff, [data], descriptors)
        connection = socket.socket(fileno=descriptors[0])
        process = os.pidfd_open(pid)
        self._trials[process] = _Child(pid, connection)
        self._poll.register(process, select.POLLIN)
        self._poll.register(connection, 0)  # says when the worker has closed its end
        self._spare = self._fork()
        return True

    def _reap(self, process: int) -> None:
        trial = self._trials.pop(process)
        _, status = os.waitpid(trial.pid, 0)
        if os.WIFSIGNALED(status):
            _answer(trial.connection, Verdict(ended_by=os.WTERMSIG(status)))
        self._poll.unregister(process)
        os.close(process)
        with contextlib.suppress(KeyError):  # it was ended
            self._poll.unregister(trial.connection)
        trial.connection.close()

    def _end(self, connection: int) -> None:
        """End the child of a trial that the worker has given up; `_reap` follows."""
        for trial in self._trials.values():
            if trial.connection.fileno() == connection:
                os.kill(trial.pid, signal.SIGKILL)
                self._poll.unregister(connection)


def _run_child(handoff: socket.socket, build: Build, limits: TrialLimits) -> None:
    """Wait for the socket that brings a constraint, compile it, answer, and end this process."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())  # llguidance writes there when memory ends
    run_deep(lambda: build(WARM_UP))
    data, descriptors, _, _ = socket.recv_fds(handoff, 1, 1)
    if not data:
        os._exit(0)
    connection = socket.socket(fileno=descriptors[0])
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])  # of this address space
    memory = num_pages * resource.getpagesize() + _STACKS + limits.memory
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(limits.wall_s)
    run_deep(lambda: _answer(connection, _try(connection, build)))
    os._exit(0)


def _try(connection: socket.socket, build: Build) -> Verdict:
    try:
        with connection.makefile("rb") as stream:
            guided = msgspec.msgpack.decode(stream.read(), type=generate.GuidedDecoding)
        build(guided)
    except errors.InvalidRequest as error:
        return Verdict(refusal=str(error))
    except MemoryError:
        return Verdict(ended_by=signal.SIGABRT)
    return Verdict()


def _answer(connection: socket.socket, verdict: Verdict) -> None:
    with contextlib.suppress(OSError):  # the worker has given up
        connection.sendall(msgspec.msgpack.encode(verdict))


def serve(build: Build, limits: TrialLimits) -> None:
    """Serve trials until the worker that started this process is gone, over the socket that is standard input."""
    with socket.socket(fileno=sys.stdin.fileno()) as control:
        TrialServer(control, build, limits).run()


def refuse(guided: generate.GuidedDecoding, reason: str) -> errors.InvalidRequest:
    """Return the error of a request with a grammar that cannot be followed, in one line."""
    reason = " ".join(reason.split())
    if len(reason) > _MAX_REASON_CHARS:
        reason = reason[:_MAX_REASON_CHARS] + "…"
    return errors.InvalidRequest.of_param(
        guided.param, f"this grammar cannot be followed: {reason}"
    )


def run_deep(function: Callable[[], T]) -> T:
    """Call a function in a thread with a stack for deep recursion; return its result or raise its error."""
    result: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            result.set_exception(error)

    with _stack_size_lock:
        former_size = threading.stack_size(STACK_BYTES)  # memory is taken only as far as it is used
        try:
            threading.Thread(target=run, daemon=True).start()
        finally:
            threading.stack_size(former_size)
    return result.result()


_Result = Verdict | errors.DynamoError


class GrammarTrials:
    """The grammars that an engine of another project gets, each tried before. Used on one event loop.

    All requests and choices with the same grammar share one trial. What has been tried is cached by content. The
    process of the trials starts with the first guided request.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        limits: TrialLimits,
        *,
        environment: Mapping[str, str] = {},
    ) -> None:
        """Nothing is started yet; `module` calls `serve` with these limits."""
        self._module, self._arguments, self._limits = module, arguments, limits
        self._environment = environment
        self._process: TrialProcess | None = None
        self._verdicts: OrderedDict[generate.GuidedDecoding, Verdict] = OrderedDict()
        self._running: dict[generate.GuidedDecoding, asyncio.Task[_Result]] = {}
        self._tasks = tasks.Tasks()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def check(self, guided: generate.GuidedDecoding) -> None:
        """Return when the engine can be given this grammar. Raises InvalidRequest, Overloaded, or EngineFailed."""
        result: _Result | None = self._verdicts.get(guided)
        if result is None:
            result = await asyncio.shield(self._running.get(guided) or self._start(guided))
        else:
            self._verdicts.move_to_end(guided)
        if isinstance(result, errors.DynamoError):
            raise result
        result.check(guided, self._limits)

    def _start(self, guided: generate.GuidedDecoding) -> "asyncio.Task[_Result]":
        if len(self._running) >= MAX_WAITING:
            raise errors.Overloaded(f"{MAX_WAITING} grammars wait for compilation; try later")
        task = self._running[guided] = self._tasks.start("try a grammar", self._run(guided))
        return task

    async def _run(self, guided: generate.GuidedDecoding) -> "_Result":
        """Return the verdict, or why there is none; keep it if another trial would end in the same way."""
        try:
            async with self._slots:
                verdict = await self._attempt(guided)
        except errors.DynamoError as error:
            return error
        except OSError as error:  # the process cannot start, as without memory
            return errors.EngineFailed(f"no grammar can be tried: {error}")
        finally:
            del self._running[guided]
        if not verdict.is_by_chance:
            self._verdicts[guided] = verdict
            if len(self._verdicts) > MAX_CACHED:
                self._verdicts.popitem(last=False)
        return verdict

    async def _attempt(self, guided: generate.GuidedDecoding) -> Verdict:
        if self._process is not None and self._process.has_ended:
            await self._end_process()
        if self._process is None:
            self._process = TrialProcess(
                self._module, self._arguments, environment=self._environment
            )
        return await self._process.attempt(guided)

    async def close(self) -> None:
        """End all trials and their process."""
        await self._tasks.close()
        await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.close)
