"""Encoder classifiers: token ids in, probabilities of labels out; one forward pass for a batch of windows.

A sequence classifier gives one row of probabilities for a window, a token classifier one for each token of it. The
network is our own, as that of the embedder: the encoder of BERT and RoBERTa (`models`) or ModernBERT, with the heads
that Hugging Face Transformers puts onto them.

`MultiHeadClassifier` has several heads over one encoder: all labels of a text for the price of one pass.

The encoder of ModernBERT (arXiv 2412.13663); weights in, hidden states out.

    x ── norm ── attention ──+── norm ── gated mlp ──+── … ── norm
    └────────────────────────┘ └─────────────────────┘

Positions are rotary. In most layers a token attends only to its neighbours, half of `local_attention` on either side,
with frequencies of their own; every third layer, as a rule, attends to the whole text. The first layer has no norm
before its attention, because the embedding has one.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dynamo.base import errors
from dynamo.engine.native import attention, model_files, models, rope, runner, weights
from dynamo.engine.native.model_files import ModernBertConfig
from dynamo.engine.native.settings import NativeConfig

PREFIX = "model."


class Norm:
    """A layer norm, with or without a bias."""

    def __init__(self, config: ModernBertConfig, checkpoint: weights.Checkpoint, name: str) -> None:
        self._shape, self._eps = (config.hidden_size,), config.norm_eps
        self._weight = checkpoint.take(f"{name}.weight", config.hidden_size)
        self._bias = (
            checkpoint.take(f"{name}.bias", config.hidden_size) if config.norm_bias else None
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class ModernBertLayer:
    """Attention and gated MLP, each after a norm and with a residual around both."""

    def __init__(
        self, config: ModernBertConfig, checkpoint: weights.Checkpoint, index: int
    ) -> None:
        prefix = f"{PREFIX}layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size

        def linear(name: str, rows: int, width: int, *, has_bias: bool) -> models.Linear:
            return models.make_linear(
                checkpoint, f"{prefix}.{name}", rows, width, has_bias=has_bias
            )

        self._attention_norm = (
            Norm(config, checkpoint, f"{prefix}.attn_norm") if index > 0 else None
        )
        self._qkv = linear("attn.Wqkv", 3 * hidden, hidden, has_bias=config.attention_bias)
        self._output = linear("attn.Wo", hidden, hidden, has_bias=config.attention_bias)
        self._mlp_norm = Norm(config, checkpoint, f"{prefix}.mlp_norm")
        self._up = linear("mlp.Wi", 2 * inner, hidden, has_bias=config.mlp_bias)
        self._down = linear("mlp.Wo", hidden, inner, has_bias=config.mlp_bias)
        self._heads = config.num_heads
        self.is_local = config.is_local(index)
        self._reach = config.local_attention // 2 if self.is_local else None

    def __call__(
        self,
        x: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        texts: attention.PackedTexts,
    ) -> torch.Tensor:
        """Map x [tokens, hidden] to the same shape, with the cosines and sines of its tokens."""
        normed = x if self._attention_norm is None else self._attention_norm(x)
        qkv = self._qkv(normed).unflatten(1, (3 * self._heads, -1))
        rotated = qkv[:, : 2 * self._heads]
        rope.rotate(rotated, *tables, out=rotated)
        attended = texts.attend_near(
            qkv[:, : self._heads], qkv[:, self._heads :], reach=self._reach
        )
        x = x + self._output(attended)
        inner, gate = self._up(self._mlp_norm(x)).chunk(2, -1)
        return x + self._down(F.gelu(inner) * gate)


class ModernBert:
    """ModernBERT as a stack: the embedding of words, all layers, and the final norm."""

    def __init__(self, config: ModernBertConfig, checkpoint: weights.Checkpoint) -> None:
        """Take the tensors from the checkpoint. Raises ConfigError."""
        checkpoint.add_prefix(PREFIX)
        name, width = f"{PREFIX}embeddings", config.hidden_size
        self._words = checkpoint.take(f"{name}.tok_embeddings.weight", config.vocab_size, width)
        self._norm = Norm(config, checkpoint, f"{name}.norm")
        self._layers = [ModernBertLayer(config, checkpoint, i) for i in range(config.num_layers)]
        self._final_norm = Norm(config, checkpoint, f"{PREFIX}final_norm")
        checkpoint.refuse_rest("head.", "decoder.", "classifier.")
        device, dtype = str(self._words.device), self._words.dtype
        self._tables = {
            is_local: rope.Rope(
                head_dim=width // config.num_heads,
                theta=config.rope_theta(is_local=is_local),
                scaling="default",
                parameters={},
                original_context=config.num_positions,
            ).tables(config.num_positions, dtype=dtype, device=device)
            for is_local in (False, True)
        }

    def hidden(self, token_ids: torch.Tensor, texts: attention.PackedTexts) -> torch.Tensor:
        """Return the normed output of the last layer [tokens, hidden] for token ids [tokens]."""
        x = self._norm(F.embedding(token_ids, self._words))
        rows = {
            is_local: (cos[texts.positions], sin[texts.positions])
            for is_local, (cos, sin) in self._tables.items()
        }
        for layer in self._layers:
            x = layer(x, rows[layer.is_local], texts)
        return self._final_norm(x)


Network = Callable[[torch.Tensor, attention.PackedTexts], torch.Tensor]
Pool = Callable[[torch.Tensor, attention.PackedTexts], torch.Tensor]
Rows = list[list[list[float]]]  # [windows][1, or tokens][labels]
_TOKEN_HEADS = ("names",)  # heads that label each token; the others label a window


class Head(NamedTuple):
    """From hidden states to the scores of labels: a row for each window, or for each token."""

    score: Callable[[torch.Tensor, attention.PackedTexts], torch.Tensor]
    is_by_token: bool


class TextClassifier:
    """A classifier in a Hugging Face directory; called by one thread at a time."""

    def __init__(
        self, files: model_files.ClassifierFiles, num_labels: int, settings: NativeConfig
    ) -> None:
        """Load encoder and head, with a LoRA adapter if the directory has one. Raises ConfigError."""
        runner.check_device(settings.device)
        self._device = settings.device
        with _open_checkpoint(
            files.base, files.path, files.shape, files.adapter, settings
        ) as opened:
            prefix = _prefix_of(files.shape)
            opened.add_prefix(prefix)
            self._head = _take_head(files, num_labels, opened)
            self._network = _make_network(files.shape, opened)

    def classify(self, windows: Sequence[Sequence[int]]) -> Rows:
        """Return the probabilities of the labels for each window, or for each token of each window."""
        return _run(windows, self._network, {"": self._head}, self._device)[""]


class MultiHeadClassifier:
    """A sentence encoder with a LoRA adapter and several linear heads, each with labels of its own."""

    def __init__(
        self,
        base: Path,
        adapter_path: Path,
        labels: Mapping[str, Sequence[str]],
        settings: NativeConfig,
    ) -> None:
        """`labels` are those of each head in `heads.safetensors`. Raises ConfigError."""
        runner.check_device(settings.device)
        self._device = settings.device
        if not model_files.is_encoder(base):
            raise errors.ConfigError(f"{base}: expected a BERT encoder, as all-MiniLM-L6-v2")
        shape = model_files.read_encoder_config(base)
        self.max_context = shape.max_context
        path = adapter_path / model_files.ADAPTER_CONFIG
        adapter = model_files.read_json(path, model_files.AdapterConfig)
        if adapter is None:
            raise errors.ConfigError(f"{path} does not exist")
        model_files.check_adapter(adapter_path, adapter)
        with _open_checkpoint(base, adapter_path, shape, adapter, settings) as checkpoint:
            self._network = _make_network(shape, checkpoint)
        stored = weights.read_tensors(adapter_path / "heads.safetensors")
        self._heads = {
            name: _linear_head(name, stored, len(names), self._device)
            for name, names in labels.items()
        }

    def classify(self, windows: Sequence[Sequence[int]]) -> dict[str, Rows]:
        """Return the probabilities by head."""
        return _run(windows, self._network, self._heads, self._device)


def _run(
    windows: Sequence[Sequence[int]], network: Network, heads: Mapping[str, Head], device: str
) -> dict[str, Rows]:
    """Compute all windows in one pass; a head's scores are rows for windows, or for all of their tokens."""
    order = sorted(range(len(windows)), key=lambda number: len(windows[number]))
    lengths = [len(windows[number]) for number in order]
    results: dict[str, Rows] = {name: [[] for _ in windows] for name in heads}
    with torch.inference_mode():
        token_ids = torch.tensor([t for n in order for t in windows[n]], device=device)
        texts = attention.PackedTexts(lengths, is_causal=False, device=device)
        hidden = network(token_ids, texts)
        for name, head in heads.items():
            chances = F.softmax(head.score(hidden, texts).float(), dim=-1).cpu()
            parts = chances.split(lengths if head.is_by_token else 1)
            for number, part in zip(order, parts, strict=True):
                results[name][number] = part.tolist()
    return results


