"""Files of an encoder classifier, read without torch: config.json, and where a LoRA adapter and its encoder are.

A directory has either a whole classifier or an adapter in PEFT's layout (`adapter_config.json`). The encoder below an
adapter is in the directory of its `base_model_name_or_path`, or in the same directory.

A setting that would change the computation and is not supported is refused, never ignored.
"""

from pathlib import Path
from typing import Literal

import msgspec

from dynamo.base import errors
from dynamo.engine.native import model_files

TaskKind = Literal["sequence", "token"]
ADAPTER_CONFIG = "adapter_config.json"
_BERT_FAMILIES = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "xlm-roberta"}
_FAMILIES = {**_BERT_FAMILIES, "ModernBert": "modernbert"}
_TASKS: dict[str, TaskKind] = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
}
_PEFT_TASKS: dict[str, TaskKind] = {"SEQ_CLS": "sequence", "TOKEN_CLS": "token"}
SUPPORTED = "sequence and token classifiers of BERT, RoBERTa, XLM-RoBERTa and ModernBERT"


class ModernBertConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a ModernBERT: fields of config.json, with the defaults of Hugging Face Transformers."""

    vocab_size: model_files.Count = 50368
    hidden_size: model_files.Count = 768
    intermediate_size: model_files.Count = 1152
    num_layers: model_files.Count = msgspec.field(name="num_hidden_layers", default=22)
    num_heads: model_files.Count = msgspec.field(name="num_attention_heads", default=12)
    num_positions: model_files.Count = msgspec.field(name="max_position_embeddings", default=8192)
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_activation: str = "gelu"
    hidden_activation: str = "gelu"
    local_attention: model_files.Count = 128
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    global_attn_every_n_layers: model_files.Count = 3
    rope_parameters: dict[str, dict[str, object]] | None = None
    rope_scaling: dict[str, object] | None = None
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    stored_dtype: str | None = msgspec.field(name="dtype", default=None)
    torch_dtype: str | None = None

    @property
    def dtype(self) -> str:
        """Return the type of the stored weights."""
        return self.stored_dtype or self.torch_dtype or "float32"

    @property
    def max_context(self) -> int:
        """Return the number of tokens that one text may have."""
        return self.num_positions

    def is_local(self, layer: int) -> bool:
        """Return whether the tokens of a layer attend to their neighbours only."""
        if self.layer_types:
            return self.layer_types[layer] == "sliding_attention"
        return layer % self.global_attn_every_n_layers != 0

    def rope_theta(self, *, is_local: bool) -> float:
        """Return the base of the rotary embedding's frequencies."""
        name = "sliding_attention" if is_local else "full_attention"
        value = (self.rope_parameters or {}).get(name, {}).get("rope_theta")
        if isinstance(value, int | float):
            return float(value)
        return self.local_rope_theta if is_local else self.global_rope_theta


EncoderShape = model_files.EncoderConfig | ModernBertConfig


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of PEFT's adapter_config.json that change the computation."""

    peft_type: str = ""
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    rank: model_files.Count = msgspec.field(name="r", default=8)
    alpha: float = msgspec.field(name="lora_alpha", default=8)
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}

    @property
    def scale(self) -> float:
        """Return the factor of the product of both matrices."""
        return float(self.alpha / (self.rank**0.5 if self.use_rslora else self.rank))


class _ClassifierFields(msgspec.Struct, frozen=True, kw_only=True):
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    problem_type: str | None = None


class ClassifierFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A classifier in its directory."""

    path: Path  # what the user named
    base: Path  # where the encoder's weights and tokenizer are
    task: TaskKind
    shape: EncoderShape
    adapter: AdapterConfig | None = None

    @property
    def is_modern(self) -> bool:
        """Return whether the encoder is a ModernBERT."""
        return isinstance(self.shape, ModernBertConfig)


def read_classifier(path: Path) -> ClassifierFiles:
    """Read the files of a classifier. Raises ConfigError for one that is not supported."""
    adapter = model_files.read_json(path / ADAPTER_CONFIG, AdapterConfig)
    base = path if adapter is None else find_base(path, adapter)
    fields = model_files.read_json(base / "config.json", _ClassifierFields)
    if fields is None:
        raise errors.ConfigError(f"{base / 'config.json'} does not exist; expected {SUPPORTED}")
    if adapter is not None:
        check_adapter(path, adapter)
    task = _find_task(path, fields, adapter)
    if fields.problem_type == "multi_label_classification":
        raise errors.ConfigError(
            f"{base}: problem_type {fields.problem_type} is not supported; expected one label for each text"
        )
    is_modern = fields.model_type == "modernbert"
    shape = read_modernbert(base) if is_modern else _read_bert(base, fields.model_type)
    return ClassifierFiles(
        path=path,
        base=base,
        task=task,
        shape=shape,
        adapter=adapter,
    )


def find_base(path: Path, adapter: AdapterConfig) -> Path:
    """Return the directory of the encoder that an adapter changes. Raises ConfigError."""
    if (path / "config.json").is_file():
        return path
    name = adapter.base_model_name_or_path or ""
    for candidate in (path / name, Path(name).expanduser()) if name else ():
        if (candidate / "config.json").is_file():
            return candidate
    raise errors.ConfigError(
        f"{path / ADAPTER_CONFIG}: base_model_name_or_path: expected the directory of the encoder, got {name!r}"
    )


def check_adapter(path: Path, adapter: AdapterConfig) -> None:
    """Raise ConfigError for an adapter that is no plain LoRA."""
    unsupported = {
        f"peft_type {adapter.peft_type or 'of no name'}": adapter.peft_type != "LORA",
        "use_dora": adapter.use_dora,
        "fan_in_fan_out": adapter.fan_in_fan_out,
        f"bias {adapter.bias}": adapter.bias != "none",
        "rank_pattern": bool(adapter.rank_pattern),
        "alpha_pattern": bool(adapter.alpha_pattern),
    }
    for feature, is_present in unsupported.items():
        if is_present:
            raise errors.ConfigError(
                f"{path / ADAPTER_CONFIG}: {feature} is not supported; expected a plain LoRA"
            )


def _find_task(path: Path, fields: _ClassifierFields, adapter: AdapterConfig | None) -> TaskKind:
    if adapter is not None and adapter.task_type in _PEFT_TASKS:
        if fields.model_type in _FAMILIES.values():
            return _PEFT_TASKS[adapter.task_type]
        raise errors.ConfigError(
            f"{path}: the model type {fields.model_type} is not supported; expected {SUPPORTED}"
        )
    name = fields.architectures[0] if fields.architectures else f"model_type {fields.model_type}"
    for ending, task in _TASKS.items():
        if _FAMILIES.get(name.removesuffix(ending), "") == fields.model_type != "":
            return task
    raise errors.ConfigError(
        f"{path}: the architecture {name} is not supported; expected {SUPPORTED}"
    )


def _read_bert(base: Path, model_type: str) -> model_files.EncoderConfig:
    if not model_files.is_encoder(base):
        raise errors.ConfigError(
            f"{base}: the model type {model_type} is not supported; expected {SUPPORTED}"
        )
    return model_files.read_encoder_config(base)


def read_modernbert(base: Path) -> ModernBertConfig:
    """Read the configuration of a ModernBERT. Raises ConfigError."""
    path = base / "config.json"
    config = model_files.read_json(path, ModernBertConfig)
    assert config is not None  # its model type was read from it
    ropes = [config.rope_scaling or {}, *(config.rope_parameters or {}).values()]
    scalings = {str(rope.get("rope_type", rope.get("type", "default"))) for rope in ropes}
    unsupported = {
        f"the activation {config.hidden_activation}": config.hidden_activation != "gelu",
        f"the activation {config.classifier_activation}": config.classifier_activation != "gelu",
        f"the RoPE scaling {', '.join(sorted(scalings - {'default'}))}": scalings != {"default"},
        f"hidden_size {config.hidden_size}, no even multiple of num_attention_heads,": bool(
            config.hidden_size % (2 * config.num_heads)
        ),
        f"layer_types of {len(config.layer_types)} layers": bool(config.layer_types)
        and len(config.layer_types) != config.num_layers,
    }
    for feature, is_present in unsupported.items():
        if is_present:
            raise errors.ConfigError(f"{path}: {feature} is not supported in an encoder")
    return config
