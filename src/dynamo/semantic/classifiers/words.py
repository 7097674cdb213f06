"""The words of a text, and linear models over them: what the fast classifiers have in common.

A model gives each word and each pair of neighbouring words a row of weights, one weight for each class. Words that it
does not know get a row made of their n-grams of letters, from a hashed table. The score of a stretch of text is the sum
of its rows, divided by the root of their number. Because sums are all that is needed, running totals give the scores of
any number of overlapping windows for the price of one pass. A model may have hidden units beside the classes: columns
of the same rows, whose sums, where they are positive, are added to the classes with weights.
"""  # decider

import itertools
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

MAX_TOKENS = 200_000  # of one text; what is behind them is reported as unread
MAX_WORD = 40  # letters of a word; a longer run of letters is cut into several words
_TOKEN = re.compile(rf"[^\W\d_]{{1,{MAX_WORD}}}|\d|[!-/:-@\[-`{{-~]|[\xa1-\xbf×÷\u2190-\u22ff]")
DIGIT = "0"  # stands for every digit
_NGRAM_SIZES = (3, 4, 5)
_KEY_BASE = 2**32  # of a pair's first word in its key
_MAX_UNKNOWN_WORDS = 100_000  # with their rows, of all models together


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedText:
    """The words of a text."""

    words: list[str]
    is_complete: bool = True  # all of the text was read


@lru_cache(4)  # the classifiers of one request read the same texts
def tokenize(text: str) -> TokenizedText:
    """Return the words, digits and signs of a text in lower case.

    Pictures (emoji) and the like are no tokens: no number of them hides what stands between.
    """
    limit = MAX_TOKENS * 16  # characters; bounds the work for a text without spaces
    tokens = split(text[:limit].lower())
    is_complete = len(text) <= limit and len(tokens) <= MAX_TOKENS
    return TokenizedText(tokens[:MAX_TOKENS], is_complete)


def split(lowered: str) -> list[str]:
    """Return the words, digits and signs of a text that is in lower case already."""
    return [DIGIT if token.isdigit() else token for token in _TOKEN.findall(lowered)]


def letter_ngrams(word: str) -> list[int]:
    """Return the hashes (32 bits) of the n-grams of letters in `<word>`."""
    data = f"<{word}>".encode()
    return [
        zlib.crc32(data[start : start + size])
        for size in _NGRAM_SIZES
        for start in range(len(data) - size + 1)
    ]


class Lexicon:
    """The words and pairs of several models, each with a number, so that a text is looked up once for all of them."""

    def __init__(self, vocabularies: Sequence[Sequence[str]]) -> None:
        entries = dict.fromkeys(itertools.chain(*vocabularies))
        words = dict.fromkeys(part for entry in entries for part in entry.split(" "))
        self._words = {word: number for number, word in enumerate(words)}
        self.num_words = len(self._words)  # also the number of an unknown word
        pairs = sorted((self._key(entry), entry) for entry in entries if " " in entry)
        keys = (key for key, _ in pairs)
        self._keys: Any = np.array([-1, *keys, np.iinfo(np.int64).max])  # -1: of an unknown pair
        numbered = enumerate(pairs, self.num_words + 2)
        self.number_of = self._words | {pair: number for number, (_, pair) in numbered}
        self.size = self.num_words + 1 + len(self._keys)
        self.find = lru_cache(4)(self._find)  # texts are the same by identity

    def _find(self, text: TokenizedText) -> Any:
        """Return the numbers of the words and of the pairs that end with them, int [2, words]."""
        find, unknown = self._words.get, self.num_words
        numbers: Any = np.array([find(word, unknown) for word in text.words], np.int64)
        keys = np.full_like(numbers, -1)
        keys[1:] = numbers[:-1] * _KEY_BASE + numbers[1:]
        places: Any = np.searchsorted(self._keys, keys)
        places[self._keys[places] != keys] = 0
        return np.stack((numbers, places + self.num_words + 1))

    def _key(self, pair: str) -> int:
        first, _, second = pair.partition(" ")
        return self._words[first] * _KEY_BASE + self._words[second]