def _open_checkpoint(
    base: Path,
    adapter_path: Path,
    shape: model_files.EncoderShape,
    adapter: model_files.AdapterConfig | None,
    settings: NativeConfig,
) -> weights.Checkpoint:
    dtype = runner.resolve_dtype(shape, settings.dtype, settings.device)
    if adapter is None:
        return weights.Checkpoint(base, dtype=dtype, device=settings.device)
    return weights.AdaptedCheckpoint(
        base, adapter_path, adapter, prefix=_prefix_of(shape), dtype=dtype, device=settings.device
    )


def _prefix_of(shape: model_files.EncoderShape) -> str:
    if isinstance(shape, model_files.ModernBertConfig):
        return PREFIX
    return shape.prefix


def _make_network(shape: model_files.EncoderShape, checkpoint: weights.Checkpoint) -> Network:
    if isinstance(shape, model_files.ModernBertConfig):
        return ModernBert(shape, checkpoint).hidden
    encoder = models.Encoder(shape, checkpoint)
    return lambda token_ids, texts: encoder.hidden(token_ids, texts.positions, texts)


def _take_head(
    files: model_files.ClassifierFiles, num_labels: int, checkpoint: weights.Checkpoint
) -> Head:
    """Take the tensors of the head that the architecture has. Raises ConfigError."""
    shape, is_by_token = files.shape, files.task == "token"
    width = shape.hidden_size
    if isinstance(shape, model_files.ModernBertConfig):
        dense = models.make_linear(
            checkpoint, "head.dense", width, width, has_bias=shape.classifier_bias
        )
        norm = Norm(shape, checkpoint, "head.norm")
        classify = models.make_linear(checkpoint, "classifier", num_labels, width, has_bias=True)
        pool = _pool_none if is_by_token else _POOLS[shape.classifier_pooling]
        return Head(
            lambda hidden, texts: classify(norm(F.gelu(dense(pool(hidden, texts))))), is_by_token
        )
    if is_by_token:
        classify = models.make_linear(checkpoint, "classifier", num_labels, width, has_bias=True)
        return Head(lambda hidden, _: classify(hidden), is_by_token)
    is_bert = shape.model_type == "bert"
    names = (f"{shape.prefix}pooler.dense", "classifier")
    if not is_bert:
        names = ("classifier.dense", "classifier.out_proj")
    dense = models.make_linear(checkpoint, names[0], width, width, has_bias=True)
    classify = models.make_linear(checkpoint, names[1], num_labels, width, has_bias=True)
    return Head(
        lambda hidden, texts: classify(torch.tanh(dense(_pool_first(hidden, texts)))), is_by_token
    )


