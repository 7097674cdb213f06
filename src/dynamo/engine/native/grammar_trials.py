"""Trials of grammars: a process in which a hostile grammar can be ended.

llguidance compiles most grammars in a millisecond, some for ever, and cannot be interrupted. So each grammar is
compiled here first. This process has read the tokenizer; each trial has a child that it forked before, under limits
that the kernel enforces:

    worker ──socket for each trial──▶ this process ──the socket──▶ child: compile, answer over the socket, exit

A child waits for a trial with its pages already copied, which is most of what a fork costs. One that exceeds its
processor time, memory or wall-clock time is ended by a signal, and this process says in its place which limit it was. A
worker that closes a trial's socket ends its child; one that is gone closes the control socket, which ends all. Nothing
else runs here, so forking is safe.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynamo.base import errors
from dynamo.engine.native import guided_decoding
from dynamo.protocols import generate

MAX_CPU_S = 2  # an ordinary grammar takes a thousandth of it
MAX_MEMORY = 2**29  # bytes that compilation may add
MAX_WALL_S = 60  # on a machine so busy that the processor time takes thirty times as long
_STACKS = 2 * guided_decoding.STACK_BYTES  # of the child's thread, and its heap's first reservation
_WARM_UP = generate.GuidedDecoding(json='{"type":"object"}')
_COSTLY = "large numbers in multipleOf, patterns in allOf and long repetitions are costly"
_REASONS: dict[int, str] = {
    signal.SIGXCPU: f"it takes more than {MAX_CPU_S} s of processor time to compile; {_COSTLY}",
    signal.SIGABRT: f"it takes more than {MAX_MEMORY >> 20} MiB of memory to compile; {_COSTLY}",
    signal.SIGSEGV: "it is nested too deeply",
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a trial; an empty one says that the grammar can be compiled within the limits."""

    refusal: str | None = None  # the message of an InvalidRequest
    ended_by: int | None = None  # the signal that ended the child

    def check(self, guided: generate.GuidedDecoding) -> None:
        """Raise InvalidRequest if the grammar cannot be compiled, Overloaded if there was not enough time to see."""
        if self.refusal is not None:
            raise errors.InvalidRequest(self.refusal, param=guided.param)
        if self.ended_by == signal.SIGALRM:
            raise errors.Overloaded(f"no grammar was compiled within {MAX_WALL_S} s; try later")
        if self.ended_by is not None:
            reason = _REASONS.get(
                self.ended_by, f"the signal {self.ended_by} ended its compilation"
            )
            raise guided_decoding.refuse(guided, reason)


class TrialProcess:
    """The worker's end. Used on one event loop."""

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos: tuple[int, ...]) -> None:
        """Start the process; it reads the tokenizer before its first trial."""
        self._control, remote_end = socket.socketpair()
        arguments = [str(tokenizer_path), str(vocab_size), ",".join(map(str, eos))]
        with remote_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *arguments],
                stdin=remote_end.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the worker
                env=os.environ | {"RAYON_NUM_THREADS": "1"},  # threads do not survive a fork
            )

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended by itself."""
        return self._process.poll() is not None

    def connect(self) -> socket.socket:
        """Begin a trial; return the socket for the constraint and then the verdict. Raises OSError."""
        local_end, remote_end = socket.socketpair()
        with remote_end:
            try:
                socket.send_fds(self._control, [b"."], [remote_end.fileno()])
            except OSError:
                local_end.close()
                raise
        return local_end

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

    def __init__(self, control: socket.socket, builder: guided_decoding.GrammarBuilder) -> None:
        self._control = control
        self._builder = builder
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
            _run_child(remote_end, self._builder)
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


def _run_child(handoff: socket.socket, builder: guided_decoding.GrammarBuilder) -> None:
    """Wait for the socket that brings a constraint, compile it, answer, and end this process."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())  # llguidance writes there when memory ends
    guided_decoding.run_deep(lambda: builder.build(_WARM_UP))
    data, descriptors, _, _ = socket.recv_fds(handoff, 1, 1)
    if not data:
        os._exit(0)
    connection = socket.socket(fileno=descriptors[0])
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])  # of this address space
    memory = num_pages * resource.getpagesize() + _STACKS + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(MAX_WALL_S)
    guided_decoding.run_deep(lambda: _answer(connection, _try(connection, builder)))
    os._exit(0)


def _try(connection: socket.socket, builder: guided_decoding.GrammarBuilder) -> Verdict:
    try:
        with connection.makefile("rb") as stream:
            guided = msgspec.msgpack.decode(stream.read(), type=generate.GuidedDecoding)
        builder.build(guided)
    except errors.InvalidRequest as error:
        return Verdict(refusal=str(error))
    except MemoryError:
        return Verdict(ended_by=signal.SIGABRT)
    return Verdict()


def _answer(connection: socket.socket, verdict: Verdict) -> None:
    with contextlib.suppress(OSError):  # the worker has given up
        connection.sendall(msgspec.msgpack.encode(verdict))


def main(arguments: list[str]) -> None:
    """Serve the worker that started this process, over the socket that is its standard input."""
    path, vocab_size, eos = arguments
    end_ids = tuple(map(int, eos.split(",")))
    try:
        builder = guided_decoding.GrammarBuilder(Path(path), int(vocab_size), end_ids)
    except errors.EngineFailed:
        sys.exit(1)  # the worker, which reads the same file, reports it
    builder.build(_WARM_UP)  # children share its tables
    with socket.socket(fileno=sys.stdin.fileno()) as control:
        TrialServer(control, builder).run()


if __name__ == "__main__":
    main(sys.argv[1:])
