"""How long processes may take to end after SIGTERM: the settings that say so, and how a command line is read for them.

A process declares its settings by `DrainSetting.option`. What starts processes reads the same settings from the file of
their `--config`, their variables and their flags (`stop_timeout_s`), so that it kills none that still finishes its
requests in time.
"""

import contextlib
import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.base import config, errors

STOP_MARGIN_S = 5.0  # beyond the drain, for a process to end


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSetting:
    """A flag of a process, the field of its configuration, its variable and its default in seconds."""

    flag: str
    field: str
    variable: str
    default_s: float

    def option(self, text: str) -> Any:
        """Declare the option of a process's configuration; `text` is its help."""
        return config.option(self.default_s, env=self.variable, flag=self.flag, help=text, least=0)

    def read_s(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        content: Mapping[str, Any] | None = None,
    ) -> float:
        """Return the seconds that a command line names, else the environment, else the `content` of a file.

        What is no number is passed over.
        """
        keys = (self.field, self.flag.removeprefix("--").replace("-", "_"))
        written = [value for key in keys if (value := (content or {}).get(key)) is not None]
        seconds = self.default_s
        for text in (*written, environ.get(self.variable) or None, *_values_of(self.flag, words)):
            with contextlib.suppress(TypeError, ValueError):  # the former: of nothing, or of a list
                seconds = float(text)
        return seconds


WORKER = DrainSetting(
    flag="--graceful-shutdown-timeout",
    field="graceful_shutdown_timeout_s",
    variable="DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT",
    default_s=30.0,
)
FRONTEND = DrainSetting(
    flag="--http-graceful-shutdown-timeout-secs",
    field="http_graceful_shutdown_timeout_secs",
    variable="DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
    default_s=5.0,
)
GRACE = DrainSetting(
    flag="--graceful-shutdown-grace-period",
    field="grace_period_s",
    variable="DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
    default_s=0.0,
)
STOP_TIMEOUT_S = WORKER.default_s + STOP_MARGIN_S  # of a process that says nothing else


def stop_timeout_s(argv: Sequence[str], environ: Mapping[str, str], directory: str = "") -> float:
    """Return how long a process with this command, these variables and this directory may take after SIGTERM.

    A frontend and a planner are known by the module that they run; others drain like a worker. A planner ends when its
    own workers have.
    """
    module = next(iter(_values_of("-m", argv)), "")
    content = _read_file(argv, Path(directory))
    if module == "dynamo.planner":
        flags = _values_of("--worker-flags", argv) or [str(content.get("worker_flags", ""))]
        words: list[str] = []
        with contextlib.suppress(ValueError):  # of a quote without its end, which the planner names
            words = shlex.split(flags[-1])
        return STOP_MARGIN_S + stop_timeout_s(words, environ, directory)
    limit = FRONTEND if module == "dynamo.frontend" else WORKER
    return (
        STOP_MARGIN_S + limit.read_s(argv, environ, content) + GRACE.read_s(argv, environ, content)
    )


def _read_file(argv: Sequence[str], directory: Path) -> Mapping[str, Any]:
    """Return the content of the file of --config; nothing of one that is no such file, as the process says itself."""
    for argument in _values_of("--config", argv)[-1:]:
        with contextlib.suppress(errors.ConfigError):
            return config.read_file(argument, directory)[1]
    return {}


def _values_of(flag: str, words: Sequence[str]) -> list[str]:
    """Return the values of a flag, as `--flag value` or `--flag=value`."""
    return [
        following if word == flag else word.removeprefix(f"{flag}=")
        for word, following in itertools.pairwise([*words, ""])
        if word == flag or word.startswith(f"{flag}=")
    ]
