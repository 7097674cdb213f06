"""Names of people and street addresses, by a small convolutional network over the words of a text; numpy alone.

Each token becomes three numbers: its word, its ending, and a group of its shape and of the lists that know it (first
names, last names, words that are written small). One hidden layer reads a token with its neighbours, but only where a
token could belong to a name or an address: it has a capital, a digit, or is a listed first name. Runs of tokens with
the same label are one span; its confidence is the mean of its tokens'.
"""  # decider

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
_ARTICLES = ("the", "a", "an")
_MOST_GAP = 40  # characters between two tokens of one span
_GAPS = {  # what may stand between two tokens of one span
    "PERSON": re.compile(
        r"[ .'’-]{1,2}(?:[A-Z]\. ?)?(?:(?:van|von|der|den|de|del|la|le|di|da|dos|al|el|bin) ){0,2}"
    ),
    "STREET_ADDRESS": re.compile(r"[^\w]{0,4}(?:[a-z]{1,12}[^\w]{1,3}){0,2}"),
}


class TokenFeatures:
    """The numbers of tokens: word, ending and group. 0 is what is not known, and what is before or behind a text."""

    def __init__(self, lists: Sequence[Sequence[str]], vocabulary: Sequence[str]) -> None:
        """`lists` are first names, last names and common words; `vocabulary` has words, and endings after a dash."""
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

    def of(self, token: str) -> tuple[int, int, int, bool]:
        """Return word, ending and group of a token, and whether it could belong to a name or an address."""
        lowered = token.lower()
        word, ending = self._word_ids.get(lowered, 0), self._word_ids.get("-" + lowered[-3:], 0)
        shape = _shape_of(token)
        if shape == "other" and token in _SIGNS:
            return word, 0, 1 + len(_SHAPES) * 8 + _SIGNS.index(token), False
        is_first, is_common = lowered in self._first, lowered in self._common
        group = is_first + 2 * (lowered in self._last) + 4 * is_common
        is_candidate = shape not in ("other", "newline", "lower") or (
            shape == "lower" and not is_common and group > 0
        )
        return word, ending, 1 + _SHAPES.index(shape) * 8 + group, is_candidate


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


class EntityTagger:
    """Finds the names and addresses of a text."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as stored:
            *lists, vocabulary = (
                bytes(stored[name]).decode().split("\n")
                for name in ("first", "last", "common", "vocabulary")
            )
            self._words, self._groups = (
                stored[name] * stored[f"{name}_scale"] for name in ("words", "groups")
            )
            hidden, self._bias = stored["hidden"], stored["hidden_bias"]
            self._hidden = hidden.reshape(2 * REACH + 1, -1, hidden.shape[1])
            self._output, self._output_bias = stored["output"], stored["output_bias"]
        self._features = TokenFeatures(lists, vocabulary)
        self._number_of_token: dict[str, int] = {"": 0}  # 0: before and behind the text
        width = self._words.shape[1] + self._groups.shape[1]
        self._embedded: Any = np.zeros((_MAX_KNOWN_TOKENS, width), np.float32)
        self._embedded[0] = self._embed(0, 0, 0)
        self._is_candidate = bytearray(_MAX_KNOWN_TOKENS)

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
                gap = _GAPS[label]
                if following - end <= _MOST_GAP and gap.fullmatch(text, end, following):
                    run.append(number)
                    continue
            confidence = sum(confidences[part] for part in run) / len(run)
            first = labels[run[0]][0]
            before = tokens[first - 1] if first else ""
            is_word = label == "PERSON" and len(run) == 1
            if not is_word or not self._features.is_thing(tokens[first], before):
                yield pii.PiiSpan(label, starts[first], end, confidence)
            run = [number]

    def _label(self, tokens: Sequence[str]) -> Iterator[tuple[int, str, float]]:
        """Yield the tokens that have a label, with its probability."""
        known = self._number_of_token
        if len(known) + len(tokens) > _MAX_KNOWN_TOKENS:
            known.clear()
            known[""] = 0
        numbers = [known[token] if token in known else self._register(token) for token in tokens]
        candidates = [n for n, number in enumerate(numbers) if self._is_candidate[number]]
        if not candidates:
            return
        margin = [0] * REACH
        padded = np.array(margin + numbers + margin)
        for start in range(0, len(candidates), _BLOCK):
            yield from self._label_candidates(candidates[start : start + _BLOCK], padded)

    def _label_candidates(
        self, candidates: Sequence[int], padded: Any
    ) -> Iterator[tuple[int, str, float]]:
        """Yield the candidates that have a label; `padded` are the numbers of all tokens, with a margin."""
        places = np.arange(2 * REACH + 1)[:, None]
        rows = self._embedded[padded[np.array(candidates) + places]]  # [places, candidates, width]
        hidden = np.maximum(np.matmul(rows, self._hidden).sum(axis=0) + self._bias, 0)
        probabilities = words.softmax(hidden @ self._output + self._output_bias)
        best = probabilities.argmax(axis=1)
        for row in np.flatnonzero(best).tolist():
            confidence = float(probabilities[row, best[row]])
            if confidence >= LEAST_CONFIDENCE:
                yield candidates[row], LABELS[best[row]], confidence

    def _register(self, token: str) -> int:
        """Return a new number for an unknown token."""
        number = len(self._number_of_token)
        *ids, self._is_candidate[number] = self._features.of(token)
        self._embedded[number] = self._embed(*ids)
        self._number_of_token[token] = number
        return number

    def _embed(self, word: int, ending: int, group: int) -> Any:
        """Return the vector of a token by its numbers."""
        return np.concatenate((self._words[word] + self._words[ending], self._groups[group]))


def _find_starts(text: str, tokens: Sequence[str]) -> list[int]:
    """Return where the first tokens of a text begin: between two tokens there is nothing but blanks."""
    starts, end = [], 0
    for token in tokens:
        starts.append(text.index(token, end))
        end = starts[-1] + len(token)
    return starts
