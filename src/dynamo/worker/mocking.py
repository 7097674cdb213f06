"""The simulated engine for a model directory: it borrows the model's tokenizer and context, and needs no weights."""

import json
from pathlib import Path

from dynamo.base import errors
from dynamo.engine.mock import embedder, engine
from dynamo.preprocess import tokenize
from dynamo.protocols import blocks

TEXT = (
    " Once upon a time there was a little machine that told stories. Nobody had taught it to think,"
    " so it said the same words again and again, and they were always in the right order."
)
DEFAULT_CONTEXT = 32_768  # tokens, for a model that does not say


def build(directory: Path, settings: engine.MockConfig) -> engine.MockEngine:
    """An engine that says TEXT in the model's tokens. Raises ConfigError."""
    tokenizer = tokenize.Tokenizer((directory / "tokenizer.json").read_bytes())
    (packed,) = tokenizer.encode_now([TEXT], add_special_tokens=False)
    token_ids = blocks.unpack(packed)
    return engine.MockEngine(
        settings, token_ids=token_ids or [0], context_length=_context_length(directory)
    )


def build_embedder(directory: Path, settings: engine.MockConfig) -> embedder.MockEmbedder:
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
