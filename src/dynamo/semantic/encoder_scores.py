"""The classifiers of one request: what the encoders answered, and the shipped classifiers where no model is configured.

`risk` is the probability that some window is an attack: the share of all labels but the harmless ones. Patterns with
checksums go before a model's personal data. Without an answer a guard fails, as its configuration says, and the domain
is the fallback category.

The exact profile joins an encoder with the word models, by the weighted sum of their log probabilities: they make
different mistakes. Names are the encoder's, surer where the tagger sees them too. Without the encoder's answer the word
models decide alone.
"""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from dynamo.base import errors
from dynamo.protocols import encoders
from dynamo.semantic import encoder_labels
from dynamo.semantic.classifiers import attacks, disguises, pii, profile, words

# The share of the encoder in the exact profile; the rest is that of the word models, which make other mistakes.
EXACT_SHARE = 0.6
UNSEEN_COST = 0.18  # taken from the confidence in a name or address that only the encoder sees
UNSURE_DOMAIN = 0.7  # below this confidence of the word model the encoder is asked, too
UNSURE_RISK = (0.1, 0.95)
_LEAST_SHARE = 1e-6
Answers = Mapping[tuple[str, str], encoders.TextLabels]  # by classifier and text


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
            return self._join_domains(text, self._fast.classify_domain(text))
        answer = self._answers.get((encoder_labels.DOMAIN, text))
        if answer is None or not answer.windows:
            return profile.DomainScore(self._fallback_category, 0.0, {})
        by_name = _mean_by_label(answer)
        best = max(by_name, key=by_name.__getitem__)
        return profile.DomainScore(best, by_name[best], by_name)

    def classify_attack(self, text: str) -> attacks.AttackScore:
        """Return the risk that some window of the text is an attack. Raises Unavailable."""
        if encoder_labels.ATTACK not in self._models:
            return self._join_risks(text, self._fast.classify_attack(text))
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
        if encoder_labels.PII in self._models:
            answer = self._answer(encoder_labels.PII, text)
            spans, is_complete = pii.find_spans(text, _spans_of(answer))
            return spans, is_complete and answer.is_complete
        exact = self._answers.get((encoder_labels.EXACT[encoder_labels.PII], text))
        if exact is None:
            return self._fast.find_pii(text)
        tagged = list(self._fast.find_names(text))
        names = [_weigh_span(span, tagged) for span in _spans_of(exact)]
        return pii.find_spans(text, sorted(names, key=lambda span: -span.confidence))

    def embed(self, text: str) -> npt.NDArray[np.float32] | None:
        """Return the vector of a text, of length 1; None if the encoder did not answer."""
        return vector_in(self._answers, text)

    def _join_domains(self, text: str, fast: profile.DomainScore) -> profile.DomainScore:
        """Return the category by the encoder and the word model together; the latter's without an answer."""
        answer = self._answers.get((encoder_labels.EXACT[encoder_labels.DOMAIN], text))
        if answer is None or not answer.windows:
            return fast
        exact = _mean_by_label(answer)
        logs = {
            name: EXACT_SHARE * math.log(exact[name] + _LEAST_SHARE)
            + (1 - EXACT_SHARE) * math.log(share + _LEAST_SHARE)
            for name, share in fast.probabilities.items()
        }
        total = sum(map(math.exp, logs.values()))
        by_name = {name: math.exp(value) / total for name, value in logs.items()}
        best = max(by_name, key=by_name.__getitem__)
        if by_name[best] < profile.LEAST_CONFIDENCE:
            best = profile.OTHER
        return profile.DomainScore(best, by_name[best], by_name)

    def _join_risks(self, text: str, fast: attacks.AttackScore) -> attacks.AttackScore:
        """Return the risk by the encoder and the word model together; the latter's without an answer."""
        answer = self._find_answer(encoder_labels.ATTACK, text)
        if answer is None or not answer.windows:
            return fast
        exact = _log_odds(max(window[1] for window in answer.windows))
        margin = EXACT_SHARE * exact + (1 - EXACT_SHARE) * _log_odds(fast.risk)
        risk = 1 / (1 + math.exp(-margin))
        if attacks.SURE_RULE in fast.rules:
            risk = max(risk, fast.risk)
        kind = "jailbreak" if risk >= 0.5 else "benign"
        return attacks.AttackScore(risk, kind, fast.rules, fast.is_complete)

    def _answer(self, classifier: str, text: str) -> encoders.TextLabels:
        answer = self._find_answer(classifier, text)
        if answer is None:
            raise errors.Unavailable(f"the encoder of the classifier {classifier} did not answer")
        return answer

    def _find_answer(self, classifier: str, text: str) -> encoders.TextLabels | None:
        """Return the answer for a text, with the windows of what it hides; None if one is missing."""
        name = classifier if classifier in self._models else encoder_labels.EXACT[classifier]
        answers = [self._answers.get((name, part)) for part in list_readings(classifier, text)]
        found = [answer for answer in answers if answer is not None]
        if len(found) < len(answers):
            return None
        return msgspec.structs.replace(
            found[0],
            windows=tuple(window for answer in found for window in answer.windows),
            is_complete=all(answer.is_complete for answer in found),
        )


