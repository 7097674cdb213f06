"""The fast profile: the three classifiers that ship with this package, loaded once for a process.

The domain of a question is one of the 14 categories of MMLU-Pro.
"""  # decider

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dynamo.semantic.classifiers import attacks, entities, pii, words

OTHER = "other"
LEAST_CONFIDENCE = 0.3  # below it a question is taken for `other`


@dataclass(frozen=True, slots=True)
class DomainScore:
    """The most probable category, and the probability of each."""

    category: str
    confidence: float
    probabilities: dict[str, float]


class DomainClassifier:
    """A word model over the text of the last user message."""

    def __init__(self, path: Path, lexicon: words.Lexicon | None = None) -> None:
        self._model = words.WordModel(path, lexicon)
        self.categories = tuple(self._model.classes)

    def classify(self, text: words.TokenizedText) -> DomainScore:
        """Return the category of a tokenized text; `other` where none is likely, or nothing is known of it."""
        probabilities = words.softmax(self._model.logits(text))
        by_name = dict(zip(self.categories, map(float, probabilities), strict=True))
        best = max(by_name, key=by_name.__getitem__)
        if by_name[best] < LEAST_CONFIDENCE or not text.words:
            best = OTHER
        return DomainScore(best, by_name[best], by_name)


WEIGHTS = Path(__file__).with_name("weights")


class FastProfile:
    """Domain, attacks and personal data, for English text."""

    def __init__(self) -> None:
        paths = [WEIGHTS / "domain.npz", WEIGHTS / "attacks.npz"]
        lexicon = words.Lexicon([words.read_vocabulary(path) for path in paths])
        self._domain = DomainClassifier(paths[0], lexicon)
        self._attacks = attacks.AttackClassifier(paths[1], lexicon)
        self._entities = entities.EntityTagger(WEIGHTS / "entities.npz")
        self.categories = frozenset(self._domain.categories)

    def classify_domain(self, text: str) -> DomainScore:
        return self._domain.classify(words.tokenize(text))

    def classify_attack(self, text: str) -> attacks.AttackScore:
        return self._attacks.classify(text)

    def embed(self, text: str) -> None:
        """Return no vector: an encoder gives them."""

    def find_names(self, text: str) -> Iterator[pii.PiiSpan]:
        """Yield the names and addresses in a text by the tagger alone."""
        return self._entities.find(text)

    def find_pii(self, text: str) -> tuple[list[pii.PiiSpan], bool]:
        return pii.find_spans(text, self.find_names(text))


@lru_cache(1)
def load_profile() -> FastProfile:
    """Return the profile of this process."""
    return FastProfile()
