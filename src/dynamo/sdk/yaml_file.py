"""The YAML file of a graph's configuration. The only module of the SDK that imports yaml."""

import json
from pathlib import Path
from typing import Any

import yaml

from dynamo.base import errors


def read(path: Path) -> dict[str, Any]:
    """Return the sections of a file. Raises ConfigError that names the file, and the line of a mistake."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise errors.ConfigError(f"-f {path}: expected a readable YAML file: {reason}") from error
    try:
        json.dumps(content)  # as the processes get it
    except (TypeError, ValueError) as error:
        raise errors.ConfigError(
            f"-f {path}: expected values as in JSON: {error}; write a date in quotes"
        ) from error
    if content is not None and not isinstance(content, dict):
        raise errors.ConfigError(f"-f {path}: expected sections by service, got {content!r:.60}")
    return content or {}


def write(content: Any) -> str:
    """Return a JSON value as YAML, with keys in their order, and without anchors for parts that stand twice."""
    copied = json.loads(json.dumps(content))
    text: str = yaml.safe_dump(copied, sort_keys=False, width=120)
    return text
