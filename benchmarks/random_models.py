"""Checkpoints with random weights in the shapes of known models, for measurements."""

from pathlib import Path
from typing import Any

QWEN3 = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.1b": QWEN3 | {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    },
    "qwen3-0.6b": QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "vocab_size": 151_936,
    },
    "qwen3-4b": QWEN3 | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}  # fmt: skip


def make(directory: Path, shape: str, device: str) -> None:
    """Write a checkpoint: in 32 bits for a CPU, in bfloat16 for a GPU, which draws the numbers."""
    import torch  # after the measured processes have been told how many threads to use
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], tie_word_embeddings=True)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    if device != "cpu":
        model.to(torch.bfloat16)
    model.save_pretrained(directory)