def list_readings(classifier: str, text: str) -> list[str]:
    """Return a text and, for attacks, all that it hides as one more."""
    if classifier != encoder_labels.ATTACK:
        return [text]
    hidden = "\n".join(disguises.read_disguised(text[: words.MAX_TOKENS * 16]))
    return [text, hidden] if hidden else [text]


def vector_in(answers: Answers, text: str) -> npt.NDArray[np.float32] | None:
    """Return the vector of a text in the answers; None if there is none."""
    answer = answers.get((encoder_labels.EMBEDDING, text))
    return np.frombuffer(answer.vector, "<f4") if answer is not None and answer.vector else None


def list_inputs(
    models: Mapping[str, encoder_labels.EncoderModel],
    profile_name: str,
    fast: profile.FastProfile,
    texts_by_classifier: Mapping[str, Sequence[str]],
) -> list[encoders.ClassifierInput]:
    """Return what the encoders have to read, each text once for each classifier.

    A configured model reads all; the exact profile the rest, or with `unsure` what the word models are unsure of.
    What a text hides from the classifier of attacks is read, too.
    """
    inputs = []
    for classifier, texts in texts_by_classifier.items():
        name = classifier if classifier in models else encoder_labels.EXACT[classifier]
        for text in dict.fromkeys(texts):
            is_read = classifier in models or profile_name == "exact"
            if is_read or (profile_name == "unsure" and _is_unsure(fast, classifier, text)):
                readings = list_readings(classifier, text)
                inputs += [encoders.ClassifierInput(name, reading) for reading in readings]
    return inputs


def _is_unsure(fast: profile.FastProfile, classifier: str, text: str) -> bool:
    if classifier == encoder_labels.DOMAIN:
        return fast.classify_domain(text).confidence < UNSURE_DOMAIN
    if classifier == encoder_labels.ATTACK:
        return UNSURE_RISK[0] < fast.classify_attack(text).risk < UNSURE_RISK[1]
    return any(span.type == "PERSON" for span in fast.find_pii(text)[0])


def _spans_of(answer: encoders.TextLabels) -> list[pii.PiiSpan]:
    return [pii.PiiSpan(s.label, s.start, s.end, s.confidence) for s in answer.spans]


def _weigh_span(span: pii.PiiSpan, tagged: Sequence[pii.PiiSpan]) -> pii.PiiSpan:
    """Return a span of the encoder, less sure where the tagger, whose spans are in order, sees nothing."""
    number = bisect.bisect_left(tagged, span.end, key=lambda other: other.start)
    if number and tagged[number - 1].end > span.start:
        return span
    return dataclasses.replace(span, confidence=span.confidence - UNSEEN_COST)


def _mean_by_label(answer: encoders.TextLabels) -> dict[str, float]:
    means = np.mean(answer.windows, axis=0).tolist()
    return dict(zip(answer.labels, means, strict=True))


def _log_odds(share: float) -> float:
    share = min(1 - _LEAST_SHARE, max(_LEAST_SHARE, share))
    return math.log(share / (1 - share))
