"""The domain of a question: one of the 14 categories of MMLU-Pro."""

from dataclasses import dataclass
from pathlib import Path

from dynamo.semantic.classifiers import words

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

    def __init__(self, path: Path) -> None:
        self._model = words.WordModel(path)
        self.categories = tuple(self._model.classes)

    def classify(self, text: words.TokenizedText) -> DomainScore:
        """Return the category of a tokenized text; `other` where none is likely, or nothing is known of it."""
        probabilities = words.softmax(self._model.logits(text))
        by_name = dict(zip(self.categories, map(float, probabilities), strict=True))
        best = max(by_name, key=by_name.__getitem__)
        if by_name[best] < LEAST_CONFIDENCE or not text.words:
            best = OTHER
        return DomainScore(best, by_name[best], by_name)
