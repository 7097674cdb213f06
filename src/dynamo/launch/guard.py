"""The guard of a process that starts children: a small process that cleans up after it, however it ended.

The guard runs in its own session, where neither Ctrl-C nor a closed terminal reaches it. It reads commands from a pipe,
the lifeline, of which only the guarded process holds the other end; the kernel closes that end when the process ends.
Then the guard kills all processes that are left, after their time of grace if they have one, and removes the temporary
folders and shared-memory files.

Commands, one per line:

    group PID      this process is a child and leads a process group
    ended PID      this group is empty
    grace SECONDS  processes may finish what they run for so long after the end
    folder PATH    remove this folder at the end
    foreign NAME   this file in /dev/shm was there before

A process belongs to the guarded one if it is in such a group or, on Linux, if its environment holds the guard's token:
children of children inherit it, also those that open a session of their own. A file in /dev/shm belongs to it if it
was not there before and one of these processes maps it. `multiprocessing.resource_tracker` processes get some time
to end by themselves, because they remove shared memory, too.

This file runs as a script, with the standard library alone and without `site`: it starts within 20 ms.
"""

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

TOKEN_VARIABLE = "DYN_LAUNCH_TOKENS"  # of this guard and of those around it, separated by commas
_POLL_S = 1.0  # how often /dev/shm is listed
_TRACKER_S = 2.0  # for resource trackers to end by themselves
_KILL_S = 6.0
_CLOSE_S = 60.0  # for the guard to end, which takes it less than the two above by its own clock
_SCAN_S = 0.02
_BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHARED_MEMORY = Path("/dev/shm")


