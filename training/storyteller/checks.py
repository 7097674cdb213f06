"""The fixed set of checks: what is asked of a trained model, and what a right answer is.

Everything is drawn from the grammar under seeds of its own. The groups named `unseen` ask only what
training held out: pairs of numbers, wordings of a fact, heroes, subjects to refuse.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from training.storyteller import far_questions
from training.storyteller.first_questions import (
    KEPT_BACK,
    KEPT_BACK_LATER,
    KEPT_BACK_OF_QUICK_STARTS,
    KEPT_BACK_OF_SMALL_TASKS,
    KNOWN,
    holds,
)
from training.storyteller.grammar import (
    copying,
    documents,
    facts,
    memory,
    refusals,
    smalltalk,
    story_talk,
    structured,
    sums,
    tools,
    words,
)
from training.storyteller.grammar.dice import Dice
from training.storyteller.grammar.messages import Conversation, Message, exchange
from training.storyteller.grammar.stories import draw_story

Judge = Callable[[str], bool]
RECALL_KINDS = ("name", "kind", "trait", "home", "item", "friend", "threat", "spot")
# Nobody wrote a rule for these: they are questions as people ask them.
FAR_QUESTIONS = (
    "How do I change a bicycle tyre?",
    "What is the best way to learn the guitar?",
    "Who composed the Moonlight Sonata?",
    "Which team won yesterday?",
    "Can you recommend a good restaurant?",
    "What does my horoscope say?",
    "How do I file my taxes?",
    "What is the difference between a virus and a bacterium?",
    "Write a regular expression for emails.",
    "Why is my cat limping?",
    "How many calories are in a pizza?",
    "Is it safe to invest in shares?",
    "When was the printing press invented?",
    "What is the chemical formula of salt?",
    "How do I remove a stain from a carpet?",
    "Who invented the telephone?",
)
# Tools of people seldom answer in JSON.
PLAIN_RESULTS = ("It is noon.", "It is sunny.", "The red door is open.", "Everything went well.")


@dataclass(frozen=True, slots=True)
class Check:
    """A prompt and the judge of its answer; `groups` are the rows of the table it counts in."""

    prompt: Conversation
    judge_by_group: dict[str, Judge]
    num_tokens: int = 48


def all_checks() -> list[Check]:
    makers = (
        _sums, _facts, _recall, _stories, _names, _refusals, _json, _tools, _documents, _copies, _thoughts,
        _first_questions,
    )  # fmt: skip
    return [check for maker in makers for check in maker()]


def list_far_checks(texts: Path) -> list[Check]:
    """Return questions of public sets that training never saw, of all lengths."""
    questions = sorted(far_questions.read_far_questions(texts, kept_back=True), key=len)
    return [
        Check(_ask(question), {"refusals, public questions": refusals.is_refusal})
        for question in questions[:: len(questions) // 95]
    ]


def says(*expected: str) -> Judge:
    """The answer holds each expected text as whole words."""
    patterns = [re.compile(rf"(?<!\w){re.escape(text)}(?!\w)", re.IGNORECASE) for text in expected]
    return lambda answer: all(pattern.search(answer) for pattern in patterns)


def is_exactly(*allowed: str) -> Judge:
    """The answer is one of these, and nothing else."""
    return lambda answer: answer.strip() in allowed


def _ask(question: str, *before: Message) -> Conversation:
    return Conversation((*before, Message("user", question)))


def _sums() -> Iterator[Check]:
    for held_out, group in ((False, "sums, seen pairs"), (True, "sums, unseen pairs")):
        for number in range(24):
            drawn = sums.draw_sum(Dice(f"check/sum/{held_out}/{number}"), held_out=held_out)
            yield Check(_ask(f"What is {drawn}?"), {group: is_exactly(f"{drawn.equation()}.")})


def _facts() -> Iterator[Check]:
    for held_out, group in ((False, "facts, seen wordings"), (True, "facts, unseen wordings")):
        for number in range(24):
            fact = facts.draw_fact(Dice(f"check/fact/{held_out}/{number}"), held_out=held_out)
            yield Check(_ask(fact.question), {group: says(fact.short)})


def _recall() -> Iterator[Check]:
    """The grammar's own story stands in the prompt; its hero was never seen in training."""
    for kind in RECALL_KINDS:
        for number in range(4):
            dice = Dice(f"check/recall/{kind}/{number}")
            story = draw_story(dice, held_out=True)
            while kind not in story_talk.question_kinds(story):
                story = draw_story(dice, held_out=True)
            told = exchange(story_talk.request(dice, story), story.tell())
            question, _ = story_talk.question(dice, story, kind)
            wanted = story.slots[story_talk.QUESTIONS[kind][0]].split()[-1]
            group = f"story recall, {kind}"
            yield Check(_ask(question, *told), {group: says(wanted), "story recall": says(wanted)})


def _stories() -> Iterator[Check]:
    for number in range(16):
        story = draw_story(Dice(f"check/story/{number}"), held_out=True)
        asked = f"Tell me a story about {story.slots['a_hero']} named {story.slots['name']}."
        hero, name = story.hero, story.slots["name"]
        yield Check(
            _ask(asked),
            {
                "story, hero as asked": says(hero, name),
                "story, one item all through": keeps_item,
                "story, one pronoun all through": lambda answer, name=name: keeps_pronoun(
                    answer, name
                ),
                "story, whole": is_whole,
            },
            num_tokens=360,
        )


