"""The options of NVIDIA Dynamo's processes that ours do not have: which are taken, and what is said of the others.

`foreign_options.toml` has a table for each class of our options, and in it an entry for each foreign flag:

    "--dyn-chat-processor" = ["value *", "frontends always prepare requests themselves"]

The first text says how the flag is written, as `switch` (`--flag`, `--no-flag`, also with true or false behind it) or
with a `value`, and then with which values it is taken, of a switch `on` and `off`; `*` stands for all of them. A flag
`--ais-*` stands for all that begin so. A flag that is taken changes nothing that an answer means, and is logged with
the second text, the reason. With another value the process does not start, and the same text says why, or what to use
instead. The file is read only where a command line has a flag that we do not know.
"""

import collections
import functools
import logging
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from dynamo.base import errors

_SWITCH_VALUES = {"true": "on", "1": "on", "false": "off", "0": "off"}
_PREFIX_LEN = len("--ais-")
_logger = logging.getLogger(__name__)


class ForeignOption(msgspec.Struct, frozen=True, array_like=True):
    """A flag of NVIDIA Dynamo that has no effect here."""

    form: str
    reason: str

    @property
    def is_switch(self) -> bool:
        """Return whether the flag may stand without a value."""
        return self.form.startswith("switch")

    def takes(self, word: str) -> bool:
        """Return whether the word behind the flag is its value."""
        return word.lower() in _SWITCH_VALUES if self.is_switch else not word.startswith("--")

    def is_taken(self, value: str) -> bool:
        """Return whether the flag may be given with this value."""
        return bool({"*", value} & {*self.form.split()[1:]})


@functools.cache
def read_table() -> dict[str, dict[str, ForeignOption]]:
    """Return the foreign options by class of ours and flag."""
    text = Path(__file__).with_suffix(".toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, dict[str, ForeignOption]])


def take(words: Sequence[str], classes: Iterable[type]) -> list[str]:
    """Return the words without the foreign options of these classes and their bases, which are logged.

    Raises ConfigError for a foreign option that may not be taken with its value.
    """
    if not words:
        return []
    names = {base.__name__ for cls in classes for base in cls.__mro__}
    options = {k: option for name in names for k, option in read_table().get(name, {}).items()}
    queue, remaining = collections.deque(words), []
    while queue:
        shown = queue.popleft()
        flag, equals, value = shown.partition("=")
        option, is_negated = _find(options, flag)
        if option is None:
            remaining.append(shown)
            continue
        if not equals and not is_negated and queue and option.takes(queue[0]):
            value = queue.popleft()
            shown += f" {value}"
        elif not equals and not option.is_switch:
            raise errors.ConfigError(f"{flag}: expected a value")
        if option.is_switch:
            value = "off" if is_negated else _SWITCH_VALUES.get(value.lower(), "on")
        if not option.is_taken(value):
            raise errors.ConfigError(f"{shown} is not supported here: {option.reason}")
        _logger.warning("%s has no effect here: %s", shown, option.reason)
    return remaining


def _find(options: Mapping[str, ForeignOption], flag: str) -> tuple[ForeignOption | None, bool]:
    """Return the option of a flag, and whether the flag negates it."""
    negated = options.get(f"--{flag.removeprefix('--no-')}") if flag.startswith("--no-") else None
    if negated is not None and negated.is_switch:
        return negated, True
    return options.get(flag) or options.get(f"{flag[:_PREFIX_LEN]}*"), False
