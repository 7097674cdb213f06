"""The logging of a process: a level for each module, as text for people or as JSON lines for machines.

    DYN_LOG                  a default level and levels by module: `info`, `debug`, `warn,dynamo.runtime=debug`, `off`
    DYN_LOGGING_JSONL        1: one JSON object per line (time, level, target, message, and the error's trace)
    DYN_LOGGING_CONFIG_PATH  a TOML file with `log_level` and a table `log_filters`, which DYN_LOG goes beyond
    DYN_LOG_USE_LOCAL_TZ     1: times of the local time zone, with their offset, instead of UTC

A line that is logged while a request is handled carries the request's id and trace: the code that handles it sets
`log_context`, and the formatter reads it. A process's main calls `configure` once; importing a module configures
nothing. Logs go to standard error. Colours are used only on a terminal, and never if NO_COLOR or
DYN_SDK_DISABLE_ANSI_LOGGING is set.
"""

import contextvars
import datetime
import errno
import logging
import os
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec

from dynamo.base import errors, process_setup
from dynamo.protocols import trace_context

_OFF = logging.CRITICAL + 10
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": _OFF,
}
_COLOURS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}
_PEER_S = 1.0
_MAX_PEERS = 1024
# What a peer sent may stand in a message: it cannot begin a line of its own, nor speak to the terminal.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    0x09: "\t",
    0x0A: "\n    ",
}
_TRUE = ("1", "true", "yes", "on")


class LogContext(msgspec.Struct, frozen=True):
    """The request that is being handled, as its log lines name it."""

    span_name: str
    request_id: str | None = None
    trace: trace_context.TraceContext | None = None

    def fields(self) -> dict[str, str]:
        """Return the fields that each log line of this request carries."""
        fields = {"span_name": self.span_name}
        if self.request_id is not None:
            fields["x_request_id"] = self.request_id
        if self.trace is not None:
            fields |= {"trace_id": self.trace.trace_id, "span_id": self.trace.span_id}
        return fields

    def headers(self) -> dict[str, str]:
        """Return the headers by which another process names this request in its logs and spans."""
        headers = {} if self.request_id is None else {"x-request-id": self.request_id}
        return headers | (self.trace.headers() if self.trace is not None else {})


log_context: contextvars.ContextVar[LogContext | None] = contextvars.ContextVar(
    "log_context", default=None
)


def current_headers() -> dict[str, str] | None:
    """Return the headers by which another process names the request of this task; None outside of requests."""
    context = log_context.get()
    return None if context is None else context.headers()


def configure(environ: Mapping[str, str] = os.environ, stream: TextIO | None = None) -> None:
    """Send the logs of this process to `stream`, None: standard error, and name DYN_* variables that nothing reads.

    Raises ConfigError for a bad setting.
    """
    stream = stream or sys.stderr
    default, by_module = _levels(environ)
    in_local_time = _is_on(environ, "DYN_LOG_USE_LOCAL_TZ")
    handler = logging.StreamHandler(stream)
    if _is_on(environ, "DYN_LOGGING_JSONL"):
        handler.setFormatter(JsonFormatter(in_local_time=in_local_time))
    else:
        plain = environ.get("NO_COLOR") or environ.get("DYN_SDK_DISABLE_ANSI_LOGGING")
        colour = bool(stream and stream.isatty()) and not plain and environ.get("TERM") != "dumb"
        handler.setFormatter(TextFormatter(colour=colour, in_local_time=in_local_time))
    handler.addFilter(FileLimitFilter(time.monotonic))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(default, logging.WARNING))  # other libraries log warnings only
    logging.getLogger("dynamo").setLevel(default)
    for module, level in by_module.items():
        logging.getLogger(module).setLevel(level)
    if unknown := process_setup.describe_unknown(environ):
        logging.getLogger(__name__).warning("%s", unknown)