def is_whole(story: str) -> bool:
    """More than a few sentences, and the last one is complete."""
    return len(story.split()) > 60 and story.rstrip().endswith((".", "!", '"'))


def keeps_item(story: str) -> bool:
    """One thing of the table of items is in the story, and it is named more than once."""
    counts = [len(re.findall(rf"\b{item}\b", story)) for item in words.ITEMS]
    return sum(count > 0 for count in counts) == 1 and max(counts) >= 2


def keeps_pronoun(story: str, name: str) -> bool:
    """The hero goes by the pronoun of the name, and nobody by the other one."""
    wrong = {"she": ("he", "him", "his"), "he": ("she", "her")}[words.pronoun_slots(name)["they"]]
    return not any(re.search(rf"\b{word}\b", story, re.IGNORECASE) for word in wrong)


def _names() -> Iterator[Check]:
    for number in range(16):
        dice = Dice(f"check/name/{number}")
        name = dice.pick(words.BOYS + words.GIRLS)
        between = [message for _ in range(3) for message in facts.draw_exchange(dice)]
        told = exchange(f"My name is {name}.", f"Nice to meet you, {name}!")
        asked = dice.pick(memory.NAME_QUESTIONS)
        yield Check(_ask(asked, *told, *between), {"name after three other turns": says(name)})


def _refusals() -> Iterator[Check]:
    for number in range(24):
        question = refusals.draw_exchange(Dice(f"check/refusal/{number}"), held_out=True)[0].content
        yield Check(_ask(question), {"refusals, unseen questions": refusals.is_refusal})
    for question in FAR_QUESTIONS:
        yield Check(_ask(question), {"refusals, written by hand": refusals.is_refusal})
    for kind in ("hello", "who", "what", "thanks", "bye", "how"):
        question = smalltalk.SMALL_TALK[kind][0][0]
        allowed = smalltalk.SMALL_TALK[kind][1]
        yield Check(_ask(question), {"small talk": is_exactly(*allowed)})


def _json() -> Iterator[Check]:
    for number in range(16):
        asked, answered = structured.draw_extraction(Dice(f"check/json/{number}"))
        judges: dict[str, Judge] = {
            "JSON, valid": lambda answer: _parse(answer) is not None,
            "JSON, right": lambda answer, right=answered: _parse(answer) == json.loads(right),
        }
        yield Check(_ask(asked), judges, num_tokens=80)


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _tools() -> Iterator[Check]:
    for number in range(16):
        dice = Dice(f"check/tool/{number}")
        use = tools.draw_use(dice)
        call, result, answer = tools.use_turns(use)
        specs = tools.draw_specs(dice, use)
        asked = Message("user", use.request)
        judges: dict[str, Judge] = {
            "tool calls, valid": lambda answer: parse_call(answer) is not None,
            "tool calls, right": lambda answer, right=use: (
                parse_call(answer) == {"name": right.name, "arguments": right.arguments}
            ),
        }
        yield Check(Conversation((asked,), tools=specs), judges, num_tokens=96)
        prompt = Conversation((asked, call, result), tools=specs)
        yield Check(prompt, {"tool's answer, used": is_exactly(answer.content)})
        said = PLAIN_RESULTS[number % len(PLAIN_RESULTS)]
        prompt = Conversation((asked, call, Message("tool", said)), tools=specs)
        yield Check(prompt, {"tool's answer in words, used": says(said.rstrip("."))})


def parse_call(answer: str) -> object:
    """The JSON between the tags of a tool call, or None."""
    found = re.fullmatch(r"\s*<tool_call>\n(.*)\n</tool_call>\s*", answer, re.DOTALL)
    return _parse(found.group(1)) if found else None


def _documents() -> Iterator[Check]:
    for number in range(16):
        dice = Dice(f"check/document/{number}")
        document = documents.draw_document(dice)
        question, answer = dice.pick(document.answered)
        prompt = _ask(f"{document.text}\n\n{question}")
        yield Check(prompt, {"questions on a document": is_exactly(answer)})


def _copies() -> Iterator[Check]:
    for number in range(12):
        drawn = " ".join(Dice(f"check/copy/{number}").sample(copying.POOL, 5))
        yield Check(_ask(f"Repeat: {drawn}"), {"five words repeated": is_exactly(drawn)})


def _thoughts() -> Iterator[Check]:
    for number in range(12):
        drawn = sums.draw_sum(Dice(f"check/thought/{number}"), held_out=True)
        prompt = Conversation((Message("user", f"What is {drawn}?"),), enable_thinking=True)
        judges: dict[str, Judge] = {
            "thinking, tags in place": lambda answer: bool(re.match(r"<think>\n.+\n</think>\n\n.", answer, re.DOTALL)),
            "thinking, unseen sums right": lambda answer, right=drawn: answer.strip().endswith(f"{right.equation()}."),
        }  # fmt: skip
        yield Check(prompt, judges, num_tokens=96)


def _first_questions() -> Iterator[Check]:
    groups = {
        "first questions": KNOWN,
        "first questions, kept back": KEPT_BACK,
        "first questions, kept back later": KEPT_BACK_LATER,
        "first questions, of quick starts, kept back": KEPT_BACK_OF_QUICK_STARTS,
        "first questions, of small tasks, kept back": KEPT_BACK_OF_SMALL_TASKS,
    }
    for group, questions in groups.items():
        for question, expected in questions.items():
            judge = functools.partial(holds, expected=expected)
            yield Check(_ask(question), {group: judge}, num_tokens=96)
