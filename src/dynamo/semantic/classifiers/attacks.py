"""Attacks on a model's instructions (jailbreaks and injections): a word model over windows, and rules."""  # decider

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dynamo.semantic.classifiers import ciphers, disguises, words

KINDS = ("benign", "attack", "application")  # the last is an application's own system prompt
SURE_RULE = "request-in-table"  # decides alone; a model does not see what the line stands between
WINDOW_SIZES = (512, 96)  # tokens; the small ones find a short attack inside a long text
USUAL_MARGIN = math.log(0.7 / 0.3)  # the log odds of the published threshold, 0.7
_FEW_WORDS = 48  # tokens; the fewer words, the less a word from attacks says
_AROUND = 100  # characters before and behind a rule's match that are judged with it
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
        r"ethics|morals|safeguards|policies)\b"
    ),
    "persona": re.compile(
        r"\b(?:do anything now|developer mode|jailbr(?:oken|eak) mode|god mode|dan mode|evil (?:bot|ai|confidant)|"
        r"unfiltered (?:ai|model|assistant|and amoral)|stay in character|you are no longer (?:an? )?(?:ai|"
        r"assistant|chatgpt))\b"
    ),
    "never-refuse": re.compile(
        r"\b(?:never|cannot|can't|must not|do not|don't|will not|won't) (?:ever )?(?:refuse|reject|decline|"
        r"say (?:that )?you (?:can't|cannot)|apologi[sz]e|break character)\b"
    ),
    "reveal-prompt": re.compile(
        r"\b(?:reveal|show|print|repeat|output|tell me|display|leak|spell)\b.{0,30}?\b(?:system|initial|"
        r"hidden|original|secret|"
        r"full|above|previous)\b.{0,15}?\b(?:prompt|instructions?|prompt ?texts?)\b",
        re.DOTALL,
    ),
}

_NEEDED = {  # of which a text has one, or the rule cannot match: looking for them costs a tenth of the pattern
    "ignore-instructions": ("ignore", "disregard", "forget", "override", "bypass", "skip"),
    "no-restrictions": (
        *("restriction", "limitation", "filter", "censorship", "guideline", "ethic", "moral"),
        *("safeguard", "policies"),
    ),
    "persona": (
        *("do anything now", "developer mode", "jailbr", "god mode", "dan mode", "evil "),
        *("unfiltered", "stay in character", "no longer"),
    ),
    "never-refuse": ("refuse", "reject", "decline", "say ", "apologi", "break character"),
    "reveal-prompt": ("prompt", "instruction"),
}

# A line without columns between two rows of a table, or inside of one: not between a table and the head of another.
# Rows begin with `|`, as the lines of shells and grammars do not. Possessive, so that no line is read twice.
_STRAY_LINE = re.compile(
    r"^[ \t]*+\|[^\n|]*+\|[^\n]*+\n([^\n|]{12,300})\n(?=[^\n]*\|)(?![^\n]*+\n[ \t]*+\|[ :]*+-)",
    re.MULTILINE,
)
_ROW = re.compile(r"^[ \t]*+\|(?:[^\n|]*+\|){2,}+[ \t]*+$", re.MULTILINE)
_REQUEST = re.compile(  # in lower case; a row of question marks is looked at once
    r"\b(?:your|the) (?:response|reply|answer|output)\b|(?:^|\w)[^\w?]*+\?\W*+$|"
    r"^\W*+(?:please|what|who|when|where|which|why|how|do|"
    r"don't|never|write|compose|draft|create|develop|provide|translate|give|tell|explain|describe|suggest|recommend|"
    r"summari[sz]e|identify|list|find|calculate|convert|add|remove|use|insert|include|ignore|send|click|visit|say|"
    r"print|answer|respond|repeat|encode|reverse|replace)\b"
)


