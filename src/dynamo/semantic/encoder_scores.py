"""The classifiers of one request: what the encoders answered, and the shipped classifiers where no model is configured.

`risk` is the probability that some window is an attack: the share of all labels but the harmless ones. Patterns with
checksums go before a model's personal data. Without an answer a guard fails, as its configuration says, and the domain
is the fallback category.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dynamo.base import errors
from dynamo.protocols import classification
from dynamo.semantic import encoder_labels
from dynamo.semantic.classifiers import attacks, pii, profile

Answers = Mapping[tuple[str, str], classification.TextLabels]  # by classifier and text


class EncoderScores:
    """Answers of encoders for the texts of one request, in the form of the shipped classifiers."""

    def __init__(
        self,
        fast: profile.FastProfile,
        models: Mapping[str, encoder_labels.EncoderModel],
        answers: Answers,
        fallback_category: str,
    ) -> None:
        self._fast = fast
        self._models = models
        self._answers = answers
        self._fallback_category = fallback_category

    def classify_domain(self, text: str) -> profile.DomainScore:
        """Return the category of a text, by the mean over its windows."""
        if encoder_labels.DOMAIN not in self._models:
            return self._fast.classify_domain(text)
        answer = self._answers.get((encoder_labels.DOMAIN, text))
        if answer is None or not answer.windows:
            return profile.DomainScore(self._fallback_category, 0.0, {})
        means = np.mean(answer.windows, axis=0).tolist()
        by_name = dict(zip(answer.labels, means, strict=True))
        best = max(by_name, key=by_name.__getitem__)
        return profile.DomainScore(best, by_name[best], by_name)

    def classify_attack(self, text: str) -> attacks.AttackScore:
        """Return the risk that some window of the text is an attack. Raises Unavailable."""
        if encoder_labels.ATTACK not in self._models:
            return self._fast.classify_attack(text)
        answer = self._answer(encoder_labels.ATTACK, text)
        if not answer.windows:
            return attacks.AttackScore(0.0, "benign", (), answer.is_complete)
        kinds = [
            n for n, label in enumerate(answer.labels) if not encoder_labels.is_harmless(label)
        ]
        worst = max(answer.windows, key=lambda shares: sum(shares[kind] for kind in kinds))
        risk = min(1.0, sum(worst[kind] for kind in kinds))
        kind = answer.labels[max(kinds, key=worst.__getitem__)] if risk >= 0.5 else "benign"
        return attacks.AttackScore(risk, kind, (), answer.is_complete)

    def find_pii(self, text: str) -> tuple[list[pii.PiiSpan], bool]:
        """Return the personal data in a text, and whether all of it was read. Raises Unavailable."""
        if encoder_labels.PII not in self._models:
            return self._fast.find_pii(text)
        answer = self._answer(encoder_labels.PII, text)
        names = [pii.PiiSpan(s.label, s.start, s.end, s.confidence) for s in answer.spans]
        spans, is_complete = pii.find_spans(text, names)
        return spans, is_complete and answer.is_complete

    def _answer(self, classifier: str, text: str) -> classification.TextLabels:
        answer = self._answers.get((classifier, text))
        if answer is None:
            raise errors.Unavailable(f"the encoder of the classifier {classifier} did not answer")
        return answer


def list_inputs(
    models: Mapping[str, encoder_labels.EncoderModel], user_text: str, texts: Sequence[str]
) -> list[classification.ClassifierInput]:
    """Return what the encoders have to read of a request: the user's last text, and for guards all texts, once each."""
    inputs = []
    if encoder_labels.DOMAIN in models and user_text:
        inputs.append(classification.ClassifierInput(encoder_labels.DOMAIN, user_text))
    for name in (encoder_labels.ATTACK, encoder_labels.PII):
        if name in models:
            inputs += [classification.ClassifierInput(name, text) for text in dict.fromkeys(texts)]
    return inputs
