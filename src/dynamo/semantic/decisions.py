"""Decisions: from the signals of a text to the decision that applies, with its reasons."""  # decider

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.base import errors
from dynamo.semantic import config
from dynamo.semantic.classifiers import disguises, profile

_WORD_SIGN = rf"[^\W{disguises.UNSPACED_LETTERS}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What is known of the last user text."""

    keyword_rule: str | None = None
    embedding_rule: str | None = None
    embedding_score: float = 0.0
    missing_embedding: str = ""  # why no rule by embedding could hold
    domain_score: profile.DomainScore | None = None
    domain_names: frozenset[str] = frozenset()  # the category and the configured names for it


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedDecision:
    """A decision that applies."""

    settings: config.DecisionSettings
    confidence: float  # matched conditions of all, 0 to 1
    strength: float  # of the strongest signal that it rests on: 1 for keywords, else a probability or a cosine
    reasons: tuple[str, ...] = field(default=())


class KeywordMatcher:
    """Finds the first keyword rule that a text satisfies. Keywords are literal: no pattern of a user's runs."""

    def __init__(self, rules: Iterable[config.KeywordRule]) -> None:
        self._rules = [
            (rule, [_compile_keyword(word, rule) for word in rule.keywords if word])
            for rule in rules
        ]

    def match(self, text: str) -> str | None:
        """Return the name of the first rule that holds; None if none does."""
        text = disguises.normalize("NFC", text)  # "é" may come as an e and its accent
        lowered = text.lower()
        for rule, keywords in self._rules:
            subject = text if rule.case_sensitive else lowered
            matches = [
                literal in subject and pattern.search(subject) is not None
                for literal, pattern in keywords
            ]
            holds = {"OR": any(matches), "AND": all(matches), "NOR": not any(matches)}
            if matches and holds[rule.operator]:
                return rule.name
        return None


def _compile_keyword(word: str, rule: config.KeywordRule) -> tuple[str, re.Pattern[str]]:
    """Return a keyword, and what finds it between word boundaries where it has word characters at its ends.

    Letters of scripts that set no spaces between words are no such characters: they bound nothing.
    """
    word = disguises.normalize("NFC", word)
    literal = word if rule.case_sensitive else word.lower()
    start = f"(?<!{_WORD_SIGN})" if re.match(_WORD_SIGN, word) else ""
    end = f"(?!{_WORD_SIGN})" if re.search(rf"{_WORD_SIGN}\Z", word) else ""
    return literal, re.compile(start + re.escape(literal) + end)


class DecisionTable:
    """All decisions of a configuration, in the order of the strategy."""

    def __init__(self, settings: config.SemanticConfig) -> None:
        self._decisions = sorted(settings.decisions, key=lambda decision: -decision.priority)
        self._by_confidence = settings.strategy == "confidence"
        self._names_by_category: dict[str, set[str]] = {}
        for category in settings.categories:
            for label in (category.name, *category.mmlu_categories):
                self._names_by_category.setdefault(spaced(label), set()).add(category.name)

    @property
    def needs_domain(self) -> bool:
        """Return whether a decision rests on the domain."""
        return any(
            condition.type == "domain"
            for decision in self._decisions
            for condition in list_signals(decision.rules.conditions)
        )

    def names_of(self, category: str) -> frozenset[str]:
        """Return the names under which decisions may ask for a category of the classifier."""
        return frozenset({category, *self._names_by_category.get(spaced(category), ())})

    def matches(self, signals: Signals) -> Sequence[MatchedDecision]:
        """Return the decisions that apply, the one to take first."""
        matched = [match for one in self._decisions if (match := _match(one, signals)) is not None]
        if self._by_confidence:
            matched.sort(key=lambda match: -match.confidence)
        return matched


