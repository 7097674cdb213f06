"""The compute half of the native embedder: token ids in, unit vectors out.

    texts ── whole_texts.Batch ── Encoder, or a decoder's Body ── hidden states ── pooling ── unit vectors

A decoder embeds as well as it was trained to: Qwen3-Embedding takes the last token, and a plain chat model gives
usable vectors by the mean over all tokens, but none that were trained for search.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.native import (
    assemble,
    config,
    encoder_config,
    model_files,
    runner,
    sentence,
    weights,
    whole_texts,
)
from dynamo.engine.native.models import decoder, encoder
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks, model_card

Network = Callable[[torch.Tensor, whole_texts.Batch], torch.Tensor]
Shape = config.ModelConfig | encoder_config.EncoderConfig
MAX_BATCHED_TOKENS = 8192


class _Traits(msgspec.Struct, frozen=True):
    """Of config.json, what only embedding models have."""

    is_causal: bool = True
    use_bidirectional_attention: bool = False
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()


class _Model(NamedTuple):
    """A network with its weights, and what its configuration says."""

    network: Network
    shape: Shape
    is_causal: bool


class TextEmbedding:
    """Owns the weights. One thread at a time calls it."""

    def __init__(self, model_path: Path, settings: NativeConfig) -> None:
        """Loads the checkpoint. Raises ConfigError."""
        runner.check_device(settings.device)
        traits = model_files.read(model_path / "config.json", _Traits) or _Traits()
        make = _encoder if encoder_config.is_encoder(model_path) else _decoder
        self._network, shape, is_causal = make(model_path, settings)
        torch.set_num_threads(assemble.choose_threads(shape, settings))
        self._is_causal = is_causal and traits.is_causal and not traits.use_bidirectional_attention
        self._pooling = sentence.pooling(model_path)
        self._device = settings.device
        self.facts = api.EmbedderFacts(
            context_length=_context(model_path, shape, settings),
            max_num_batched_tokens=settings.max_num_batched_tokens or MAX_BATCHED_TOKENS,
            vectors=model_card.EmbeddingFacts(
                dimensions=shape.hidden_size,
                can_shorten=traits.is_matryoshka or bool(traits.matryoshka_dimensions),
                lengths=tuple(sorted(traits.matryoshka_dimensions)),
            ),
            vocab_size=shape.vocab_size,
        )

    def embed(self, batch: Sequence[api.EmbedInput]) -> list[bytes]:
        """The unit vector of each, packed."""
        order = sorted(range(len(batch)), key=lambda i: len(batch[i].token_ids))
        with torch.inference_mode():
            vectors = self._vectors([blocks.unpack(batch[i].token_ids) for i in order])
            packed = {i: _pack(vectors[row], batch[i].dimensions) for row, i in enumerate(order)}
        return [packed[i] for i in range(len(batch))]

    def _vectors(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """[texts, hidden] in 32 bits; texts in order of length."""
        flat = [token for text in texts for token in text]
        batch = whole_texts.Batch(
            list(map(len, texts)), is_causal=self._is_causal, device=self._device
        )
        hidden = self._network(torch.tensor(flat, device=self._device), batch)
        return F.normalize(_pool(hidden.float(), batch, self._pooling), dim=-1).cpu()


def _encoder(model_path: Path, settings: NativeConfig) -> _Model:
    shape = encoder_config.read(model_path)
    with _checkpoint(model_path, shape, settings) as checkpoint:
        network = encoder.Encoder(shape, checkpoint)
    return _Model(
        lambda token_ids, batch: network.hidden(token_ids, batch.positions, batch), shape, False
    )


def _decoder(model_path: Path, settings: NativeConfig) -> _Model:
    shape = config.read(model_path)
    with _checkpoint(model_path, shape, settings) as checkpoint:
        checkpoint.call_by("model.")
        body = decoder.Body(shape, checkpoint)
        checkpoint.refuse_rest("lm_head.")
    dtype = runner.resolve_dtype(shape, settings.dtype, settings.device)
    cos, sin = shape.rope.tables(
        _context(model_path, shape, settings), dtype=dtype, device=settings.device
    )

    def network(token_ids: torch.Tensor, batch: whole_texts.Batch) -> torch.Tensor:
        turn_cos, turn_sin = cos[batch.positions], sin[batch.positions]
        return body.norm(body.hidden(token_ids, turn_cos, turn_sin, batch))

    return _Model(network, shape, True)


def _checkpoint(model_path: Path, shape: Shape, settings: NativeConfig) -> weights.Checkpoint:
    dtype = runner.resolve_dtype(shape, settings.dtype, settings.device)
    return weights.Checkpoint(model_path, dtype=dtype, device=settings.device)


def _context(model_path: Path, shape: Shape, settings: NativeConfig) -> int:
    """Tokens of one text: what was asked for, else what the model was trained for. Raises ConfigError."""
    trained = min(sentence.max_tokens(model_path) or shape.max_context, shape.max_context)
    wanted = settings.max_model_len or trained
    if not 1 <= wanted <= shape.max_context:
        raise errors.ConfigError(
            f"--max-model-len: expected 1 to {shape.max_context}, the model's positions, got {wanted}"
        )
    return wanted


def _pool(hidden: torch.Tensor, batch: whole_texts.Batch, how: sentence.Pooling) -> torch.Tensor:
    """[tokens, hidden] to [texts, hidden]."""
    if how == "cls":
        return hidden.index_select(0, batch.first_rows)
    if how == "last":
        return hidden.index_select(0, batch.last_rows)
    sums = torch.zeros(len(batch.lengths), hidden.shape[1], device=hidden.device)
    return sums.index_add_(0, batch.owners, hidden) / batch.lengths.unsqueeze(1)


def _pack(vector: torch.Tensor, dimensions: int | None) -> bytes:
    if dimensions is not None:
        vector = F.normalize(vector[:dimensions], dim=0)
    packed: bytes = vector.numpy().astype("<f4").tobytes()
    return packed
