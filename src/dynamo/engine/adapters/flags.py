"""A library's own flags: what we tell it ourselves may not be said a second time in its way."""

from collections.abc import Mapping, Sequence

from dynamo.base import errors

OURS = {
    flag: f"{flag} is ours, and the engine is told: write it so, once, and with dashes"
    for flag in ("--model", "--model-path", "--served-model-name", "--config")
}


def refuse(words: Sequence[str], refusals: Mapping[str, str]) -> None:
    """Raises ConfigError, with what `refusals` says of the flag, if one of them is among the words."""
    for word in words:
        if word.startswith("-") and (said := refusals.get(_flag(word))):
            raise errors.ConfigError(said)


def is_among(flag: str, words: Sequence[str]) -> bool:
    """Is this flag given?"""
    return flag in {_flag(word) for word in words if word.startswith("-")}


def _flag(word: str) -> str:
    """A flag's name as libraries read it: with underscores, a value, or the key of a nested field, it is the same."""
    return word.partition("=")[0].partition(".")[0].replace("_", "-")
