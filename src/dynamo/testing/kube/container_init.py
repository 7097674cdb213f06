"""The first process of a container: it gives the container process numbers of its own, and passes signals on.

This script runs in place of the container's program, makes a namespace of process numbers, and waits outside of it, so
that its parent signals and awaits it as it would the program. Inside, process 1 is this script too: it starts the
program, reaps the processes that nobody else does, and ends with the program. Where the kernel refuses the namespace,
the program takes the place of the script. It runs with the standard library alone and without `site`.
"""

import ctypes
import os
import signal
import sys

_CLONE_NEWNS, _CLONE_NEWPID = 0x20000, 0x20000000
_PR_SET_PDEATHSIG = 1
_MS_NOSUID_NODEV_NOEXEC, _MS_BIND = 2 | 4 | 8, 0x1000
_PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def command(argv: list[str], mount: tuple[object, str]) -> list[str]:
    """Return the command line of this script for a container's program, with one mount for it alone."""
    return [sys.executable, "-I", "-S", __file__, *map(str, mount), *argv]


def first_process(pid: int) -> int | None:
    """Return process 1 of the container for which process `pid` waits; None if it has ended, or has no namespace."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as below:
            numbers = below.read().split()
        is_inside = os.readlink(f"/proc/{pid}/ns/pid") != os.readlink(f"/proc/{numbers[0]}/ns/pid")
    except (OSError, IndexError):
        return None
    return int(numbers[0]) if is_inside else None


def main(source: str, target: str, *argv: str) -> None:
    """Run the program in a namespace of its own; end as it ends."""
    library = ctypes.CDLL(None)
    if library.unshare(_CLONE_NEWPID | _CLONE_NEWNS):
        os.execvp(argv[0], argv)
    library.mount(source.encode(), target.encode(), None, _MS_BIND, None)
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until they can be passed on
    first = os.fork()
    if first:
        _end_as(first)
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # where it is refused, the program sees all processes there, but cannot reach them
    library.mount(b"proc", b"/proc", b"proc", _MS_NOSUID_NODEV_NOEXEC, None)
    program = os.fork()
    if program:
        _end_as(program)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    os.execvp(argv[0], argv)


def _end_as(child: int) -> None:
    """Pass signals on to a child until it has ended, and end this process with its status, as a shell says it."""
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _frame: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(*sys.argv[1:])
