"""JSON files of a model directory that are read without torch: an encoder's config.json, and how texts are embedded.

An encoder is a BERT, RoBERTa or XLM-RoBERTa. RoBERTa is BERT with positions that are counted from the padding token's
id on, so two numbers make the difference. How hidden states become one vector for a text is in the files of
sentence-transformers:

    modules.json                 the steps: Transformer, Pooling, Normalize
    1_Pooling/config.json        which hidden states are pooled
    sentence_bert_config.json    how many tokens the model was trained for

Without these files the mean over all tokens is taken. Vectors are always normalised, as OpenAI's are; a model with
further steps (a Dense layer) is refused, because its vectors would be wrong.
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
    for step in read_json(model_path / _MODULES, list[_Step]) or ():
        name = step.type.rpartition(".")[2]
        if name not in _SUPPORTED_STEPS:
            raise errors.ConfigError(
                f"{model_path / _MODULES}: the step {step.type} is not supported; "
                f"supported are {', '.join(_SUPPORTED_STEPS)}"
            )
        if name == "Pooling":
            return _read_pooling_mode(model_path / step.path / _POOLING)
    return "mean"


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
