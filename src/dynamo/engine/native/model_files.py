"""JSON files of an encoder's directory, read without torch: its config.json, how texts are embedded, its classifier.

An encoder is a BERT, RoBERTa or XLM-RoBERTa. RoBERTa is BERT with positions that are counted from the padding token's
id on, so two numbers make the difference. How hidden states become one vector for a text is in the files of
sentence-transformers:

    modules.json                 the steps: Transformer, Pooling, Normalize
    1_Pooling/config.json        which hidden states are pooled
    sentence_bert_config.json    how many tokens the model was trained for

Without these files the mean over all tokens is taken. Vectors are always normalised, as OpenAI's are; a model with
further steps (a Dense layer) is refused, because its vectors would be wrong.

A directory of a classifier has either a whole classifier or an adapter in PEFT's layout (`adapter_config.json`). The
encoder below an adapter is in the directory of its `base_model_name_or_path`, or in the same directory.

A setting that would change the computation and is not supported is refused, never ignored.
"""

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from dynamo.base import errors

_FAMILY_PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta."}
Count = Annotated[int, msgspec.Meta(ge=1)]
Pooling = Literal["mean", "cls", "last"]
_MODULES, _POOLING, _LIMITS = "modules.json", "config.json", "sentence_bert_config.json"
_POOLING_MODES: dict[object, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",  # newer versions write one field, pooling_mode, instead of one field per mode
    "cls": "cls",
    "lasttoken": "last",
}
_SUPPORTED_STEPS = ("Transformer", "Pooling", "Normalize")
T = TypeVar("T")


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of an encoder: fields of config.json, with the defaults of Hugging Face Transformers."""

    model_type: str = ""
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_layers: Count = msgspec.field(name="num_hidden_layers")
    num_heads: Count = msgspec.field(name="num_attention_heads")
    num_positions: Count = msgspec.field(name="max_position_embeddings")
    num_types: Count = msgspec.field(name="type_vocab_size", default=2)
    norm_eps: float = msgspec.field(name="layer_norm_eps", default=1e-12)
    pad_token_id: int | None = None
    hidden_act: str = "gelu"
    position_embedding_type: str | None = None
    is_decoder: bool = False
    stored_dtype: str | None = msgspec.field(name="dtype", default=None)
    torch_dtype: str | None = None

    @property
    def prefix(self) -> str:
        """Return the prefix of its tensors' names."""
        return _FAMILY_PREFIXES[self.model_type]

    @property
    def first_position(self) -> int:
        """Return the position of a text's first token."""
        if self.model_type == "bert":
            return 0
        return 2 if self.pad_token_id is None else self.pad_token_id + 1

    @property
    def dtype(self) -> str:
        """Return the type of the stored weights."""
        return self.stored_dtype or self.torch_dtype or "float32"

    @property
    def max_context(self) -> int:
        """Return the number of tokens that one text may have."""
        return self.num_positions - self.first_position


class _ModelType(msgspec.Struct, frozen=True):
    model_type: str = ""


class _Step(msgspec.Struct, frozen=True):
    type: str
    path: str = ""


class _Limits(msgspec.Struct, frozen=True):
    max_seq_length: int | None = None


