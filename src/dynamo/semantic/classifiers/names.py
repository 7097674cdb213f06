"""Names of people, by a list of first names (the census of the United States of 1990) and one of common words.

Many a famous name is no personal data, so what the lists find has a confidence below the usual threshold: it counts
where a threshold of 0.65 (several words) or 0.6 (a first name alone) asks for it.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dynamo.semantic.classifiers import pii

SEVERAL_WORDS, ONE_WORD = 0.65, 0.6  # confidence
_WORD = r"[^\W\d_a-z][^\W\d_A-Z]{1,20}(?:[-'][^\W\d_a-z][^\W\d_A-Z]{1,20})?"
_RUN = re.compile(rf"(?<![\w@#.]){_WORD}(?: (?:[A-Z]\. ?)?{_WORD}){{0,4}}")
_PART = re.compile(_WORD)


class NameFinder:
    """Finds a first name and the capitalised words behind it that are no common words."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as stored:
            self._first = frozenset(bytes(stored["first"]).decode().split("\n"))
            self._common = frozenset(bytes(stored["common"]).decode().split("\n"))

    def find(self, text: str) -> Iterator[pii.PiiSpan]:
        """Yield the names in a text, in order."""
        for run in _RUN.finditer(text[: pii.MAX_CHARACTERS]):
            parts: list[re.Match[str]] = []
            for part in _PART.finditer(text, run.start(), run.end()):
                if part[0].lower() in self._common:
                    yield from self._name_of(parts)
                    parts = []
                else:
                    parts.append(part)
            yield from self._name_of(parts)

    def _name_of(self, parts: list[re.Match[str]]) -> Iterator[pii.PiiSpan]:
        """Yield the name that neighbouring words are, if the first is a first name."""
        if parts and parts[0][0].lower() in self._first:
            confidence = SEVERAL_WORDS if len(parts) > 1 else ONE_WORD
            yield pii.PiiSpan("PERSON", parts[0].start(), parts[-1].end(), confidence)
