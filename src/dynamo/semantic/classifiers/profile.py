"""The fast profile: the three classifiers that ship with this package, loaded once for a process."""

from functools import lru_cache
from pathlib import Path

from dynamo.semantic.classifiers import attacks, domain, names, pii, words

WEIGHTS = Path(__file__).with_name("weights")


class FastProfile:
    """Domain, attacks and personal data, for English text."""

    def __init__(self, weights: Path = WEIGHTS) -> None:
        self._domain = domain.DomainClassifier(weights / "domain.npz")
        self._attacks = attacks.AttackClassifier(weights / "attacks.npz")
        self._names = names.NameFinder(weights / "names.npz")
        self.categories = frozenset(self._domain.categories)

    def classify_domain(self, text: str) -> domain.DomainScore:
        """Return the category of a text; `other` where none is likely."""
        return self._domain.classify(words.tokenize(text))

    def classify_attack(self, text: str) -> attacks.AttackScore:
        """Return the risk that some window of the text is an attack."""
        return self._attacks.classify(text)

    def find_pii(self, text: str) -> tuple[list[pii.PiiSpan], bool]:
        """Return the personal data in a text, and whether all of it was read."""
        return pii.find_spans(text, self._names.find(text))


@lru_cache(1)
def load_profile() -> FastProfile:
    """Return the profile of this process."""
    return FastProfile()
