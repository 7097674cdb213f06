"""What an encoder's `config.json` says (BERT, RoBERTa, XLM-RoBERTa), and whether this engine can run it.

RoBERTa is BERT whose positions are counted from the padding token's id on; so two numbers make the difference.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from dynamo.base import errors
from dynamo.engine.native import model_files

FAMILIES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta."}  # and their prefix
Count = Annotated[int, msgspec.Meta(ge=1)]


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """Of config.json, with the library's own defaults where a file leaves something out."""

    model_type: str = ""
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    max_position_embeddings: Count
    type_vocab_size: Count = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = None
    hidden_act: str = "gelu"
    position_embedding_type: str | None = None
    is_decoder: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of an encoder."""

    prefix: str  # of its tensors' names
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    first_position: int
    num_types: int
    norm_eps: float
    dtype: str

    @property
    def max_context(self) -> int:
        """Tokens of one text."""
        return self.num_positions - self.first_position


class _Kind(msgspec.Struct, frozen=True):
    model_type: str = ""


def is_encoder(model_path: Path) -> bool:
    """Is it of a family that is read here? Raises ConfigError."""
    kind = model_files.read(model_path / "config.json", _Kind)
    return kind is not None and kind.model_type in FAMILIES


def read(model_path: Path) -> EncoderConfig:
    """Raises ConfigError."""
    path = model_path / "config.json"
    fields = model_files.read(path, _Fields)
    assert fields is not None  # `is_encoder` has read it
    _check(path, fields)
    is_bert = fields.model_type == "bert"
    pad = fields.pad_token_id if fields.pad_token_id is not None else 1
    return EncoderConfig(
        prefix=FAMILIES[fields.model_type],
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=fields.num_attention_heads,
        num_positions=fields.max_position_embeddings,
        first_position=0 if is_bert else pad + 1,
        num_types=fields.type_vocab_size,
        norm_eps=fields.layer_norm_eps,
        dtype=fields.dtype or fields.torch_dtype or "float32",
    )


def _check(path: Path, fields: _Fields) -> None:
    refusals = {
        f"the activation {fields.hidden_act}": fields.hidden_act != "gelu",
        f"position_embedding_type {fields.position_embedding_type}": fields.position_embedding_type
        not in (None, "absolute"),
        "is_decoder": fields.is_decoder,
        f"hidden_size {fields.hidden_size}, no multiple of num_attention_heads,": bool(
            fields.hidden_size % fields.num_attention_heads
        ),
    }
    for what, is_present in refusals.items():
        if is_present:
            raise errors.ConfigError(f"{path}: {what} is not supported in an encoder")
