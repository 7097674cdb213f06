"""Small JSON files of a model directory, as typed values; what they hold beyond the type is not looked at."""

from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo.base import errors

T = TypeVar("T")


def read(path: Path, kind: type[T]) -> T | None:
    """None if there is no such file. Raises ConfigError, which names the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"{path}: {error}") from error
