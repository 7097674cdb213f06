"""Tiny checkpoints with random weights, as Hugging Face saves them; without a tokenizer.

Weights are drawn wide (`initializer_range` 0.3), so that greedy answers wander instead of repeating one token,
and everything that a family may have differs from its default: biases and norms are not zeros and ones.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}

ENCODER_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.3,
}
ENCODERS = {
    "bert": (transformers.BertConfig, transformers.BertModel),
    "roberta": (transformers.RobertaConfig, transformers.RobertaModel),
    "xlm-roberta": (transformers.XLMRobertaConfig, transformers.XLMRobertaModel),
}


def make_encoder(directory: Path, family: str, **overrides: Any) -> Path:
    """Write an encoder's checkpoint of the family to the directory."""
    make_config, make_model = ENCODERS[family]
    torch.manual_seed(0)
    _save(make_model(make_config(**ENCODER_SHAPE | overrides)), directory)
    return directory


CLASSIFIERS = {
    "bert": ("Bert", transformers.BertConfig),
    "roberta": ("Roberta", transformers.RobertaConfig),
    "xlm-roberta": ("XLMRoberta", transformers.XLMRobertaConfig),
    "modernbert": ("ModernBert", transformers.ModernBertConfig),
}
_CLASSIFIER_TASKS = {"sequence": "SequenceClassification", "token": "TokenClassification"}


def make_classifier(
    directory: Path, family: str, task: str, labels: Sequence[str], **overrides: Any
) -> Path:
    """Write a classifier with random weights; `task` is sequence or token."""
    name, make_config = CLASSIFIERS[family]
    fields = ENCODER_SHAPE | {"id2label": dict(enumerate(labels))}
    if family == "modernbert":
        fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        fields |= {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 32}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}For{_CLASSIFIER_TASKS[task]}")
    _save(model(make_config(**fields | overrides)), directory)
    return directory


def open_classifier(directory: Path, task: str) -> Any:
    """Return a classifier as transformers loads it, in the mode of inference."""
    model = getattr(transformers, f"AutoModelFor{_CLASSIFIER_TASKS[task]}")
    return model.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a checkpoint of the family to the directory; overrides go into its configuration."""
    make_config, make_model = FAMILIES[family]
    fields = SHAPE | overrides
    if family == "qwen2":
        del fields["head_dim"]
    if family == "qwen3_moe":
        fields = EXPERTS | fields
    torch.manual_seed(0)
    _save(make_model(make_config(**fields)).to(dtype), directory, max_shard_size=max_shard_size)
    return directory


def _save(model: Any, directory: Path, **options: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.lower().endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    model.save_pretrained(directory, **options)
