"""Models over words, pairs of words and n-grams of letters, and their file of small integers.

Each is logistic regression, beside which a network of one hidden layer over the same features may stand: it sees which
words come together, and errs elsewhere. The scores are the weighted mean of both.
"""

import collections
import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamo.semantic.classifiers import words

SEED = 20
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
    hidden_width: int = 0  # of the network; 0: there is none
    hidden_share: float = 0.4  # of the network in the scores
    hidden_steps: int = 60
    hidden_penalty: float = 1e-5
    dropout: float = 0.5


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A model before it is written. The columns of rows, n-grams and bias are the classes, then the hidden units."""

    entries: list[str]
    rows: np.ndarray
    ngrams: np.ndarray
    bias: np.ndarray
    output: np.ndarray  # weights of hidden units [hidden, classes]


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
    share = np.ones(len(labels)) if weights is None else weights
    share = share / share.sum()
    full, bias = _minimise(matrix, labels, num_classes, settings, share)
    output = np.zeros((0, num_classes), np.float32)
    if settings.hidden_width:
        hidden = _fit_hidden(matrix, labels, num_classes, settings, share)
        part = settings.hidden_share
        full = np.hstack([full * (1 - part), hidden.weight])
        bias = np.hstack([bias * (1 - part) + hidden.output_bias * part, hidden.bias])
        output = hidden.output * part
    rows = full[:num_entries] * idf[:, None]
    ngrams = full[num_entries:] * settings.ngram_weight
    # a known word has the rows of its n-grams in its own
    for number, entry in enumerate(entries):
        if entry.isalpha() and len(entry) > 1:
            buckets = [h % len(ngrams) for h in words.letter_ngrams(entry)]
            rows[number] += ngrams[buckets].sum(axis=0)
    return Fitted(entries, rows, ngrams, bias, output)


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
        output=fitted.output.astype(np.float32),
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
    shares: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights [features, classes] and bias that minimise the penalised cross entropy, by L-BFGS."""
    target = torch.nn.functional.one_hot(torch.tensor(labels), num_classes).float()
    share = torch.tensor(shares).float()[:, None]
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


@dataclasses.dataclass(frozen=True)
class _Hidden:
    weight: np.ndarray  # [features, hidden]
    bias: np.ndarray
    output: np.ndarray  # [hidden, classes]
    output_bias: np.ndarray


class _Product(torch.autograd.Function):
    """The product of a sparse matrix with weights; its transpose is at hand for the gradient."""

    @staticmethod
    def forward(
        context: Any, weight: torch.Tensor, matrix: torch.Tensor, transposed: torch.Tensor
    ) -> torch.Tensor:
        context.transposed = transposed
        return matrix @ weight

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return context.transposed @ gradients[0], None, None


def _fit_hidden(
    matrix: torch.Tensor,
    labels: np.ndarray,
    num_classes: int,
    settings: FitSettings,
    shares: np.ndarray,
) -> _Hidden:
    """Return a network of one hidden layer with rectified units, fitted by Adam with dropout on all texts at once."""
    torch.manual_seed(SEED)
    width = settings.hidden_width
    transposed = matrix.to_sparse_coo().t().to_sparse_csr()
    weight = (torch.randn(matrix.shape[1], width) * 0.01).requires_grad_()
    bias = torch.zeros(width, requires_grad=True)
    output = (torch.randn(width, num_classes) * 0.35).requires_grad_()
    output_bias = torch.zeros(num_classes, requires_grad=True)
    optimiser = torch.optim.Adam([weight, bias, output, output_bias], lr=0.01)
    target, share = torch.tensor(labels), torch.tensor(shares).float()
    for _ in range(settings.hidden_steps):
        units = torch.relu(_Product.apply(weight, matrix, transposed) + bias)
        scores = torch.nn.functional.dropout(units, settings.dropout) @ output + output_bias
        losses = torch.nn.functional.cross_entropy(scores, target, reduction="none")
        loss = (share * losses).sum() + settings.hidden_penalty * (weight**2).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    parts = (weight, bias, output, output_bias)
    return _Hidden(*(part.detach().numpy() for part in parts))
