"""Names of people and street addresses, by a small convolutional network over the words of a text; numpy alone.

Each token becomes four numbers: its word, its last and first three letters, and a group of its shape and of the lists
that know it (first names, last names, words written small). One hidden layer reads a token with its neighbours, where
it could belong to a name or an address: it has a capital, a digit, or is a listed first name. The scores of several
networks ("members") are averaged: one may by chance be worse. Runs of one label are a span, with their mean confidence.
"""  # decider

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynamo.semantic.classifiers import pii, words

LABELS = ("O", "PERSON", "STREET_ADDRESS")
REACH = 3  # tokens on each side that a token's label depends on
LEAST_CONFIDENCE = 0.5
TOKEN = re.compile(r"[^\W\d_]+|\d+|\n+|[^\w\s]|_")
_SHAPES = ("other", "newline", "lower", "title", "upper", "letter", "mixed", *"12345", "long")
_SIGNS = ".,:;'\"-/@#()!?&|"
_CHUNK = 8192  # tokens that are tagged at a time
_BLOCK = 64  # candidates of one product: a larger one starts threads, which cost more than it does
_MAX_KNOWN_TOKENS = 30_000  # with their features
# for chunks of several threads that begin when there is just room for one
_SPARE_TOKENS = 2 * _CHUNK
_ARTICLES = ("the", "a", "an")
# Of 3.14159, or of a hash: no postcode.
_PART_OF_NUMBER = re.compile(r"(?:(?<=[^\W_])|(?<=\d[.,]))\d+\Z")
_MOST_GAP = 40  # characters between two tokens of one span
_GAPS = {  # what may stand between two tokens of one span
    "PERSON": re.compile(
        r"[ .'’-]{1,2}(?:[A-Z]\. ?)?(?:(?:van|von|der|den|de|del|la|le|di|da|dos|al|el|bin) ){0,2}"
    ),
    "STREET_ADDRESS": re.compile(r"[^\w]{0,4}(?:[a-z]{1,12}[^\w]{1,3}){0,2}"),
}


class TokenFeatures:
    """The numbers of tokens: word, ending, beginning and group. 0 is what is not known, and what is around a text."""

    def __init__(self, lists: Sequence[Sequence[str]], vocabulary: Sequence[str]) -> None:
        """`lists` are first names, last names and common words; `vocabulary` has words, "-ing" and "con-"."""
        self._first, self._last, self._common = (frozenset(entries) for entries in lists)
        self._word_ids = {entry: number for number, entry in enumerate(vocabulary, 1)}

    num_groups = 1 + len(_SHAPES) * 8 + len(_SIGNS)

    def is_thing(self, token: str, before: str) -> bool:
        """Return whether a name of one word is more likely a thing: "the Mark", or a last name written small."""
        lowered = token.lower()
        if token == lowered:
            return lowered not in self._first
        return before.lower() in _ARTICLES and lowered in self._common

    def is_name(self, token: str) -> bool:
        """Return whether a token is a listed name and no common word."""
        lowered = token.lower()
        return lowered not in self._common and (lowered in self._first or lowered in self._last)

    def of(self, token: str) -> tuple[int, int, int, int, bool]:
        """Return word, ending, beginning and group of a token, and whether it could belong to a name or an address."""
        lowered = token.lower()
        entries = (lowered, f"-{lowered[-3:]}", f"{lowered[:3]}-")
        word, ending, beginning = (self._word_ids.get(entry, 0) for entry in entries)
        shape = _shape_of(token)
        if shape == "other" and token in _SIGNS:
            return word, 0, 0, 1 + len(_SHAPES) * 8 + _SIGNS.index(token), False
        is_first, is_common = lowered in self._first, lowered in self._common
        group = is_first + 2 * (lowered in self._last) + 4 * is_common
        is_candidate = shape not in ("other", "newline", "lower") or (
            shape == "lower" and not is_common and group > 0
        )
        return word, ending, beginning, 1 + _SHAPES.index(shape) * 8 + group, is_candidate


def _shape_of(token: str) -> str:
    if token[0].isdigit():
        return str(len(token)) if len(token) < 6 else "long"
    if not token[0].isalpha():
        return "newline" if token[0] == "\n" else "other"
    if token.lower() == token:
        return "lower"
    if len(token) == 1:
        return "letter"
    return "upper" if token.isupper() else "title" if token[1:].islower() else "mixed"


class KnownTokens:
    """The tokens of earlier texts by number, with their vectors. It only grows, so that threads may share it."""

    def __init__(self, num_members: int, width: int) -> None:
        self.number_of_token: dict[str, int] = {}
        self.numbers = itertools.count()  # a number is given once, whichever thread asks
        num_rows = _MAX_KNOWN_TOKENS + _SPARE_TOKENS
        self.num_rows_left = _MAX_KNOWN_TOKENS
        self.embedded: Any = np.zeros((num_members, num_rows, width), np.float32)
        self.is_candidate = bytearray(num_rows)


