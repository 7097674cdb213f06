"""`dynamo ps`, `dynamo stop`, `dynamo logs`: what runs on this machine, by the states that `dynamo serve` writes."""

import contextlib
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dynamo.base import config, errors
from dynamo.cli import waiting
from dynamo.launch import state

_STOP_MARGIN_S = 25.0  # for what a killed process leaves, and the end of `dynamo serve` itself
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessListConfig:
    """List what `dynamo serve` runs here."""

    name: str | None = config.option(None, flag="", help="name of the one to list (default: all)")
    verbose: bool = config.option(
        False, aliases=("-v",), help="print each process's command, to paste into a shell"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConfig:
    """Stop a `dynamo serve`; running requests finish first."""

    name: str | None = config.option(None, flag="", help="its name (default: the only one)")
    timeout: float | None = config.option(
        None,
        help="most seconds to wait until it has ended (default: as long as its processes may take to finish their"
        " requests, and 25 s more)",
        least=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsConfig:
    """Show what a `dynamo serve` and its processes said."""

    name: str | None = config.option(None, flag="", help="its name (default: the only one)")
    follow: bool = config.option(False, aliases=("-f",), help="go on as more is said")
    tail: int = config.option(0, help="lines to show from the end of the log; 0: all", least=0)


def list_processes(options: ProcessListConfig) -> int:
    """Print a line for each `dynamo serve`, and with -v its processes."""
    for path in state.unreadable():
        print(
            f"{path}: expected a state of this version's `dynamo serve`; stop that process, and delete the file",
            file=sys.stderr,
        )
    states = state.running() if options.name is None else [state.find(options.name)]
    if not states:
        print("nothing is served here; start something: dynamo serve", file=sys.stderr)
    print(f"{'NAME':<16} {'PID':>8} {'AGE':>8}  {'ADDRESS':<24} SERVES")
    for served in states:
        age = _age(time.time() - served.started_at)
        print(f"{served.name:<16} {served.pid:>8} {age:>8}  {served.url or '-':<24} {served.model}")
        for name, words in served.models.items():
            print(f"  {name:<32} {words}")
        for process in served.processes:
            print(f"  {process.name:<14} {process.pid:>8}")
            if options.verbose:
                print(f"    {process.shell}")
    return 0


def stop(options: StopConfig) -> int:
    """Send SIGTERM and wait until it has ended. Raises EngineFailed if it does not."""
    served = state.find(options.name)
    limit_s = served.stop_timeout_s + _STOP_MARGIN_S
    if options.timeout is not None:
        limit_s = options.timeout
    try:
        os.kill(served.pid, signal.SIGTERM)
    except ProcessLookupError:  # it has ended meanwhile
        pass
    except PermissionError as error:
        raise errors.ConfigError(
            f"{served.name}, process {served.pid}, belongs to another user, who can stop it"
        ) from error
    print(
        f"stopping {served.name}: running requests finish first, within {served.stop_timeout_s:g} s;"
        f" waiting for at most {limit_s:g} s",
        flush=True,
    )
    deadline = time.monotonic() + limit_s
    with waiting.say_regularly(
        lambda: f"{served.name} has not ended; kill {served.pid} ends it at once"
    ):
        while any(served_now.pid == served.pid for served_now in state.running()):
            if time.monotonic() > deadline:
                raise errors.EngineFailed(
                    f"{served.name} has not ended within {limit_s:g} s; kill -9 {served.pid} ends it at once"
                )
            time.sleep(_POLL_S)
    return 0


def show_logs(options: LogsConfig) -> int:
    """Print the log, and with --follow what comes until it ends or Ctrl-C. Raises ConfigError."""
    kept_names = ", ".join(sorted(path.stem for path in state.directory().glob("*.log")))
    if options.name is None and kept_names and not state.running():
        raise errors.ConfigError(
            f"no `dynamo serve` runs here; expected the name of one whose log is kept: {kept_names}"
        )
    name = options.name if options.name is not None else state.find(None).name
    path = state.log_path(name)
    try:
        file = _open_log(path)
    except OSError as error:
        raise errors.ConfigError(
            f"no log of {name} ({error.strerror}): expected one of {kept_names or 'none'}"
        ) from None
    try:
        sys.stdout.writelines(deque(file, options.tail or None))
        while options.follow and any(served.name == name for served in state.running()):
            sys.stdout.flush()
            time.sleep(_POLL_S)
            file = _follow_log(file, path)
            sys.stdout.writelines(file)
        sys.stdout.writelines(file)  # what it said while it was looked whether it runs
    finally:
        file.close()
    return 0


def _open_log(path: Path) -> TextIO:
    return path.open(encoding="utf-8", errors="replace")


def _follow_log(file: TextIO, path: Path) -> TextIO:
    """Return the log at this path; if that is another file by now, print the rest of the present one first."""
    with contextlib.suppress(FileNotFoundError):  # it is just being made
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            following = _open_log(path)
            sys.stdout.writelines(file)
            file.close()
            return following
    return file


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
