"""What a child does before it becomes its program: this script prepares its own process, and then executes the program.

The alternative, a function between fork and exec (`preexec_fn`), runs in a copy of a process whose other threads may
have held locks: libraries with handlers for a fork write errors there, or wait for ever. A script needs no fork of that
kind, and costs some milliseconds. Its arguments: the descriptor of the guard's lifeline, the parent with which it dies
(0: none), its cores separated by commas, and the command. It runs with the standard library alone and without `site`.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_CANNOT_EXECUTE = 126  # as a shell does


def command(
    argv: Sequence[str], *, lifeline: int, parent: int | None, cores: Sequence[int]
) -> list[str]:
    """Return the command line of this script; `parent` is the process with which the child is killed."""
    settings = [str(lifeline), str(parent or 0), ",".join(map(str, cores))]
    return [sys.executable, "-I", "-S", __file__, *settings, *argv]


def main(lifeline: str, parent: str, cores: str, *argv: str) -> None:
    """Tell the guard of this process first, so that no moment is left without one; then execute the program."""
    with contextlib.suppress(BrokenPipeError):  # the guard was killed: the kernel's part remains
        os.write(int(lifeline), b"group %d\n" % os.getpid())
    os.set_inheritable(int(lifeline), False)
    # Python ignores these two, which programs do not expect
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        if int(parent):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != int(parent):  # it died in between
                os.kill(os.getpid(), signal.SIGKILL)
        if cores:
            os.sched_setaffinity(0, map(int, cores.split(",")))
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]} cannot be started: {error.strerror}\n")
        raise SystemExit(_CANNOT_EXECUTE) from None


if __name__ == "__main__":
    main(*sys.argv[1:])