class Guard:
    """The guarded process's side: `with Guard() as guard`. Nothing of ours is left when the block has ended."""

    def __init__(self) -> None:
        self._token = f"{os.getpid()}.{secrets.token_hex(8)}"
        read_end, self.lifeline = os.pipe()  # children write there which process groups they lead
        earlier_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        try:
            self._process = subprocess.Popen(  # inherits the mask, and keeps it in the new program
                [sys.executable, "-I", "-S", __file__, self._token],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)
            os.close(read_end)
        for name in _list_shared_memory():
            self._send(f"foreign {name}")

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.lifeline)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)

    def make_folder(self, prefix: str) -> Path:
        """Create a temporary folder that is removed at the end; the guard knows it before it exists."""
        path = Path(tempfile.gettempdir(), f"{prefix}{secrets.token_hex(4)}")
        self._send(f"folder {path}")
        path.mkdir(mode=0o700)
        return path

    def mark(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return a child's environment with the token of this guard, after those of guards around it."""
        tokens = [os.environ.get(TOKEN_VARIABLE, ""), self._token]
        return {**environ, TOKEN_VARIABLE: ",".join(filter(None, tokens))}

    def remove_group(self, group: int) -> None:
        """Announce that this process group is empty."""
        self._send(f"ended {group}")

    def grant(self, grace_s: float) -> None:
        """Announce that children, which get SIGTERM at the end, may finish what they run for so many seconds."""
        self._send(f"grace {grace_s:g}")

    def _send(self, command: str) -> None:
        # the guard was killed: the kernel's part remains
        with contextlib.suppress(BrokenPipeError):
            os.write(self.lifeline, os.fsencode(f"{command}\n"))


def live_processes(groups: Iterable[int], token: str | None = None) -> set[int]:
    """Return the processes in these groups or with this token, without zombies and this process. Linux only."""
    pids, leaders = set(), frozenset(groups)
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, group = _read(entry, "stat").rpartition(b") ")[2].split()[:3]
            if state not in b"ZX" and (
                int(group) in leaders
                or (token is not None and token.encode() in _read(entry, "environ"))
            ):
                pids.add(int(entry))
    return pids


def kill_group(group: int) -> bool:
    """Send SIGKILL to all processes of a group; return whether there were any."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # the latter: only zombies are left, on macOS
        return False
    return True


def main(token: str) -> None:
    """Read commands from standard input until it ends, then clean up."""
    os.chdir("/")
    groups: set[int] = set()
    graces: list[float] = [0.0]
    folders: list[str] = []
    shared_files: set[str] = set()
    foreign_files: set[str] = set()
    unmapped_files: set[str] = set()
    buffer, is_open = b"", True
    while is_open:
        if select.select([0], [], [], _POLL_S)[0]:
            received = os.read(0, 1 << 16)
            is_open = bool(received)
            *lines, buffer = (buffer + received).split(b"\n")
            for line in lines:
                if line.startswith(b"grace "):
                    graces.append(float(line[6:]))
                else:
                    _obey(os.fsdecode(line), groups, folders, foreign_files)
        elif new_files := _list_shared_memory() - foreign_files - shared_files:
            shared_files |= _mapped_files(live_processes(groups, token)) - foreign_files
            unmapped_files, earlier_unmapped = new_files - shared_files, unmapped_files
            foreign_files |= unmapped_files & earlier_unmapped  # in two polls: not just being made
    _let_end(groups, token, max(graces))
    _kill_all(groups, token, foreign_files, shared_files)
    for name in shared_files:
        with contextlib.suppress(OSError):
            (_SHARED_MEMORY / name).unlink()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _obey(line: str, groups: set[int], folders: list[str], foreign_files: set[str]) -> None:
    command, _, argument = line.partition(" ")
    if command == "group":
        groups.add(int(argument))
    elif command == "ended":
        groups.discard(int(argument))
    elif command == "folder":
        folders.append(argument)
    elif command == "foreign":
        foreign_files.add(argument)


def _let_end(groups: set[int], token: str, grace_s: float) -> None:
    """Send SIGTERM to the children, and wait for `grace_s` seconds until all processes have ended."""
    until = time.monotonic() + grace_s
    if grace_s:
        for leader in groups:
            with contextlib.suppress(OSError):
                os.kill(leader, signal.SIGTERM)
    while time.monotonic() < until:
        if sys.platform == "linux":
            has_ended = not live_processes(groups, token)
        else:
            has_ended = not any(_is_alive(leader) for leader in groups)
        if has_ended:
            return
        time.sleep(_SCAN_S)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _kill_all(
    groups: set[int], token: str, foreign_files: set[str], shared_files: set[str]
) -> None:
    began_at = time.monotonic()
    while time.monotonic() - began_at < _KILL_S:
        if sys.platform != "linux":
            groups = {group for group in groups if kill_group(group)}
            if not groups:
                return
        else:
            remaining = live_processes(groups, token)
            if not remaining:
                return
            shared_files |= _mapped_files(remaining) - foreign_files
            is_patient = time.monotonic() - began_at < _TRACKER_S
            for pid in remaining:
                with contextlib.suppress(OSError):
                    if not is_patient or b"resource_tracker" not in _read(str(pid), "cmdline"):
                        os.kill(pid, signal.SIGKILL)
        time.sleep(_SCAN_S)


def _read(pid: str, file: str) -> bytes:
    with open(f"/proc/{pid}/{file}", "rb") as opened:
        return opened.read()


def _list_shared_memory() -> set[str]:
    """Return the names of the files in /dev/shm, where every user may make some.

    One with a line break is left out: what follows the break would be a command. The kernel writes it in another form
    where it says which files a process maps, so it is never taken for ours.
    """
    try:
        return {name for name in os.listdir(_SHARED_MEMORY) if "\n" not in name}
    except OSError:
        return set()


def _mapped_files(pids: Iterable[int]) -> set[str]:
    """Return the names of files in /dev/shm that these processes map."""
    prefix = f"{_SHARED_MEMORY}/".encode()
    names = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in _read(str(pid), "maps").splitlines():
                if prefix in line and not line.endswith(b"(deleted)"):
                    names.add(os.fsdecode(line.partition(prefix)[2]))
    return names


if __name__ == "__main__":
    main(sys.argv[1])