def _linear_head(
    name: str, stored: Mapping[str, torch.Tensor], num_labels: int, device: str
) -> Head:
    try:
        weight, bias = (stored[f"{name}.{part}"].float().to(device) for part in ("weight", "bias"))
    except KeyError as error:
        raise errors.ConfigError(f"heads.safetensors: the tensor {error} is missing") from error
    if len(weight) != num_labels:
        raise errors.ConfigError(
            f"heads.safetensors: {name} has {len(weight)} labels; expected {num_labels}"
        )
    is_by_token = name in _TOKEN_HEADS
    pool = _pool_none if is_by_token else _pool_mean
    return Head(
        lambda hidden, texts: F.linear(pool(hidden, texts).float(), weight, bias), is_by_token
    )


def _pool_none(hidden: torch.Tensor, texts: attention.PackedTexts) -> torch.Tensor:
    del texts
    return hidden


def _pool_first(hidden: torch.Tensor, texts: attention.PackedTexts) -> torch.Tensor:
    return hidden.index_select(0, texts.first_rows)


def _pool_mean(hidden: torch.Tensor, texts: attention.PackedTexts) -> torch.Tensor:
    sums = torch.zeros(len(texts.lengths), hidden.shape[1], device=hidden.device)
    sums.index_add_(0, texts.text_of_token, hidden.float())
    return (sums / texts.lengths.unsqueeze(1)).to(hidden.dtype)


_POOLS: dict[str, Pool] = {"cls": _pool_first, "mean": _pool_mean}
