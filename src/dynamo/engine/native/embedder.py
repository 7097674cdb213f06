"""The native embedder: token ids in, unit vectors out.

    texts ── attention.PackedTexts ── Encoder, or a decoder's Body ── hidden states ── pooling ── unit vectors

`NativeEmbedder` is what the worker sees: its methods run on the event loop, and `TextEmbedding` computes in a thread of
its own. A decoder embeds as well as it was trained to: Qwen3-Embedding takes the last token, and a plain chat model
gives usable vectors by the mean over all tokens, but none that were trained for search.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.native import assemble, attention, config, model_files, models, runner, weights
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks, model_card

Network = Callable[[torch.Tensor, attention.PackedTexts], torch.Tensor]
Shape = config.ModelConfig | model_files.EncoderConfig
MAX_BATCHED_TOKENS = 8192
_CLASSIFIER_ENDINGS = ("Classification", "ForQuestionAnswering", "ForMultipleChoice")


class NativeEmbedder:
    """An `api.Embedder` that computes in a thread of its own."""

    def __init__(self, model_path: Path, settings: NativeConfig) -> None:
        self._model_path = model_path
        self._settings = settings
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedder")
        self._model: TextEmbedding | None = None

    async def start(self) -> api.EmbedderFacts:
        """Load the model in the thread that computes. Raises ConfigError or EngineFailed."""
        loop = asyncio.get_running_loop()
        try:
            self._model = await loop.run_in_executor(
                self._thread, TextEmbedding, self._model_path, self._settings
            )
        except errors.ConfigError:
            raise
        except Exception as error:
            raise _failure("the model could not be loaded", error) from error
        return self._model.facts

    async def embed(self, batch: Sequence[api.EmbedInput]) -> list[bytes]:
        """Compute the packed unit vector of each text. Raises EngineFailed."""
        assert self._model is not None, "the embedder is used before start() has returned"
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._model.embed, batch)
        except Exception as error:
            raise _failure(f"a batch of {len(batch)} texts failed", error) from error

    async def stop(self) -> None:
        """Return when the thread has ended."""
        await asyncio.to_thread(self._thread.shutdown)


def _failure(message: str, error: Exception) -> errors.EngineFailed:
    return errors.EngineFailed(f"{message}: {type(error).__name__}: {error}")


class _EmbeddingFields(msgspec.Struct, frozen=True):
    """Fields of config.json that say how a model embeds."""

    architectures: tuple[str, ...] | None = None
    use_bidirectional_attention: bool = False
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()


class _LoadedModel(NamedTuple):
    """A network with its weights, and its configuration."""

    network: Network
    shape: Shape
    is_causal: bool


class TextEmbedding:
    """The model and its weights; called by one thread at a time."""

    def __init__(self, model_path: Path, settings: NativeConfig) -> None:
        """Load the checkpoint. Raises ConfigError."""
        runner.check_device(settings.device)
        fields = (
            model_files.read_json(model_path / "config.json", _EmbeddingFields)
            or _EmbeddingFields()
        )
        _refuse_classifier(model_path, fields.architectures or ())
        load = _load_encoder if model_files.is_encoder(model_path) else _load_decoder
        self._network, shape, is_causal = load(model_path, settings)
        torch.set_num_threads(assemble.choose_threads(shape, settings))
        self._is_causal = is_causal and not fields.use_bidirectional_attention
        self._pooling = model_files.read_pooling(model_path)
        self._device = settings.device
        self.facts = api.EmbedderFacts(
            context_length=_context_length(model_path, shape, settings),
            max_num_batched_tokens=settings.max_num_batched_tokens or MAX_BATCHED_TOKENS,
            vectors=model_card.EmbeddingFacts(
                dimensions=shape.hidden_size,
                can_shorten=fields.is_matryoshka or bool(fields.matryoshka_dimensions),
                lengths=tuple(sorted(fields.matryoshka_dimensions)),
            ),
            vocab_size=shape.vocab_size,
        )

    def embed(self, batch: Sequence[api.EmbedInput]) -> list[bytes]:
        """Return the packed unit vector of each text, in the order of the batch."""
        order = sorted(range(len(batch)), key=lambda i: len(batch[i].token_ids))
        with torch.inference_mode():
            texts = [blocks.unpack(batch[i].token_ids) for i in order]
            token_ids = torch.tensor([t for text in texts for t in text], device=self._device)
            lengths = list(map(len, texts))
            rows = attention.PackedTexts(lengths, is_causal=self._is_causal, device=self._device)
            hidden = self._network(token_ids, rows).float()  # [tokens, hidden]
            vectors = F.normalize(_pool(hidden, rows, self._pooling), dim=-1).cpu()
            packed = {i: _pack(vectors[row], batch[i].dimensions) for row, i in enumerate(order)}
        return [packed[i] for i in range(len(batch))]


def _refuse_classifier(model_path: Path, architectures: Sequence[str]) -> None:
    """Raise ConfigError for a cross-encoder or another model that was trained for what its head says of a text."""
    name = architectures[0] if architectures else ""
    if name.endswith(_CLASSIFIER_ENDINGS) and not model_files.is_sentence_transformer(model_path):
        raise errors.ConfigError(
            f"{model_path / 'config.json'}: the architecture {name} is not supported, as its vectors alone mean "
            "nothing; expected a model for embeddings, by whose vectors scores and rankings are computed"
        )


def _load_encoder(model_path: Path, settings: NativeConfig) -> _LoadedModel:
    shape = model_files.read_encoder_config(model_path)
    with _open_checkpoint(model_path, shape, settings) as checkpoint:
        network = models.Encoder(shape, checkpoint)
    return _LoadedModel(
        lambda token_ids, texts: network.hidden(token_ids, texts.positions, texts), shape, False
    )


def _load_decoder(model_path: Path, settings: NativeConfig) -> _LoadedModel:
    shape = config.read(model_path)
    with _open_checkpoint(model_path, shape, settings) as checkpoint:
        checkpoint.add_prefix("model.")
        body = models.Body(shape, checkpoint)
        checkpoint.refuse_rest("lm_head.")
    dtype = runner.resolve_dtype(shape, settings.dtype, settings.device)
    cos, sin = shape.rope.tables(
        _context_length(model_path, shape, settings), dtype=dtype, device=settings.device
    )

    def network(token_ids: torch.Tensor, texts: attention.PackedTexts) -> torch.Tensor:
        token_cos, token_sin = cos[texts.positions], sin[texts.positions]
        return body.norm(body.hidden(token_ids, token_cos, token_sin, texts))

    return _LoadedModel(network, shape, shape.is_causal)


def _open_checkpoint(model_path: Path, shape: Shape, settings: NativeConfig) -> weights.Checkpoint:
    dtype = runner.resolve_dtype(shape, settings.dtype, settings.device)
    return weights.Checkpoint(model_path, dtype=dtype, device=settings.device)


def _context_length(model_path: Path, shape: Shape, settings: NativeConfig) -> int:
    """Return the tokens that a text may have: those of the settings, else of the training. Raises ConfigError."""
    max_tokens = model_files.read_max_tokens(model_path) or shape.max_context
    context_length = settings.max_model_len or min(max_tokens, shape.max_context)
    if not 1 <= context_length <= shape.max_context:
        raise errors.ConfigError(
            f"--max-model-len: expected 1 to {shape.max_context}, the model's positions, got {context_length}"
        )
    return context_length


def _pool(
    hidden: torch.Tensor, texts: attention.PackedTexts, pooling: model_files.Pooling
) -> torch.Tensor:
    """Reduce [tokens, hidden] to [texts, hidden]."""
    if pooling == "cls":
        return hidden.index_select(0, texts.first_rows)
    if pooling == "last":
        return hidden.index_select(0, texts.last_rows)
    sums = torch.zeros(len(texts.lengths), hidden.shape[1], device=hidden.device)
    return sums.index_add_(0, texts.text_of_token, hidden) / texts.lengths.unsqueeze(1)


def _pack(vector: torch.Tensor, dimensions: int | None) -> bytes:
    if dimensions is not None:
        vector = F.normalize(vector[:dimensions], dim=0)
    packed: bytes = vector.numpy().astype("<f4").tobytes()
    return packed
