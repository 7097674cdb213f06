"""The encoders of one process: texts to windows, one forward pass for many windows, labels or vectors for texts.

A text is cut into overlapping windows, counted in the classifier's own tokens, so that nothing in it is passed over
and an attack or a name at the edge of a window stands inside the next. The windows of all texts for a classifier
become batches of at most `max_batch_tokens`.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dynamo.base import errors
from dynamo.engine import api as engine_api
from dynamo.engine.native import embedder, model_files, runner, text_classifier
from dynamo.engine.native import settings as native_settings
from dynamo.preprocess import tokenizer_library
from dynamo.protocols import blocks, encoders
from dynamo.semantic import encoder_labels
from dynamo.semantic.classifiers import profile
from dynamo.worker import model_source

MAX_WINDOW, OVERLAP = 512, 64  # tokens
EXACT_WINDOW, EXACT_OVERLAP = 190, 32  # as long as the windows that it was trained with
EXACT_WEIGHTS = profile.WEIGHTS / "exact"
_TOKENIZER = "tokenizer.json"
Rows = list[list[float]]


Windows = Sequence[Sequence[int]]
Network = Callable[[Windows], Mapping[str, list[Rows]]]
"""A forward pass: from token ids to probabilities of labels by head, for each window or each token of each window."""


class LabelHead(NamedTuple):
    """What one head of a network says."""

    head: str
    labels: tuple[str, ...]
    is_by_token: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedClassifier:
    """A network that is ready to compute, and the classifiers that its heads are."""

    network: Network
    tokenizer: tokenizer_library.OffsetTokenizer
    heads: Mapping[str, LabelHead]  # by the name of the classifier
    window: int  # tokens, without the special ones
    overlap: int = OVERLAP


class TextWindow(NamedTuple):
    """A piece of a text: the number of the text and the tokens in it."""

    text: int
    start: int
    end: int


def load_classifier(
    name: str, model: encoder_labels.EncoderModel, settings: native_settings.NativeConfig
) -> LoadedClassifier:
    """Load a model of the configuration. Raises ConfigError."""
    files = model_files.read_classifier(model.directory)
    expected = "token" if name == encoder_labels.PII else "sequence"
    if files.task != expected:
        raise errors.ConfigError(
            f"{model.directory}: the classifier {name} needs a {expected} classifier, not a {files.task} classifier"
        )
    tokenizer = read_tokenizer(model.directory, files.base)
    num_special = len(tokenizer.prefix) + len(tokenizer.suffix)
    network = text_classifier.TextClassifier(files, len(model.labels), settings)
    return LoadedClassifier(
        network=lambda windows: {"": network.classify(windows)},
        tokenizer=tokenizer,
        heads={name: LabelHead("", model.labels, files.task == "token")},
        window=min(MAX_WINDOW, files.shape.max_context) - num_special,
    )


def load_exact(
    base_model: str, config_directory: Path, settings: native_settings.NativeConfig
) -> LoadedClassifier:
    """Load the exact profile: shipped adapters and heads on a MiniLM. Raises ConfigError.

    It was trained in bfloat16, which processors with instructions for it compute in six tenths of the time.
    """
    if settings.device == "cpu" and runner.has_bfloat16():
        settings = dataclasses.replace(settings, dtype="bfloat16")
    beside = config_directory / base_model
    base = beside if beside.is_dir() else model_source.resolve(base_model)
    labels = json.loads((EXACT_WEIGHTS / "heads.json").read_bytes())
    network = text_classifier.MultiHeadClassifier(base, EXACT_WEIGHTS, labels, settings)
    return LoadedClassifier(
        network=network.classify,
        tokenizer=read_tokenizer(base),
        heads={
            name: LabelHead(head, tuple(labels[head]), head == "names")
            for name, head in encoder_labels.EXACT_HEADS.items()
        },
        window=EXACT_WINDOW,
        overlap=EXACT_OVERLAP,
    )


def read_tokenizer(*directories: Path) -> tokenizer_library.OffsetTokenizer:
    """Return the tokenizer in the first of the directories that has one. Raises ConfigError."""
    for directory in directories:
        if (directory / _TOKENIZER).is_file():
            return tokenizer_library.OffsetTokenizer((directory / _TOKENIZER).read_text("utf-8"))
    raise errors.ConfigError(f"{directories[-1] / _TOKENIZER} does not exist")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEmbedder:
    """A model that gives the vector of a text, of which it reads one window."""

    model: embedder.TextEmbedding
    tokenizer: tokenizer_library.OffsetTokenizer
    window: int

    def embed(self, texts: Sequence[str], max_batch_tokens: int) -> Iterator[encoders.TextLabels]:
        """Yield the vectors of texts in their order."""
        tokenizer = self.tokenizer
        encoded = [ids for ids, _ in tokenizer.encode(texts)] if texts else []
        windows = [
            TextWindow(text, 0, min(len(ids), self.window)) for text, ids in enumerate(encoded)
        ]
        for batch in split_batches(windows, max_batch_tokens):
            rows = [
                [*tokenizer.prefix, *encoded[w.text][: w.end], *tokenizer.suffix] for w in batch
            ]
            vectors = self.model.embed([engine_api.EmbedInput(blocks.pack(row)) for row in rows])
            for w, vector in zip(batch, vectors, strict=True):
                is_complete = w.end == len(encoded[w.text])
                yield encoders.TextLabels(vector=vector, is_complete=is_complete)


def load_embedder(directory: Path, settings: native_settings.NativeConfig) -> LoadedEmbedder:
    """Load the embedding model of the configuration. Raises ConfigError."""
    model = embedder.TextEmbedding(directory, settings)
    tokenizer = read_tokenizer(directory)
    num_special = len(tokenizer.prefix) + len(tokenizer.suffix)
    window = min(MAX_WINDOW, model.facts.context_length) - num_special
    return LoadedEmbedder(model=model, tokenizer=tokenizer, window=window)


class ClassifierSet:
    """All classifiers of a process, by name; called by one thread at a time."""

    def __init__(
        self,
        classifiers: Sequence[LoadedClassifier],
        *,
        max_batch_tokens: int,
        max_text_tokens: int,
        embedder: LoadedEmbedder | None = None,
    ) -> None:
        self._classifiers = classifiers
        self._embedder = embedder
        self._max_batch_tokens = max_batch_tokens
        self._max_text_tokens = max_text_tokens

    @property
    def names(self) -> frozenset[str]:
        names = {name for classifier in self._classifiers for name in classifier.heads}
        return frozenset(names if self._embedder is None else {*names, encoder_labels.EMBEDDING})

    def classify(self, inputs: Sequence[encoders.ClassifierInput]) -> list[encoders.TextLabels]:
        """Return the labels of the texts in their order; the classifiers must be known."""
        results: dict[int, encoders.TextLabels] = {}
        for classifier in self._classifiers:
            numbers = [n for n, one in enumerate(inputs) if one.classifier in classifier.heads]
            texts = list(dict.fromkeys(inputs[n].text for n in numbers))
            computed = dict(zip(texts, self._read_texts(classifier, texts), strict=True))
            for n in numbers:
                head = classifier.heads[inputs[n].classifier]
                results[n] = _describe(computed[inputs[n].text], head)
        if self._embedder is not None:
            numbers = [
                n for n, one in enumerate(inputs) if one.classifier == encoder_labels.EMBEDDING
            ]
            texts = list(dict.fromkeys(inputs[n].text for n in numbers))
            vectors = self._embedder.embed(texts, self._max_batch_tokens)
            by_text = dict(zip(texts, vectors, strict=True))
            results |= {n: by_text[inputs[n].text] for n in numbers}
        return [results[n] for n in range(len(inputs))]

    def _read_texts(
        self, classifier: LoadedClassifier, texts: Sequence[str]
    ) -> Iterator["ReadText"]:
        """Return what the heads of one network say of texts, in their order."""
        tokenizer = classifier.tokenizer
        encoded = tokenizer.encode(texts) if texts else []
        windows = [
            TextWindow(text, start, end)
            for text, (ids, _) in enumerate(encoded)
            for start, end in cut_windows(
                min(len(ids), self._max_text_tokens), classifier.window, classifier.overlap
            )
        ]
        heads = {head.head for head in classifier.heads.values()}
        read = [
            ReadText([], {head: [] for head in heads}, offsets, len(ids) <= self._max_text_tokens)
            for ids, offsets in encoded
        ]
        num_prefix = len(tokenizer.prefix)
        for batch in split_batches(windows, self._max_batch_tokens):
            token_ids = [
                [*tokenizer.prefix, *encoded[w.text][0][w.start : w.end], *tokenizer.suffix]
                for w in batch
            ]
            for head, rows in classifier.network(token_ids).items():
                for window, window_rows in zip(batch, rows, strict=True):
                    is_by_token = len(window_rows) > 1
                    kept = window_rows[num_prefix:] if is_by_token else window_rows
                    read[window.text].rows_by_head[head].append(kept)
            for window in batch:
                read[window.text].windows.append(window)
        return iter(read)


class ReadText(NamedTuple):
    """What the heads of a network say of one text."""

    windows: list[TextWindow]
    rows_by_head: dict[str, list[Rows]]  # in the order of the windows
    offsets: Sequence[tuple[int, int]]  # the first and last character of each token
    is_complete: bool


def _describe(read: ReadText, head: LabelHead) -> encoders.TextLabels:
    rows = read.rows_by_head[head.head]
    if not head.is_by_token:
        shares = tuple(tuple(part[0]) for part in rows)
        return encoders.TextLabels(labels=head.labels, windows=shares, is_complete=read.is_complete)
    token_rows = join_windows(list(zip(read.windows, rows, strict=True)))
    spans = tuple(find_spans(token_rows, read.offsets, head.labels))
    return encoders.TextLabels(spans=spans, is_complete=read.is_complete)


def cut_windows(num_tokens: int, size: int, overlap: int = OVERLAP) -> list[tuple[int, int]]:
    """Return the first token of each window of a text and the one after its last; one window for an empty text.

    As few windows as do, of equal length: a last one that is full would be computed twice.
    """
    if num_tokens <= size:
        return [(0, num_tokens)]
    overlap = min(overlap, size // 2)
    count = math.ceil((num_tokens - overlap) / (size - overlap))
    length = math.ceil((num_tokens + (count - 1) * overlap) / count)
    starts = (number * (num_tokens - length) // (count - 1) for number in range(count))
    return [(start, start + length) for start in starts]


def split_batches(windows: Sequence[TextWindow], max_tokens: int) -> Iterator[Sequence[TextWindow]]:
    """Yield the windows in their order as batches of at most so many tokens, at least one window each."""
    first = num_tokens = 0
    for number, window in enumerate(windows):
        length = window.end - window.start
        if number > first and num_tokens + length > max_tokens:
            yield windows[first:number]
            first, num_tokens = number, 0
        num_tokens += length
    if windows:
        yield windows[first:]


def join_windows(parts: Sequence[tuple[TextWindow, Rows]]) -> Rows:
    """Return the rows of all tokens of a text; in an overlap each is from the window with the farther edge."""
    rows: Rows = []
    for (window, window_rows), following in itertools.zip_longest(parts, parts[1:]):
        end = window.end
        if following is not None:
            end -= (window.end - following[0].start) // 2
        rows += window_rows[len(rows) - window.start : end - window.start]
    return rows


def find_spans(
    rows: Rows, offsets: Sequence[tuple[int, int]], labels: Sequence[str]
) -> Iterator[encoders.LabeledSpan]:
    """Yield runs of tokens with the same kind of label; B- and S- begin another.

    The share of a kind is the sum of its labels' (B-, I- and so on); the confidence is the mean of a run's shares.
    """
    kinds: dict[str, list[int]] = {}
    for number, label in enumerate(labels):
        kinds.setdefault(encoder_labels.bare_label(label), []).append(number)
    run: list[float] = []
    current, start, end = "", 0, 0
    for row, (first, last) in zip(rows, offsets, strict=False):
        shares = {kind: sum(row[number] for number in numbers) for kind, numbers in kinds.items()}
        kind = max(shares, key=shares.__getitem__)
        place = labels[max(kinds[kind], key=row.__getitem__)][:2]
        begins = place in ("B-", "S-") and first > end  # a piece of a word goes on
        if run and (kind != current or begins):
            yield encoders.LabeledSpan(current, start, end, sum(run) / len(run))
            run = []
        if kind:
            if not run:
                current, start = kind, first
            end = last
            run.append(shares[kind])
    if run:
        yield encoders.LabeledSpan(current, start, end, sum(run) / len(run))