def read_json(path: Path, kind: type[T]) -> T | None:
    """Decode a JSON file; fields beyond `kind` are ignored. Returns None if there is no such file.

    Raises ConfigError, which names the file and the field.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"{path}: {error}") from error


def is_encoder(model_path: Path) -> bool:
    """Return whether the model is of a supported encoder family. Raises ConfigError."""
    fields = read_json(model_path / "config.json", _ModelType)
    return fields is not None and fields.model_type in _FAMILY_PREFIXES


def read_encoder_config(model_path: Path) -> EncoderConfig:
    """Read the configuration of a model for which `is_encoder` is true. Raises ConfigError."""
    path = model_path / "config.json"
    config = read_json(path, EncoderConfig)
    assert config is not None  # `is_encoder` has read it
    unsupported = {
        f"the activation {config.hidden_act}": config.hidden_act != "gelu",
        f"position_embedding_type {config.position_embedding_type}": config.position_embedding_type
        not in (None, "absolute"),
        "is_decoder": config.is_decoder,
        f"hidden_size {config.hidden_size}, no multiple of num_attention_heads,": bool(
            config.hidden_size % config.num_heads
        ),
    }
    for feature, is_present in unsupported.items():
        if is_present:
            raise errors.ConfigError(f"{path}: {feature} is not supported in an encoder")
    return config


def is_sentence_transformer(model_path: Path) -> bool:
    """Return whether the directory describes a model for embeddings."""
    return (model_path / _MODULES).is_file()


def read_pooling(model_path: Path) -> Pooling:
    """Return which hidden states make the vector of a text. Raises ConfigError."""
    pooling: Pooling = "mean"
    for step in read_json(model_path / _MODULES, list[_Step]) or ():
        name = step.type.rpartition(".")[2]
        if name not in _SUPPORTED_STEPS:
            raise errors.ConfigError(
                f"{model_path / _MODULES}: the step {step.type} is not supported; "
                f"supported are {', '.join(_SUPPORTED_STEPS)}"
            )
        if name == "Pooling":
            pooling = _read_pooling_mode(model_path / step.path / _POOLING)
    return pooling


def read_max_tokens(model_path: Path) -> int | None:
    """Return the number of tokens per text that the model was trained for, if its files say so. Raises ConfigError."""
    limits = read_json(model_path / _LIMITS, _Limits)
    return limits.max_seq_length if limits else None


def _read_pooling_mode(path: Path) -> Pooling:
    fields = read_json(path, dict[str, object]) or {}
    if "pooling_mode" in fields:
        modes = [fields["pooling_mode"]]
    else:
        modes = [
            name for name, value in fields.items() if name.startswith("pooling_mode_") and value
        ]
    if len(modes) != 1 or modes[0] not in _POOLING_MODES:
        raise errors.ConfigError(
            f"{path}: the pooling {' and '.join(map(str, modes)) or 'none'} is not supported; "
            f"expected one of {', '.join(map(str, _POOLING_MODES))}"
        )
    return _POOLING_MODES[modes[0]]


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

    vocab_size: Count = 50368
    hidden_size: Count = 768
    intermediate_size: Count = 1152
    num_layers: Count = msgspec.field(name="num_hidden_layers", default=22)
    num_heads: Count = msgspec.field(name="num_attention_heads", default=12)
    num_positions: Count = msgspec.field(name="max_position_embeddings", default=8192)
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_activation: str = "gelu"
    hidden_activation: str = "gelu"
    local_attention: Count = 128
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    global_attn_every_n_layers: Count = 3
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


EncoderShape = EncoderConfig | ModernBertConfig


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of PEFT's adapter_config.json that change the computation."""

    peft_type: str = ""
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    rank: Count = msgspec.field(name="r", default=8)
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
    """The files of a classifier, as its directory has them: an encoder, and perhaps an adapter over another one."""

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
    adapter = read_json(path / ADAPTER_CONFIG, AdapterConfig)
    base = path if adapter is None else find_base(path, adapter)
    fields = read_json(base / "config.json", _ClassifierFields)
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
    return ClassifierFiles(path=path, base=base, task=task, shape=shape, adapter=adapter)


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


def _read_bert(base: Path, model_type: str) -> EncoderConfig:
    if not is_encoder(base):
        raise errors.ConfigError(
            f"{base}: the model type {model_type} is not supported; expected {SUPPORTED}"
        )
    return read_encoder_config(base)


def read_modernbert(base: Path) -> ModernBertConfig:
    """Read the configuration of a ModernBERT. Raises ConfigError."""
    path = base / "config.json"
    config = read_json(path, ModernBertConfig)
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
