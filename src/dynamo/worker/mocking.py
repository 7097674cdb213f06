"""The simulated engine for a model directory: it borrows the model's tokenizer and context, and needs no weights.

One process can hold hundreds of them. Each has a scheduler and a cache of its own; what they say, they share.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dynamo.base import errors
from dynamo.engine.mock import answers, embedder, engine, profile
from dynamo.engine.mock import settings as mock_settings
from dynamo.preprocess import tokenize
from dynamo.protocols import blocks
from dynamo.transfer.backends import local

TEXT = (
    " Once upon a time there was a little machine that told stories. Nobody had taught it to think,"
    " so it said the same words again and again, and they were always in the right order."
)
DEFAULT_CONTEXT = 32_768  # tokens, for a model that does not say


def build(
    directory: Path, settings: mock_settings.MockConfig, room: local.Room | None = None
) -> engine.MockEngine:
    """An engine that says TEXT in the model's tokens. Raises ConfigError."""
    return build_all(directory, replace(settings, num_workers=1), room)[0]


def build_all(
    directory: Path, settings: mock_settings.MockConfig, room: local.Room | None = None
) -> Sequence[engine.MockEngine]:
    """As many as --num-workers says. Raises ConfigError."""
    settings = mock_settings.with_extra(settings)
    tokenizer = tokenize.Tokenizer((directory / "tokenizer.json").read_bytes())
    (packed,) = tokenizer.encode_now([TEXT], add_special_tokens=False)
    cycle = answers.Cycle(blocks.unpack(packed) or [0])
    length, measured = _context_length(directory), _profile(settings.planner_profile_data)
    return [
        engine.MockEngine(settings, cycle=cycle, context_length=length, profile=measured, room=room)
        for _ in range(settings.num_workers)
    ]


def _profile(path: str | None) -> profile.Profile | None:
    if path is None:
        return None
    where = f"--planner-profile-data {path}"
    try:
        return profile.read(Path(path).read_bytes(), where)
    except OSError as error:
        raise errors.ConfigError(f"{where}: cannot be read: {error.strerror}") from error


def build_embedder(directory: Path, settings: mock_settings.MockConfig) -> embedder.MockEmbedder:
    """An embedder for texts as long as the model takes. Raises ConfigError."""
    return embedder.MockEmbedder(
        context_length=settings.max_model_len or _context_length(directory),
        dimensions=settings.embedding_dimensions,
    )


def _context_length(directory: Path) -> int:
    path = directory / "config.json"
    try:
        length = json.loads(path.read_text("utf-8")).get("max_position_embeddings")
    except (ValueError, AttributeError) as error:
        raise errors.ConfigError(f"{path}: expected a JSON object: {error}") from error
    return length if type(length) is int and length > 0 else DEFAULT_CONTEXT
