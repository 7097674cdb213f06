"""The model that vLLM serves in the tests: a small Qwen3 with random weights and the built-in model's tokenizer.

Its embeddings are untied and its weights wide, so that greedy answers wander: where one token repeats, equality of
answers proves nothing.
"""

import shutil
from pathlib import Path

from checkpoints import make_checkpoint
from dynamo.worker import model_source


def make(directory: Path, *, context_length: int = 2048) -> Path:
    """Write it to the directory."""
    make_checkpoint(
        directory,
        "qwen3",
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        max_position_embeddings=context_length,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_source.built_in() / name, directory / name)
    return directory
