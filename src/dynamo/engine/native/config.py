"""The configuration of a decoder from its `config.json`, refused if this engine cannot run it.

One decoder serves four families; where they differ is a field here, so no other module tests a family by name.
Settings that would change the computation and are not supported are refused, never ignored: a model that answers
wrongly is worse than one that does not start.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.base import errors
from dynamo.engine.native import quantization, rope

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
# Without an output layer: models that only embed.
BODIES = {
    "LlamaModel": "llama",
    "Qwen2Model": "qwen2",
    "Qwen3Model": "qwen3",
    "Qwen3MoeModel": "qwen3_moe",
}
ACTIVATIONS = ("silu", "swish")
SUPPORTED = (
    f"supported are {', '.join(FAMILIES)} checkpoints in safetensors, plain or {quantization.SUPPORTED}, "
    f"with full attention, the activation silu, and the RoPE scalings {', '.join(rope.SCALINGS)}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: the MLPs of a layer, of which each token takes a few."""

    number: int
    num_chosen: int  # by each token
    intermediate_size: int  # of one expert
    is_normalized: bool  # the weights of the chosen ones add up to 1
    dense_layers: frozenset[int]  # with one MLP instead


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder, and what loading and serving need besides."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_context: int  # tokens
    rope: rope.Rope
    is_tied: bool  # the output layer is the embedding
    has_qkv_bias: bool
    has_output_bias: bool  # of attention
    has_mlp_bias: bool
    has_qk_norm: bool
    experts: ExpertsConfig | None = None
    dtype: str  # of the stored weights
    is_causal: bool = True  # else tokens attend to those after them, too, and the model only embeds
    gptq_zero_offset: int = 0  # to add to the zero points of quantized weights


def read(model_path: Path) -> ModelConfig:
    """Read the configuration of a checkpoint in a Hugging Face directory. Raises ConfigError."""
    path = model_path / "config.json"
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise errors.ConfigError(
            f"{path} does not exist; expected a Hugging Face model directory"
        ) from error
    except (OSError, ValueError) as error:
        raise errors.ConfigError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise errors.ConfigError(f"{path} holds {type(fields).__name__}; expected a JSON object")
    try:
        return parse(fields)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{path}: {error}") from error


def parse(fields: dict[str, Any]) -> ModelConfig:
    """Build the configuration from the fields of a `config.json`. Raises ConfigError."""
    family = _family(fields)
    _refuse_unsupported(fields, family)
    hidden_size, num_heads = _count(fields, "hidden_size"), _count(fields, "num_attention_heads")
    head_dim = _count(fields, "head_dim", hidden_size // num_heads)
    trained_context = _count(fields, "max_position_embeddings")
    rotary = rope.parse(fields, head_dim=head_dim, max_context=trained_context)
    has_bias = bool(fields.get("attention_bias", False))
    config = ModelConfig(
        family=family,
        vocab_size=_count(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(fields, "intermediate_size"),
        num_layers=_count(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_count(fields, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        max_context=max(trained_context, rotary.max_context),
        rope=rotary,
        is_tied=bool(fields.get("tie_word_embeddings", False)),
        has_qkv_bias=has_bias or family == "qwen2",
        has_output_bias=has_bias and family != "qwen2",
        has_mlp_bias=bool(fields.get("mlp_bias", False)) and family == "llama",
        has_qk_norm=family in ("qwen3", "qwen3_moe"),
        experts=_experts(fields) if family == "qwen3_moe" else None,
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        is_causal=fields.get("is_causal") is not False,
        gptq_zero_offset=quantization.gptq_zero_offset(fields.get("quantization_config") or {}),
    )
    if config.num_heads % config.num_kv_heads:
        raise errors.ConfigError(
            f"num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise errors.ConfigError(f"head_dim must be even, not {config.head_dim}")
    return config


def _family(fields: dict[str, Any]) -> str:
    names = fields.get("architectures") or [f"model_type {fields.get('model_type')}"]
    family = (FAMILIES | BODIES).get(names[0]) or (
        fields.get("model_type") if "architectures" not in fields else None
    )
    if family not in FAMILIES.values():
        raise errors.ConfigError(f"the architecture {names[0]} is not supported; {SUPPORTED}")
    return str(family)


def _experts(fields: dict[str, Any]) -> ExpertsConfig:
    num_layers, step = _count(fields, "num_hidden_layers"), _count(fields, "decoder_sparse_step", 1)
    dense_layers = {i for i in range(num_layers) if (i + 1) % step}
    number = _count(fields, "num_experts", fields.get("num_local_experts"))
    num_chosen = _count(fields, "num_experts_per_tok")
    if num_chosen > number:
        raise errors.ConfigError(f"num_experts_per_tok {num_chosen} is more than {number} experts")
    return ExpertsConfig(
        number=number,
        num_chosen=num_chosen,
        intermediate_size=_count(fields, "moe_intermediate_size"),
        is_normalized=bool(fields.get("norm_topk_prob", False)),
        dense_layers=frozenset(dense_layers.union(fields.get("mlp_only_layers") or ())),
    )


def _refuse_unsupported(fields: dict[str, Any], family: str) -> None:
    unsupported = {
        "a mixture of experts (num_experts)": family != "qwen3_moe"
        and bool(fields.get("num_experts") or fields.get("num_local_experts")),
        "sliding-window attention": _has_sliding_window(fields, family),
        f"the activation {fields.get('hidden_act')}": fields.get("hidden_act", "silu")
        not in ACTIVATIONS,
    }
    quantized = fields.get("quantization_config") or {}
    for feature in (
        *(feature for feature, is_present in unsupported.items() if is_present),
        *quantization.unsupported_features(quantized),
    ):
        raise errors.ConfigError(f"{feature} is not supported; {SUPPORTED}")


def _has_sliding_window(fields: dict[str, Any], family: str) -> bool:
    if family == "qwen3_moe":  # in all of its layers, whatever the other fields say
        return bool(fields.get("use_sliding_window") and fields.get("sliding_window", True))
    kinds = fields.get("layer_types")
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    if not fields.get("use_sliding_window", False):
        return False
    first = fields.get("max_window_layers", 0)
    return bool(fields.get("sliding_window")) and first < fields.get("num_hidden_layers", 0)


def _count(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise errors.ConfigError(f"{name} must be a positive integer, not {value!r}")
    return value
