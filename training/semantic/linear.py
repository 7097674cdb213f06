"""Logistic regression over words, pairs of words and n-grams of letters, and its file of small integers."""

import collections
import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dynamo.semantic.classifiers import words

Tokens = Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitSettings:
    """The settings of one fit."""

    min_count: int = 2  # texts in which a word or pair must occur
    max_entries: int = 60_000
    ngram_buckets: int = 2**15
    ngram_weight: float = 0.5  # of the features made of letters beside those made of words
    penalty: float = 3e-6
    steps: int = 120


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A model before it is written: rows for entries and n-grams, and a bias."""

    entries: list[str]
    rows: np.ndarray
    ngrams: np.ndarray
    bias: np.ndarray


def fit(
    texts: Sequence[Tokens],
    labels: np.ndarray,
    num_classes: int,
    settings: FitSettings,
    weights: np.ndarray | None = None,
) -> Fitted:
    """Fit one row of weights for each entry; labels are class numbers. Texts may be weighted."""
    entries, idf = _choose_entries(texts, settings)
    num_entries = len(entries)
    matrix = _matrix(texts, {entry: n for n, entry in enumerate(entries)}, idf, settings)
    full, bias = _minimise(matrix, labels, num_classes, settings, weights)
    rows = full[:num_entries] * idf[:, None]
    ngrams = full[num_entries:] * settings.ngram_weight
    # a known word has the rows of its n-grams in its own
    for number, entry in enumerate(entries):
        if entry.isalpha() and len(entry) > 1:
            buckets = [h % len(ngrams) for h in words.letter_ngrams(entry)]
            rows[number] += ngrams[buckets].sum(axis=0)
    return Fitted(entries, rows, ngrams, bias)


def write(fitted: Fitted, classes: Sequence[str], path: Path) -> None:
    """Write the model as integers of 8 bits with a scale for each class."""
    rows, scale = quantise(fitted.rows)
    rows = np.vstack([rows, np.zeros_like(rows[:1])])  # the last row is that of unknown entries
    ngrams, ngram_scale = quantise(fitted.ngrams)
    np.savez_compressed(
        path,
        classes=np.frombuffer(json.dumps(list(classes)).encode(), np.uint8),
        vocabulary=np.frombuffer("\n".join(fitted.entries).encode(), np.uint8),
        rows=rows,
        scale=scale,
        ngrams=ngrams,
        ngram_scale=ngram_scale,
        bias=fitted.bias.astype(np.float32),
    )


def quantise(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return integers of 8 bits, and a scale for each column."""
    if not values.size:
        return values.astype(np.int8), np.zeros(values.shape[1], np.float32)
    scale = np.maximum(np.percentile(np.abs(values), 99.95, axis=0), 1e-9) / 127
    return np.clip(np.round(values / scale), -127, 127).astype(np.int8), scale.astype(np.float32)


def _choose_entries(texts: Sequence[Tokens], settings: FitSettings) -> tuple[list[str], np.ndarray]:
    counts: collections.Counter[str] = collections.Counter()
    for tokens in texts:
        counts.update({*tokens, *(f"{a} {b}" for a, b in itertools.pairwise(tokens))})
    frequent = [(entry, n) for entry, n in counts.items() if n >= settings.min_count]
    frequent.sort(key=lambda item: (-item[1], item[0]))
    frequent = frequent[: settings.max_entries]
    idf = np.array([np.log(len(texts) / n) + 0.3 for _, n in frequent], np.float32)
    return [entry for entry, _ in frequent], idf


def _matrix(
    texts: Sequence[Tokens], index: dict[str, int], idf: np.ndarray, settings: FitSettings
) -> torch.Tensor:
    """Return the features, sparse [texts, entries + buckets]."""
    starts, columns, values = [0], [], []
    for tokens in texts:
        features: dict[int, float] = collections.defaultdict(float)
        norm = 1 / np.sqrt(max(1, len(tokens)))
        pairs = [f"{a} {b}" for a, b in itertools.pairwise(tokens)]
        for entry in (*tokens, *pairs):
            number = index.get(entry)
            if number is not None:
                features[number] += idf[number] * norm
        if settings.ngram_buckets:
            for token in tokens:
                if token.isalpha() and len(token) > 1:
                    for h in words.letter_ngrams(token):
                        column = len(index) + h % settings.ngram_buckets
                        features[column] += settings.ngram_weight * norm
        columns += features.keys()
        values += features.values()
        starts.append(len(columns))
    shape = (len(texts), len(index) + settings.ngram_buckets)
    return torch.sparse_csr_tensor(
        torch.tensor(starts),
        torch.tensor(columns),
        torch.tensor(values, dtype=torch.float32),
        shape,
    )


def _minimise(
    matrix: torch.Tensor,
    labels: np.ndarray,
    num_classes: int,
    settings: FitSettings,
    weights: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights [features, classes] and bias that minimise the penalised cross entropy, by L-BFGS."""
    target = torch.nn.functional.one_hot(torch.tensor(labels), num_classes).float()
    share = torch.ones(len(labels)) if weights is None else torch.tensor(weights).float()
    share = (share / share.sum())[:, None]
    transposed = matrix.to_sparse_coo().t().to_sparse_csr()
    weight = torch.zeros(matrix.shape[1], num_classes, requires_grad=True)
    bias = torch.zeros(num_classes, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [weight, bias], max_iter=settings.steps, history_size=8, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        with torch.no_grad():
            logits = matrix @ weight + bias
            loss = -(share * target * torch.log_softmax(logits, -1)).sum()
            error = share * (torch.softmax(logits, -1) - target)
            weight.grad = transposed @ error + 2 * settings.penalty * weight
            bias.grad = error.sum(0)
            return loss + settings.penalty * (weight**2).sum()

    optimiser.step(closure)
    return weight.detach().numpy(), bias.detach().numpy()