class EntityTagger:
    """Finds the names and addresses of a text. For any thread."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as stored:
            *lists, vocabulary = (
                bytes(stored[name]).decode().split("\n")
                for name in ("first", "last", "common", "vocabulary")
            )
            self._words, self._groups = (
                stored[name] * stored[f"{name}_scale"] for name in ("words", "groups")
            )  # [entries, members, width]
            self._hidden, self._bias = stored["hidden"].astype(np.float32), stored["hidden_bias"]
            self._output, self._output_bias = stored["output"], stored["output_bias"]
        self._features = TokenFeatures(lists, vocabulary)
        self._table = self._make_table()

    def find(self, text: str) -> Iterator[pii.PiiSpan]:
        """Yield the names and addresses in a text, in order."""
        text = text[: pii.MAX_CHARACTERS]
        tokens = TOKEN.findall(text)
        labels, confidences = [], []
        for start in range(0, len(tokens), _CHUNK):
            for position, label, confidence in self._label(tokens[start : start + _CHUNK]):
                labels.append((start + position, label))
                confidences.append(confidence)
        if not labels:
            return
        starts = _find_starts(text, tokens[: labels[-1][0] + 1])
        run = [0]
        for number in range(1, len(labels) + 1):
            last, label = labels[run[-1]]
            end = starts[last] + len(tokens[last])
            if number < len(labels) and labels[number][1] == label:
                following = starts[labels[number][0]]
                if following - end <= _MOST_GAP and _GAPS[label].fullmatch(text, end, following):
                    run.append(number)
                    continue
            confidence = sum(confidences[part] for part in run) / len(run)
            first = labels[run[0]][0]
            before = tokens[first - 1] if first else ""
            is_word = label == "PERSON" and len(run) == 1
            is_thing = is_word and self._features.is_thing(tokens[first], before)
            if not is_thing and not _PART_OF_NUMBER.match(text, starts[first], end):
                yield pii.PiiSpan(label, starts[first], end, confidence)
            run = [number]

    def _label(self, tokens: Sequence[str]) -> Iterator[tuple[int, str, float]]:
        """Yield the tokens that have a label, with its probability."""
        table = self._table
        if table.num_rows_left < len(tokens):
            table = self._table = self._make_table()
        number_of = table.number_of_token
        numbers = [number_of[t] if t in number_of else self._register(t, table) for t in tokens]
        candidates = [n for n, number in enumerate(numbers) if table.is_candidate[number]]
        if not candidates:
            return
        padded = np.array([0] * REACH + numbers + [0] * REACH)
        for start in range(0, len(candidates), _BLOCK):
            part = candidates[start : start + _BLOCK]
            yield from self._label_candidates(part, padded, table.embedded)

    def _label_candidates(
        self, candidates: Sequence[int], padded: Any, embedded: Any
    ) -> Iterator[tuple[int, str, float]]:
        """Yield the candidates that have a label; `padded` are the numbers of all tokens, with a margin."""
        places = np.arange(2 * REACH + 1)[:, None]
        rows = np.take(embedded, padded[np.array(candidates) + places], axis=1)  # by member
        hidden = np.maximum(np.matmul(rows, self._hidden).sum(axis=1) + self._bias, 0)
        scores = np.matmul(hidden, self._output) + self._output_bias
        probabilities = words.softmax(scores.mean(axis=0))
        best = probabilities.argmax(axis=1)
        for row in np.flatnonzero((best > 0) & (best < len(LABELS))).tolist():
            confidence = float(probabilities[row, best[row]])
            if confidence >= LEAST_CONFIDENCE:
                yield candidates[row], LABELS[best[row]], confidence

    def _make_table(self) -> KnownTokens:
        """Return a table that knows nothing but number 0, which is before and behind the text."""
        table = KnownTokens(len(self._hidden), self._hidden.shape[2])
        self._embed(table, next(table.numbers), 0, 0, 0, 0)
        return table

    def _register(self, token: str, table: KnownTokens) -> int:
        """Return a new number for an unknown token, which other threads see when its vectors are there."""
        number = next(table.numbers)
        table.num_rows_left = _MAX_KNOWN_TOKENS - number - 1
        *ids, table.is_candidate[number] = self._features.of(token)
        self._embed(table, number, *ids)
        table.number_of_token[token] = number
        return number

    def _embed(
        self, table: KnownTokens, number: int, word: int, ending: int, beginning: int, group: int
    ) -> None:
        """Write the vectors of a token, one for each member."""
        of_word = self._words[word] + self._words[ending] + self._words[beginning]
        table.embedded[:, number] = np.concatenate((of_word, self._groups[group]), axis=1)


def _find_starts(text: str, tokens: Sequence[str]) -> list[int]:
    """Return where the first tokens of a text begin: between two tokens there is nothing but blanks."""
    starts, end = [], 0
    for token in tokens:
        starts.append(text.index(token, end))
        end = starts[-1] + len(token)
    return starts
