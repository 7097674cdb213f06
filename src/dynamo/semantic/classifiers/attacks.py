"""Attacks on a model's instructions (jailbreaks and injections): a word model over windows, and rules."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dynamo.semantic.classifiers import words

WINDOW_SIZES = (512, 96)  # tokens; the small ones find a short attack inside a long text
USUAL_MARGIN = math.log(0.7 / 0.3)  # the log odds of the published threshold, 0.7
_RULES = {
    "ignore-instructions": re.compile(
        r"\b(?:ignore|disregard|forget|override|bypass|skip)\b.{0,40}?\b(?:all|any|every|previous|prior|above|"
        r"earlier|"
        r"preceding|your|the|system|initial)\b.{0,30}?\b(?:instructions?|prompts?|rules?|guidelines?|directions?|"
        r"commands?|assignments?|programming)\b",
        re.DOTALL,
    ),
    "no-restrictions": re.compile(
        r"\b(?:without|no|free (?:of|from)|not bound by|has no|ignore) (?:any |all |its |your |the )?(?:moral|"
        r"ethical|"
        r"content|safety|openai|usual|typical)?[ ,]{0,2}(?:restrictions|limitations|filters?|censorship|guidelines|"
        r"ethics|morals|safeguards|policies)\b",
    ),
    "persona": re.compile(
        r"\b(?:do anything now|developer mode|jailbr(?:oken|eak) mode|god mode|dan mode|evil (?:bot|ai|confidant)|"
        r"unfiltered (?:ai|model|assistant|and amoral)|stay in character|you are no longer (?:an? )?(?:ai|"
        r"assistant|chatgpt))\b",
    ),
    "never-refuse": re.compile(
        r"\b(?:never|cannot|can't|must not|do not|don't|will not|won't) (?:ever )?(?:refuse|reject|decline|"
        r"say (?:that )?you "
        r"(?:can't|cannot)|apologi[sz]e|break character)\b",
    ),
    "reveal-prompt": re.compile(
        r"\b(?:reveal|show|print|repeat|output|tell me|display|leak|spell)\b.{0,30}?\b(?:system|initial|"
        r"hidden|original|secret|"
        r"full|above|previous)\b.{0,15}?\b(?:prompt|instructions?|prompt ?texts?)\b",
        re.DOTALL,
    ),
}


@dataclass(frozen=True, slots=True)
class AttackScore:
    """The result for one text."""

    risk: float  # the probability of an attack, 0 to 1
    kind: str  # jailbreak or benign
    rules: tuple[str, ...]  # the names of the rules that matched
    is_complete: bool = True  # all of the text was read


class AttackClassifier:
    """Finds attacks anywhere in a text: the risk is that of its worst window."""

    rule_margin = 1.0  # added to the log odds for each rule that matches, three at most

    def __init__(self, path: Path) -> None:
        self._model = words.WordModel(path)
        with np.load(path, allow_pickle=False) as stored:
            self._offsets = [float(offset) for offset in stored["offsets"]]

    def classify(self, text: str) -> AttackScore:
        """Return the risk of a text of any length."""
        tokenized = words.tokenize(text)
        margin = -math.inf
        rows = self._model.token_rows(tokenized)
        for size, offset in zip(WINDOW_SIZES, self._offsets, strict=True):
            logits = self._model.window_logits(rows, (size,))
            margin = max(margin, float((logits[:, 1] - logits[:, 0]).max()) - offset)
        rules = matching_rules(text[: words.MAX_TOKENS * 16])
        margin += self.rule_margin * min(3, len(rules))
        risk = 1 / (1 + math.exp(-max(-50.0, min(50.0, margin))))
        return AttackScore(
            risk, "jailbreak" if risk >= 0.5 else "benign", rules, tokenized.is_complete
        )


def matching_rules(text: str) -> tuple[str, ...]:
    """Return the names of the rules that match somewhere in the text."""
    lowered = text.lower()
    return tuple(name for name, pattern in _RULES.items() if pattern.search(lowered))
