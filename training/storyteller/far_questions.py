"""Questions that people really asked, far from what the grammar knows, with the answer that says so.

The grammar's own questions of this kind have few forms, and a model that learned only those answers others with
nonsense. These come from public sets with a free licence (see the README); none of their texts is in the package.
"""

import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from training.semantic.texts import read, read_plain_questions
from training.storyteller.grammar import refusals
from training.storyteller.grammar.dice import Dice
from training.storyteller.grammar.messages import Conversation, Message
from training.storyteller.grammar.quick_starts import TERMS
from training.storyteller.grammar.small_tasks import PEOPLE

LONGEST = 160  # characters
SHARE = 0.4  # of the conversations get such a question, before, after or beside them
PER_SOURCE = 1000
# What the grammar has an answer to, or may have.
ANSWERED = re.compile(
    r"""\b(stor(y|ies)|tale|poems?|rhymes?|haiku|limerick|joke|riddle|recipes?|cook(ing)?|bake|ingredients?|dinner|meal
    |hello|hi|hey|thanks?|thank|bye|goodbye|name|names|named|called|who\ are\ you|what\ are\ you|you\ (a|an)|your
    |are\ you|do\ you|did\ you|can\ you\ do|repeat|say|spell|translate|definition|define|mean(s|ing)?|synonym|opposite
    |capital|weather|rain|forecast|temperature|time|date|day|today|travel|trip|visit|tourist|vacation|holiday|plus
    |minus|times|multipl\w+|divided|add|sum|count|letters?|e-?mail|mail|sql|python|json|sentiment|classify|sky|fruits?
    |animals?|colou?rs?|planets?|moon|sun|photosynthesis|roman|world\ series|coin|dice|write|list|summari[sz]e|plants?
    |leaves|ice|water|magnets?|earth|discovered|pancakes|soup|eat|sleep|procrastinat\w+|language|world|real|clouds?
    |reverse|backwards|sort|order\ these|largest|smallest|biggest|prime|regex|fix|correct|proofread|shorten|tl;dr
    |pirate|recommend|suggest|movie|film|book|tweet|noun|verb|pi|loop|javascript|bash|dockerfile|made\ of|consist
    |grammar|hot|cold|wet|fly|swim|bark|reply|respond|print|output|love|have|left|ok|okay|cool|roses|fox|alphabet|uppercase|person|people)\b
    |\d\s*[-+*/x×=]\s*\d|\d.*\D\d""",
    re.VERBOSE | re.IGNORECASE,
)


def read_far_questions(texts: Path, *, kept_back: bool = False) -> list[str]:
    """Return the short questions of the public sets in `texts` that the grammar has no answer to.

    Those that are `kept_back` come from the set on which false alarms of guards are counted.
    """
    if kept_back:
        return list(_far(row["text"] for row in read(texts, "plain_chat_dev")))
    rows = [row for row in read(texts, "jailbreak_train") if row["label"] == "benign"]
    by_source: dict[str, list[str]] = {}
    for row in rows + read(texts, "domain_train"):
        by_source.setdefault(row["source"], []).append(row["text"])
    plain = [row["text"] for row in read_plain_questions()[0]] * 3
    return [*_far(plain), *(each for source in by_source.values() for each in _some(_far(source)))]


def _some(questions: Iterable[str]) -> list[str]:
    shuffled = sorted(questions, key=lambda each: zlib.crc32(each.encode()))
    return shuffled[:PER_SOURCE]


def _far(texts: Iterable[str]) -> Iterator[str]:
    terms = "|".join(
        re.escape(term.removeprefix("a ").removeprefix("an ").removeprefix("the "))
        for term in (*TERMS, *PEOPLE)
    )
    answered = re.compile(rf"{ANSWERED.pattern}|\b({terms})\b", ANSWERED.flags)
    return (text for text in texts if len(text) <= LONGEST and not answered.search(text))


def add_far_questions(
    conversations: Iterable[Conversation], questions: list[str], seed: str
) -> Iterator[Conversation]:
    """Yield the conversations, some with a far question before, after or beside them."""
    for number, conversation in enumerate(conversations):
        dice = Dice(f"far/{seed}/{number}")
        if not dice.chance(SHARE):
            yield conversation
            continue
        asked = refusals.refuse(dice, dice.pick(questions))
        alone = conversation.text or conversation.tools or conversation.enable_thinking
        if alone or dice.chance(0.5):
            yield conversation
            yield Conversation(tuple(asked))
        else:
            yield Conversation(_beside(dice, conversation.messages, asked))


def _beside(dice: Dice, messages: tuple[Message, ...], asked: list[Message]) -> tuple[Message, ...]:
    if dice.chance(0.5):
        return (*messages, *asked)
    num_before = 1 if messages and messages[0].role == "system" else 0
    return (*messages[:num_before], *asked, *messages[num_before:])
