"""Names of people and street addresses, by a small convolutional network over the words of a text; numpy alone.

Each token becomes three numbers: its word, its ending, and a group of its shape and of the lists that know it (first
names, last names, words that are written small). One hidden layer reads a token with its neighbours, but only where a
token could belong to a name or an address: it has a capital, a digit, or is a listed first name. Runs of tokens with
the same label are one span; its confidence is the mean of its tokens'.
"""

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
            reach = 2 * REACH + 1
            width = stored["words"].shape[1]
            hidden = stored["hidden"].reshape(reach, -1, stored["hidden"].shape[1])
            # A row of the hidden layer for each word and group at each place: sums take the place of products.
            self._words, self._groups = (
                np.einsum(
                    "nw,rwh->nrh", stored[name] * stored[f"{name}_scale"], part, optimize=True
                ).reshape(-1, hidden.shape[2])
                for name, part in (("words", hidden[:, :width]), ("groups", hidden[:, width:]))
            )
            self._bias = stored["hidden_bias"]
            self._output, self._output_bias = stored["output"], stored["output_bias"]
        self._features = TokenFeatures(lists, vocabulary)
        self._number_of_token: dict[str, int] = {"": 0}  # 0: before and behind the text
        self._ids: Any = np.zeros((_MAX_KNOWN_TOKENS, 3), np.int64)
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
        matches = list(TOKEN.finditer(text))
        run = [0]
        for number in range(1, len(labels) + 1):
            label = labels[run[-1]][1]
            last = matches[labels[run[-1]][0]]
            if number < len(labels) and labels[number][1] == label:
                following = matches[labels[number][0]]
                if following.start() - last.end() <= _MOST_GAP and _GAPS[label].fullmatch(
                    text, last.end(), following.start()
                ):
                    run.append(number)
                    continue
            confidence = sum(confidences[part] for part in run) / len(run)
            first = labels[run[0]][0]
            before = tokens[first - 1] if first else ""
            is_word = label == "PERSON" and len(run) == 1
            if is_word and self._features.is_thing(tokens[first], before):
                run = [number]
                continue
            yield pii.PiiSpan(label, matches[first].start(), last.end(), confidence)
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
        places = np.arange(2 * REACH + 1)
        rows = self._ids[padded[np.array(candidates)[:, None] + places]] * len(places)
        rows += places[:, None]  # [candidates, places, word | ending | group]
        scores = self._words[rows[..., 0]] + self._words[rows[..., 1]] + self._groups[rows[..., 2]]
        hidden = np.maximum(scores.sum(axis=1) + self._bias, 0)
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
        self._ids[number] = ids
        self._number_of_token[token] = number
        return number
