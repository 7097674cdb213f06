"""The encoder classifiers of one process: texts to windows, one forward pass for many windows, answers for texts.

A text is cut into overlapping windows, counted in the classifier's own tokens, so that nothing in it is passed over
and an attack or a name at the edge of a window stands inside the next. The windows of all texts for a classifier
become batches of at most `max_batch_tokens`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from dynamo.base import errors
from dynamo.engine.native import classifier_files, text_classifier
from dynamo.engine.native import settings as native_settings
from dynamo.preprocess import tokenizer_library
from dynamo.protocols import classification
from dynamo.semantic import encoder_labels

MAX_WINDOW, OVERLAP = 512, 64  # tokens
_TOKENIZER = "tokenizer.json"
Rows = list[list[float]]


class Network(Protocol):
    """A classifier's forward pass."""

    def classify(self, windows: Sequence[Sequence[int]]) -> list[Rows]:
        """Return the probabilities of the labels for each window, or for each token of each window."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedClassifier:
    """A classifier that is ready to compute."""

    network: Network
    tokenizer: tokenizer_library.OffsetTokenizer
    labels: tuple[str, ...]
    is_by_token: bool
    window: int  # tokens, without the special ones


class TextWindow(NamedTuple):
    """A piece of a text: the number of the text and the tokens in it."""

    text: int
    start: int
    end: int


def load_classifier(
    name: str, model: encoder_labels.EncoderModel, settings: native_settings.NativeConfig
) -> LoadedClassifier:
    """Load a model of the configuration. Raises ConfigError."""
    files = classifier_files.read_classifier(model.directory)
    expected = "token" if name == encoder_labels.PII else "sequence"
    if files.task != expected:
        raise errors.ConfigError(
            f"{model.directory}: the classifier {name} needs a {expected} classifier, not a {files.task} classifier"
        )
    tokenizer = read_tokenizer(model.directory, files.base)
    num_special = len(tokenizer.prefix) + len(tokenizer.suffix)
    return LoadedClassifier(
        network=text_classifier.TextClassifier(files, len(model.labels), settings),
        tokenizer=tokenizer,
        labels=model.labels,
        is_by_token=files.task == "token",
        window=min(MAX_WINDOW, files.shape.max_context) - num_special,
    )


def read_tokenizer(*directories: Path) -> tokenizer_library.OffsetTokenizer:
    """Return the tokenizer in the first of the directories that has one. Raises ConfigError."""
    for directory in directories:
        if (directory / _TOKENIZER).is_file():
            return tokenizer_library.OffsetTokenizer((directory / _TOKENIZER).read_text())
    raise errors.ConfigError(f"{directories[-1] / _TOKENIZER} does not exist")


class ClassifierSet:
    """All classifiers of a process, by name; called by one thread at a time."""

    def __init__(
        self,
        classifiers: Mapping[str, LoadedClassifier],
        *,
        max_batch_tokens: int,
        max_text_tokens: int,
    ) -> None:
        self._classifiers = classifiers
        self._max_batch_tokens = max_batch_tokens
        self._max_text_tokens = max_text_tokens

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the classifiers."""
        return frozenset(self._classifiers)

    def classify(
        self, inputs: Sequence[classification.ClassifierInput]
    ) -> list[classification.TextLabels]:
        """Return the labels of the texts in their order; the classifiers must be known."""
        results: dict[int, classification.TextLabels] = {}
        for name, classifier in self._classifiers.items():
            numbers = [n for n, one in enumerate(inputs) if one.classifier == name]
            texts = [inputs[n].text for n in numbers]
            results.update(zip(numbers, self._classify_texts(classifier, texts), strict=True))
        return [results[n] for n in range(len(inputs))]

    def _classify_texts(
        self, classifier: LoadedClassifier, texts: Sequence[str]
    ) -> list[classification.TextLabels]:
        """Return the labels of texts by one classifier."""
        encoded = classifier.tokenizer.encode(texts) if texts else []
        lengths = [min(len(ids), self._max_text_tokens) for ids, _ in encoded]
        windows = [
            TextWindow(text, start, end)
            for text, length in enumerate(lengths)
            for start, end in cut_windows(length, classifier.window)
        ]
        tokenizer = classifier.tokenizer
        rows: list[Rows] = []
        for batch in split_batches(windows, self._max_batch_tokens):
            token_ids = [
                [*tokenizer.prefix, *encoded[w.text][0][w.start : w.end], *tokenizer.suffix]
                for w in batch
            ]
            rows += classifier.network.classify(token_ids)
        computed: list[list[tuple[TextWindow, Rows]]] = [[] for _ in texts]
        for window, window_rows in zip(windows, rows, strict=True):
            computed[window.text].append((window, window_rows))
        results = []
        for (ids, offsets), parts in zip(encoded, computed, strict=True):
            is_complete = len(ids) <= self._max_text_tokens
            if classifier.is_by_token:
                num_prefix = len(tokenizer.prefix)
                token_rows = join_windows([(w, part[num_prefix:]) for w, part in parts])
                spans = tuple(find_spans(token_rows, offsets, classifier.labels))
                results.append(classification.TextLabels(spans=spans, is_complete=is_complete))
            else:
                shares = tuple(tuple(part[0]) for _, part in parts)
                results.append(
                    classification.TextLabels(
                        labels=classifier.labels, windows=shares, is_complete=is_complete
                    )
                )
        return results


def cut_windows(num_tokens: int, size: int) -> list[tuple[int, int]]:
    """Return the first token of each window of a text and the one after its last; one window for an empty text."""
    if num_tokens <= size:
        return [(0, num_tokens)]
    step = max(1, size - OVERLAP)
    starts = range(0, num_tokens - size, step)
    return [*((start, start + size) for start in starts), (num_tokens - size, num_tokens)]


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
) -> Iterator[classification.LabeledSpan]:
    """Yield runs of tokens with the same label; B- and S- begin another. The confidence is the mean of a run's."""
    run: list[float] = []
    current, start, end = "", 0, 0
    for row, (first, last) in zip(rows, offsets, strict=False):
        best = max(range(len(row)), key=row.__getitem__)
        label = encoder_labels.bare_label(labels[best])
        begins = labels[best][:2] in ("B-", "S-") and first > end  # a piece of a word goes on
        if run and (label != current or begins):
            yield classification.LabeledSpan(current, start, end, sum(run) / len(run))
            run = []
        if label:
            if not run:
                current, start = label, first
            end = last
            run.append(row[best])
    if run:
        yield classification.LabeledSpan(current, start, end, sum(run) / len(run))