def read_vocabulary(path: Path) -> list[str]:
    """Return the words and pairs of the model in a file."""
    with np.load(path, allow_pickle=False) as stored:
        return bytes(stored["vocabulary"]).decode().split("\n")


class WordModel:
    """A linear model over the words of a text, read from a `.npz` file.

    The rows of words are integers of 8 bits, with one scale for each class; those of n-grams have scales of their own.
    """

    def __init__(self, path: Path, lexicon: Lexicon | None = None) -> None:
        """Read a model. `lexicon` knows its vocabulary, and perhaps those of other models."""
        vocabulary = read_vocabulary(path)
        self._lexicon = lexicon or Lexicon([vocabulary])
        with np.load(path, allow_pickle=False) as stored:
            self.classes: Sequence[str] = json.loads(bytes(stored["classes"]).decode())
            rows = stored["rows"]
            self._scale: Any = stored["scale"]
            self._bias: Any = stored["bias"]
            self._ngrams: Any = stored["ngrams"]
            self._ngram_scale: Any = stored["ngram_scale"]
            self._output: Any = stored["output"]  # [hidden units, classes]
        numbers: Any = np.array([self._lexicon.number_of[entry] for entry in vocabulary])
        self._rows: Any = np.zeros((self._lexicon.size, rows.shape[1]), np.int8)
        self._rows[numbers] = rows[:-1]
        self._is_known: Any = np.zeros(self._lexicon.num_words + 1, bool)
        self._is_known[numbers[numbers < self._lexicon.num_words]] = True
        self._unknown_row = lru_cache(_MAX_UNKNOWN_WORDS // 10)(self._compute_row)

    def token_rows(self, text: TokenizedText) -> Any:
        """Return a row for each word, float32 [words, columns]: that of the word and of the pair that it ends."""
        numbers = self._lexicon.find(text)
        rows = self._rows[numbers].sum(axis=0, dtype=np.float32)
        rows *= self._scale
        if self._ngrams.size:
            unknown = np.flatnonzero(~self._is_known[numbers[0]]).tolist()
            words = {n: text.words[n] for n in unknown if len(text.words[n]) > 1}
            made = {n: self._unknown_row(word) for n, word in words.items() if word.isalpha()}
            if made:
                rows[list(made)] += np.array(list(made.values()))
        return rows

    def logits(self, text: TokenizedText) -> Any:
        """Return the score of each class for the whole text, float32 [classes]."""
        total = self.token_rows(text).sum(axis=0) / np.sqrt(max(1, len(text.words)))
        return self._score(total + self._bias)

    def window_logits(self, rows: Any, sizes: Sequence[int]) -> Any:
        """Return the scores of overlapping windows of a text by its rows, float32 [windows, classes]; at least one.

        Windows of each size overlap by half; the whole text is one more if it is no longer than the largest size.
        """
        if not len(rows):
            return self._score(self._bias[None])
        totals: Any = np.zeros((len(rows) + 1, len(self._bias)), np.float64)
        np.cumsum(rows, axis=0, out=totals[1:])
        starts, ends = window_bounds(len(rows), tuple(sizes))
        spans = (totals[ends] - totals[starts]) / np.sqrt(ends - starts)[:, None]
        return self._score(spans.astype(np.float32) + self._bias)

    def _score(self, sums: Any) -> Any:
        """Return the scores of the classes from the sums of all columns."""
        num_classes = len(self.classes)
        return sums[..., :num_classes] + np.maximum(sums[..., num_classes:], 0) @ self._output

    def _compute_row(self, word: str) -> Any:
        buckets = [number % len(self._ngrams) for number in letter_ngrams(word)]
        return self._ngrams[buckets].sum(axis=0, dtype=np.float32) * self._ngram_scale


@lru_cache(256)
def window_bounds(num_tokens: int, sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the first token of each window and the one after its last."""
    bounds = []
    for size in sizes:
        if num_tokens > size:
            last = num_tokens - size
            bounds += [(start, start + size) for start in range(0, last, size // 2)]
            bounds.append((last, num_tokens))
    if num_tokens <= max(sizes):
        bounds.append((0, num_tokens))
    array = np.array(bounds)
    return array[:, 0], array[:, 1]


def softmax(logits: Any) -> Any:
    """Return the probabilities of the classes, along the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
