"""How a model's hidden states become one vector for a text: what sentence-transformers writes beside a checkpoint.

    modules.json                 the steps: Transformer, Pooling, Normalize
    1_Pooling/config.json        which hidden states are taken
    sentence_bert_config.json    how many tokens the model was trained for

Without these files the mean over all tokens is taken. Vectors are always normalised, as OpenAI's are; a model that
does more than this (a Dense layer) is refused, because its vectors would be others.
"""

from pathlib import Path
from typing import Literal

import msgspec

from dynamo.base import errors
from dynamo.engine.native import model_files

Pooling = Literal["mean", "cls", "last"]
MODULES, POOLING, LIMITS = "modules.json", "config.json", "sentence_bert_config.json"
_MODES: dict[object, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",  # newer versions write one field, pooling_mode, instead of one field per mode
    "cls": "cls",
    "lasttoken": "last",
}
_KNOWN_STEPS = ("Transformer", "Pooling", "Normalize")


class _Step(msgspec.Struct, frozen=True):
    type: str
    path: str = ""


class _Limits(msgspec.Struct, frozen=True):
    max_seq_length: int | None = None


def is_described(model_path: Path) -> bool:
    """Does the directory say that it is a model for embeddings?"""
    return (model_path / MODULES).is_file()


def pooling(model_path: Path) -> Pooling:
    """Which hidden states make the vector. Raises ConfigError."""
    for step in model_files.read(model_path / MODULES, list[_Step]) or ():
        name = step.type.rpartition(".")[2]
        if name not in _KNOWN_STEPS:
            raise errors.ConfigError(
                f"{model_path / MODULES}: the step {step.type} is not supported; "
                f"supported are {', '.join(_KNOWN_STEPS)}"
            )
        if name == "Pooling":
            return _mode(model_path / step.path / POOLING)
    return "mean"


def max_tokens(model_path: Path) -> int | None:
    """How long a text the model was trained for, if it says so. Raises ConfigError."""
    limits = model_files.read(model_path / LIMITS, _Limits)
    return limits.max_seq_length if limits else None


def _mode(path: Path) -> Pooling:
    fields = model_files.read(path, dict[str, object]) or {}
    asked = [fields.get("pooling_mode")] if "pooling_mode" in fields else _asked(fields)
    if len(asked) != 1 or asked[0] not in _MODES:
        raise errors.ConfigError(
            f"{path}: the pooling {' and '.join(map(str, asked)) or 'none'} is not supported; "
            f"expected one of {', '.join(map(str, _MODES))}"
        )
    return _MODES[asked[0]]


def _asked(fields: dict[str, object]) -> list[object]:
    return [name for name, value in fields.items() if name.startswith("pooling_mode_") and value]
