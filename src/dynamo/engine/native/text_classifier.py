"""Encoder classifiers: token ids in, probabilities of labels out; one forward pass for a batch of windows.

A sequence classifier gives one row of probabilities for a window, a token classifier one for each token of it. The
network is our own, as that of the embedder: the encoder of BERT and RoBERTa (`models`) or ModernBERT (`modernbert`),
with the heads that Hugging Face Transformers puts onto them.

`MultiHeadClassifier` has several heads over one encoder: all labels of a text for the price of one pass.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dynamo.base import errors
from dynamo.engine.native import (
    attention,
    classifier_files,
    lora_weights,
    model_files,
    models,
    modernbert,
    runner,
    weights,
)
from dynamo.engine.native.settings import NativeConfig

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
        self, files: classifier_files.ClassifierFiles, num_labels: int, settings: NativeConfig
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
        path = adapter_path / classifier_files.ADAPTER_CONFIG
        adapter = model_files.read_json(path, classifier_files.AdapterConfig)
        if adapter is None:
            raise errors.ConfigError(f"{path} does not exist")
        classifier_files.check_adapter(adapter_path, adapter)
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
    shape: classifier_files.EncoderShape,
    adapter: classifier_files.AdapterConfig | None,
    settings: NativeConfig,
) -> weights.Checkpoint:
    dtype = runner.resolve_dtype(shape, settings.dtype, settings.device)
    if adapter is None:
        return weights.Checkpoint(base, dtype=dtype, device=settings.device)
    return lora_weights.AdaptedCheckpoint(
        base,
        adapter_path,
        adapter,
        prefix=_prefix_of(shape),
        dtype=dtype,
        device=settings.device,
    )


def _prefix_of(shape: classifier_files.EncoderShape) -> str:
    if isinstance(shape, classifier_files.ModernBertConfig):
        return modernbert.PREFIX
    return shape.prefix


def _make_network(shape: classifier_files.EncoderShape, checkpoint: weights.Checkpoint) -> Network:
    if isinstance(shape, classifier_files.ModernBertConfig):
        return modernbert.ModernBert(shape, checkpoint).hidden
    encoder = models.Encoder(shape, checkpoint)
    return lambda token_ids, texts: encoder.hidden(token_ids, texts.positions, texts)


def _take_head(
    files: classifier_files.ClassifierFiles, num_labels: int, checkpoint: weights.Checkpoint
) -> Head:
    """Take the tensors of the head that the architecture has. Raises ConfigError."""
    shape, is_by_token = files.shape, files.task == "token"
    width = shape.hidden_size
    if isinstance(shape, classifier_files.ModernBertConfig):
        dense = models.make_linear(
            checkpoint, "head.dense", width, width, has_bias=shape.classifier_bias
        )
        norm = modernbert.Norm(shape, checkpoint, "head.norm")
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
