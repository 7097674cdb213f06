"""The models that vLLM serves in the tests: small, with random weights and the built-in model's tokenizer.

Most tests have a Qwen3; the others are of families whose layers do not all keep every KV block. Embeddings are untied
and weights wide, so that greedy answers wander: where one token repeats, equality of answers proves nothing.
"""

import shutil
from pathlib import Path

import torch
import transformers

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


_SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_SLIDING = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


def make_of_family(directory: Path, family: str) -> Path:
    """Write a model of gemma3, gpt_oss (sliding windows) or qwen3_next (linear attention) to the directory."""
    match family:
        case "gemma3":
            config = transformers.Gemma3TextConfig(**_SHAPE, **_SLIDING, query_pre_attn_scalar=32)
        case "gpt_oss":
            config = transformers.GptOssConfig(
                **_SHAPE, **_SLIDING, num_local_experts=4, num_experts_per_tok=2
            )
        case _:
            layers = ["linear_attention", "full_attention"] * 2
            config = transformers.Qwen3NextConfig(
                **_SHAPE, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=64,
                layer_types=layers, linear_num_key_heads=2, linear_num_value_heads=4,
            )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_source.built_in() / name, directory / name)
    return directory