def _match(decision: config.DecisionSettings, signals: Signals) -> MatchedDecision | None:
    conditions, operator = decision.rules.conditions, decision.rules.operator
    satisfied = [condition for condition in conditions if _holds(condition, signals)]
    if not conditions or not _combine(operator, len(satisfied), len(conditions)):
        return None
    if not satisfied:
        reason = "none of " + ", ".join(_label(condition) for condition in conditions)
        return MatchedDecision(settings=decision, confidence=1.0, strength=0.0, reasons=(reason,))
    return MatchedDecision(
        settings=decision,
        confidence=len(satisfied) / len(conditions),
        strength=max(_strength(condition, signals) for condition in satisfied),
        reasons=tuple(_label(condition) for condition in satisfied),
    )


def _combine(operator: config.Operator, num_satisfied: int, num_conditions: int) -> bool:
    if operator == "AND":
        return num_satisfied == num_conditions
    return (num_satisfied > 0) == (operator == "OR")


def _holds(condition: config.Condition, signals: Signals) -> bool:
    if inner := condition.conditions:
        num_satisfied = sum(_holds(each, signals) for each in inner)
        return _combine(condition.operator, num_satisfied, len(inner))
    if condition.type == "keyword":
        return condition.signal == signals.keyword_rule
    if condition.type == "embedding":
        return condition.signal == signals.embedding_rule
    return condition.signal in signals.domain_names


def _strength(condition: config.Condition, signals: Signals) -> float:
    if condition.conditions:
        satisfied = [each for each in condition.conditions if _holds(each, signals)]
        return max((_strength(each, signals) for each in satisfied), default=0.0)
    if condition.type == "embedding":
        return signals.embedding_score
    if condition.type == "keyword" or signals.domain_score is None:
        return 1.0
    return signals.domain_score.confidence


def _label(condition: config.Condition) -> str:
    if condition.conditions:
        return f"{condition.operator} ({', '.join(map(_label, condition.conditions))})"
    return f"{condition.type} {condition.signal}"


def list_signals(conditions: Iterable[config.Condition]) -> Iterator[config.Condition]:
    """Yield the conditions that ask for a signal, those inside of others too."""
    for condition in conditions:
        if condition.conditions:
            yield from list_signals(condition.conditions)
        else:
            yield condition


def check_conditions(
    path: str, conditions: Sequence[config.Condition], names_by_type: Mapping[str, Collection[str]]
) -> None:
    """Raise ConfigError for a condition on a signal that is not supported, or that nothing defines."""
    for number, condition in enumerate(conditions):
        place = f"{path}.conditions[{number}]"
        if condition.conditions:
            check_conditions(place, condition.conditions, names_by_type)
            continue
        if condition.type not in names_by_type:
            raise errors.ConfigError(
                f"{place}.type: {condition.type!r} is not supported; expected one of {', '.join(names_by_type)}"
            )
        check_label(f"{place}: {condition.type}", condition.signal, names_by_type[condition.type])


def spaced(label: str) -> str:
    """Return the label of a category with blanks where published values write underscores."""
    return label.replace("_", " ")


def check_label(path: str, label: str, known: Collection[str]) -> None:
    """Raise ConfigError for a name that is not among those that are known."""
    if label not in known:
        expected = f"one of {sorted(known)}" if known else "a name of which none is defined"
        raise errors.ConfigError(f"{path}: no such name: {label!r}; expected {expected}")


def strength_by_model(matches: Sequence[MatchedDecision]) -> Mapping[str, float]:
    """Return for each model the strength of the best decision that would select it."""
    strengths: dict[str, float] = {}
    for match in matches:
        for reference in match.settings.modelRefs[:1]:
            name = reference.served_name
            strengths[name] = max(strengths.get(name, 0.0), match.strength)
    return strengths


def is_first(match: MatchedDecision | None, matches: Sequence[MatchedDecision]) -> bool:
    """Return whether a decision is the one that the text alone would have, not one that its conversation keeps."""
    names = [first.settings.name for first in matches[:1]]
    return names == ([] if match is None else [match.settings.name])
