"""The simulated engine for a model directory: it uses the model's tokenizer and context length, and needs no weights.

One process can hold hundreds of them. Each has its own scheduler and cache; the text of their answers is shared.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dynamo.base import errors
from dynamo.engine.mock import answers, engine, timing
from dynamo.engine.mock import settings as mock_settings
from dynamo.preprocess import tokenize
from dynamo.protocols import blocks
from dynamo.transfer.backends import local

TEXT = (
    " Once upon a time there was a little machine that told stories. Nobody had taught it to think,"
    " so it said the same words again and again, and they were always in the right order."
)
DEFAULT_CONTEXT = 32_768  # tokens, for a model configuration without a length


def build(
    directory: Path, settings: mock_settings.MockConfig, room: local.Room | None = None
) -> engine.MockEngine:
    """Build an engine that answers TEXT in the model's tokens. Raises ConfigError."""
    return build_all(directory, replace(settings, num_workers=1), room)[0]


def build_all(
    directory: Path, settings: mock_settings.MockConfig, room: local.Room | None = None
) -> Sequence[engine.MockEngine]:
    """Build as many engines as --num-workers says. Raises ConfigError."""
    settings = mock_settings.merge_extra_args(settings)
    tokenizer = tokenize.Tokenizer((directory / "tokenizer.json").read_bytes())
    (packed,) = tokenizer.encode_now([TEXT], add_special_tokens=False)
    cycle = answers.TokenCycle(blocks.unpack(packed) or [0])
    length, timings = _context_length(directory), _profile(settings.planner_profile_data)
    return [
        engine.MockEngine(settings, cycle=cycle, context_length=length, profile=timings, room=room)
        for _ in range(settings.num_workers)
    ]


def _profile(path: str | None) -> timing.Profile | None:
    if path is None:
        return None
    source = f"--planner-profile-data {path}"
    try:
        return timing.read_profile(Path(path).read_bytes(), source)
    except OSError as error:
        raise errors.ConfigError(f"{source}: cannot be read: {error.strerror}") from error


def build_embedder(directory: Path, settings: mock_settings.MockConfig) -> engine.MockEmbedder:
    """Build an embedder for inputs up to the model's context length. Raises ConfigError."""
    return engine.MockEmbedder(
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