def parse_levels(text: str) -> tuple[int | None, dict[str, int]]:
    """Parse `warn,dynamo.runtime=debug` into the default level, None if absent, and levels by module.

    Raises ConfigError for a level that does not exist.
    """
    default, by_module = None, {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        module, _, word = part.rpartition("=")
        level = _level(word, "DYN_LOG", part)
        if module:
            by_module[_name(module)] = level
        else:
            default = level
    return default, by_module


def _levels(environ: Mapping[str, str]) -> tuple[int, dict[str, int]]:
    """Return the default level and the levels by module: the file's, overridden by DYN_LOG's."""
    path = environ.get("DYN_LOGGING_CONFIG_PATH")
    default, by_module = _read_file(Path(path)) if path else (logging.INFO, {})
    override, override_by_module = parse_levels(environ.get("DYN_LOG", ""))
    return default if override is None else override, by_module | override_by_module


def _read_file(path: Path) -> tuple[int, dict[str, int]]:
    place = f"DYN_LOGGING_CONFIG_PATH ({path})"
    try:
        settings = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise errors.ConfigError(f"{place}: expected a TOML file: {error}") from error
    if unknown := sorted(settings.keys() - {"log_level", "log_filters"}):
        raise errors.ConfigError(f"{place}: expected log_level and log_filters, got {unknown[0]!r}")
    filters = settings.get("log_filters", {})
    if not isinstance(filters, dict):
        raise errors.ConfigError(f"{place}: expected log_filters to be a table, got {filters!r}")
    by_module = {_name(module): _level(word, place, word) for module, word in filters.items()}
    return _level(settings.get("log_level", "info"), place, settings.get("log_level")), by_module


def _level(word: Any, place: str, shown: Any) -> int:
    level = _LEVELS.get(word.lower()) if isinstance(word, str) else None
    if level is None:
        raise errors.ConfigError(
            f"{place}: expected levels out of {', '.join(_LEVELS)}, like "
            f"'warn,dynamo.runtime=debug', got {shown!r}"
        )
    return level


def _name(module: str) -> str:
    """Return a logger's name for a module, which users of the original write with `::`."""
    return module.strip().replace("::", ".")


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in _TRUE


class FileLimitFilter(logging.Filter):
    """Makes one sentence a second of what asyncio says of connections for which no file is left.

    It says it, with a trace, for each attempt: thousands of times a second.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now
        self._logged_at = -_PEER_S

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is to be written."""
        error = record.exc_info[1] if record.name == "asyncio" and record.exc_info else None
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            return True
        if self._now() - self._logged_at < _PEER_S:
            return False
        self._logged_at = self._now()
        record.msg = "connections wait: %s; raise the limit (ulimit -n, LimitNOFILE=)"
        record.args, record.exc_info = (error,), None
        return True


class PeerLog:
    """The log lines that peers cause: at most one a second for each, and the number of those that were left out.

    So an attacker can neither fill the disk nor hide what another peer does. May be called from any thread.
    """

    def __init__(self, logger: logging.Logger, now: Callable[[], float]) -> None:
        self._logger, self._now = logger, now
        self._lock = threading.Lock()
        # by peer: when, and lines since; oldest first
        self._logged: dict[str, tuple[float, int]] = {}

    def warning(self, peer: str, message: str, *arguments: object) -> bool:
        """Log a warning about `peer`, by which its lines are counted: its host, not a name that it chose.

        Return False if it was left out.
        """
        with self._lock:
            now = self._now()
            if peer not in self._logged and len(self._logged) >= _MAX_PEERS:
                oldest = next(iter(self._logged))
                if now - self._logged[oldest][0] >= _PEER_S:
                    del self._logged[oldest]
                else:
                    peer = ""  # so many at once count as one
            logged_at, num_left_out = self._logged.get(peer, (float("-inf"), 0))
            if now - logged_at < _PEER_S:
                self._logged[peer] = (logged_at, num_left_out + 1)
                return False
            self._logged.pop(peer, None)
            self._logged[peer] = (now, 0)
        if num_left_out:
            message, arguments = (
                f"{message} (%d lines like this were left out)",
                (*arguments, num_left_out),
            )
        self._logger.warning(message, *arguments)
        return True


class _Formatter(logging.Formatter):
    """The timestamp of both formatters."""

    def __init__(self, *, in_local_time: bool = False) -> None:
        super().__init__()
        self._in_local_time = in_local_time

    def _timestamp(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        if self._in_local_time:
            return moment.astimezone().isoformat(timespec="microseconds")
        return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


class TextFormatter(_Formatter):
    """Lines like `2026-09-07T07:05:29.076928Z  INFO dynamo.worker.host: message`, then the fields of the request."""

    def __init__(self, *, colour: bool, in_local_time: bool = False) -> None:
        super().__init__(in_local_time=in_local_time)
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname:>5}"
        if self._colour and record.levelname in _COLOURS:
            level = f"\x1b[{_COLOURS[record.levelname]}m{level}\x1b[0m"
        message = record.getMessage()
        if context := log_context.get():
            message += "".join(f" {name}={value}" for name, value in context.fields().items())
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return f"{self._timestamp(record)} {level} {record.name}: {message.translate(_CONTROLS)}"


class JsonFormatter(_Formatter):
    """One JSON object per line, with the field names of the original."""

    def format(self, record: logging.LogRecord) -> str:
        row = {
            "time": self._timestamp(record),
            "level": record.levelname,
            "target": record.name,
            "message": record.getMessage(),
            "file": record.pathname,
            "line": record.lineno,
        }
        if context := log_context.get():
            row |= context.fields()
        if record.exc_info:
            row["error"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(row).decode()
        except UnicodeEncodeError:  # the name of a file may hold what is no text
            escaped = {
                key: str(value).encode(errors="backslashreplace").decode()
                for key, value in row.items()
            }
            return msgspec.json.encode(escaped | {"line": record.lineno}).decode()
