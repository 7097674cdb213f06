"""What a question means, as far as words tell: two questions of one meaning may share an answer in the cache.

A wrong join is worse than a missed one. The questions are first brought into one wording (`question_forms`); then both
must have the same words, numbers, names, negations and operators. Only articles, forms of "to be" and the like may
differ. The order may differ only for what a preposition or a genitive attaches ("a list in Python", "a Python list"),
for superlatives, and where a distance or a difference is asked for: "does A imply B" is not "does B imply A".
"""  # decider

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo.semantic import question_forms

_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+(?:'[^\W\d_]+)?|[^\w\s?!.,;:\"'`]|_")
_LETTER = re.compile(r"(?<=\S )A\b")  # of an answer or a vitamin; no article
_ENDINGS = re.compile(r"(?<=[^\W\d_]{3})(?:'s|(?<!s)s|')$")
_WORDS_BY_USE = {
    "free": "a an the is are am be do does what which and there that have has it its my",
    "attaches": "of in on at for with between per",
    "directs": "about to from than by before after over under against versus vs without through until since as like",
    "asks": "how why when where who whose whether can could should will",
}
_FREE, _ATTACHES, _DIRECTS, _ASKS = (frozenset(row.split()) for row in _WORDS_BY_USE.values())
_LIGHT = _FREE | _ATTACHES
_IS_SYMMETRIC = frozenset({"distance", "difference"})


@dataclass(frozen=True, slots=True)
class QuestionMeaning:
    """The words of a question that its answer depends on."""

    words: tuple[
        str, ...
    ]  # in their order, without those that only say what kind of question it is
    asks: frozenset[str]
    attached: frozenset[str]  # words behind a preposition or before a genitive's s
    weights: Mapping[str, float]  # of all words; those that may differ weigh little

    @property
    def key(self) -> list[str]:
        """Return what two questions of one meaning have in common, whatever the order of their words."""
        return sorted([*self.words, *self.asks])

    def agrees_with(self, other: "QuestionMeaning") -> bool:
        """Return whether a question of the same key has the same meaning."""
        if not (self.attached <= other.attached or other.attached <= self.attached):
            return False
        free = self.attached | other.attached
        if not _IS_SYMMETRIC.isdisjoint(self.words):
            free |= {word for word in self.words if not word[0].isdigit()}
        return self._fixed(free) == other._fixed(free)

    def _fixed(self, free: frozenset[str]) -> list[str]:
        return [w for w in self.words if w not in free and not w.endswith("est")]


def read_meaning(text: str) -> QuestionMeaning:
    """Return the meaning of a question."""
    tokens = _TOKEN.findall(question_forms.join_wordings(_LETTER.sub("_a", text)))
    is_symmetric = not _IS_SYMMETRIC.isdisjoint(tokens)
    words: list[str] = []
    asks, attached = set(), set()
    weights: dict[str, float] = {}
    before, relation = "", ""
    for position, token in enumerate(tokens):
        is_last = position == len(tokens) - 1
        stem = _stem(token)
        weights[stem] = weights.get(stem, 0.0) + (0.25 if token in _LIGHT else 1.0)
        if token in _ASKS:
            asks.add(token)
        elif token in _DIRECTS and not is_last:
            relation = "" if is_symmetric else f"{token} "
        elif token not in _LIGHT or (is_last and token in _ATTACHES):
            word = relation + stem
            words.append(word)
            if not word[0].isdigit() and (before in _ATTACHES or token.endswith("'s")):
                attached.add(word)
            relation = ""
        if token not in ("the", "a", "an", "my"):
            before = token
    return QuestionMeaning(tuple(words), frozenset(asks), frozenset(attached), weights)


def _stem(word: str) -> str:
    """Return a word without the ending of a plural or a genitive, as the first of its synonyms."""
    stem = _ENDINGS.sub("", word)
    return question_forms.SYNONYMS.get(stem) or question_forms.SYNONYMS.get(word) or stem