# The beginning of most system prompts, which says nothing; the model knows it from attacks, as all that is said of AI.
_USUAL_ROLE = re.compile(
    r"\byou are (?:(?:an?|the|helpful|harmless|honest|respectful|friendly|polite|professional|concise|knowledgeable|"
    r"virtual|digital|ai|and)[ ,]+)*(?:assistant|chatbot|bot|(?:large )?language model|"
    r"[\w.-]{1,20}, (?:an? (?:large )?(?:language|ai) model )?(?:trained|created|made|developed) by \w+(?: cloud)?)\b"
    r"(?=\s*(?:[.!,;\n]|\Z))",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class AttackScore:
    """The result for one text."""

    risk: float  # the probability of an attack, 0 to 1
    kind: str  # jailbreak or benign
    rules: tuple[str, ...]  # the names of the rules that matched
    is_complete: bool = True  # all of the text was read


class AttackClassifier:
    """Finds attacks anywhere in a text: the risk is that of its worst window."""

    rule_margin = 2.0  # added to the log odds for each rule that matches, three at most
    short_margin = 1.5  # taken from the log odds of a text of hardly a word; less of longer ones
    stray_margin = math.log(0.9 / 0.1)  # the least log odds where a request stands inside a table

    def __init__(self, path: Path, lexicon: words.Lexicon | None = None) -> None:
        self._model = words.WordModel(path, lexicon)
        with np.load(path, allow_pickle=False) as stored:
            self._offsets = [float(offset) for offset in stored["offsets"]]

    def classify(self, text: str) -> AttackScore:
        """Return the risk of a text of any length, and of what it hides in another alphabet or spelling."""
        is_complete = words.tokenize(text).is_complete
        margin = -math.inf
        rules: tuple[str, ...] = ()
        text = _USUAL_ROLE.sub("", text[: words.MAX_TOKENS * 16])
        for spelled in ciphers.undo_escapes(text):
            for reading in (spelled, *disguises.read_disguised(spelled)):
                tokenized = words.tokenize(reading)
                is_complete = is_complete and tokenized.is_complete
                found_margin, found_rules = self._margin(tokenized, reading)
                margin = max(margin, found_margin)
                rules += tuple(rule for rule in found_rules if rule not in rules)
        risk = 1 / (1 + math.exp(-max(-50.0, min(50.0, margin))))
        return AttackScore(risk, "jailbreak" if risk >= 0.5 else "benign", rules, is_complete)

    def _margin(self, tokenized: words.TokenizedText, text: str) -> tuple[float, tuple[str, ...]]:
        """Return the log odds of the worst window, and the rules that match.

        What stands around a rule's match is judged alone, too: words before and behind do not outweigh it.
        """
        rows = self._model.token_rows(tokenized)
        lowered = text.lower()
        matches = _find_rules(lowered)
        margin = -math.inf
        for size, offset in zip(WINDOW_SIZES, self._offsets, strict=True):
            logits = self._model.window_logits(rows, (size,))
            margin = max(margin, float((logits[:, 1] - logits[:, 0]).max()) - offset)
        for piece in _pieces_around(lowered, matches.values(), len(rows) > WINDOW_SIZES[1]):
            logits = self._model.logits(words.TokenizedText(words.split(piece)))
            margin = max(margin, float(logits[1] - logits[0]) - self._offsets[0])
        if not matches:
            margin -= self.short_margin * max(0.0, 1 - len(rows) / _FEW_WORDS)
        margin += self.rule_margin * min(3, len(matches))
        if _has_stray_request(lowered):
            return max(margin, self.stray_margin), (*matches, SURE_RULE)
        return margin, tuple(matches)


def _pieces_around(lowered: str, matches: Iterable[re.Match[str]], is_long: bool) -> Iterator[str]:
    """Yield what stands around matches: their lines and, in a long text, the characters beside them."""
    for match in matches:
        start, end = max(0, match.start() - _AROUND), match.end() + _AROUND
        if is_long:
            yield lowered[start:end]
        first = lowered.rfind("\n", 0, match.start()) + 1
        last = lowered.find("\n", match.end())
        last = len(lowered) if last < 0 else last
        if start < first or last < min(end, len(lowered)):
            yield lowered[max(start, first) : min(last, end)]


def _has_stray_request(lowered: str) -> bool:
    """Return whether a line inside of a table asks for something."""
    if "|" not in lowered or not any(map(_REQUEST.search, _STRAY_LINE.findall(lowered))):
        return False
    return len([*itertools.islice(_ROW.finditer(lowered), 2)]) == 2


def _find_rules(lowered: str) -> dict[str, re.Match[str]]:
    found = (
        (name, pattern.search(lowered))
        for name, pattern in _RULES.items()
        if any(needed in lowered for needed in _NEEDED[name])
    )
    return {name: match for name, match in found if match is not None}
