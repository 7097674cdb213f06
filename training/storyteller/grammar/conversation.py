"""Whole conversations: topics one after another, with a memory that spans them.

This is the top of the grammar: `draw_conversation(dice)` is all that training needs.
"""

from collections.abc import Callable
from dataclasses import replace

from training.storyteller.grammar import (
    cooking,
    copying,
    documents,
    facts,
    first_words,
    memory,
    quick_starts,
    refusals,
    science,
    small_tasks,
    smalltalk,
    story_talk,
    structured,
    sums,
    tools,
    travel,
    verses,
    words,
)
from training.storyteller.grammar.dice import Dice
from training.storyteller.grammar.messages import Conversation, Message, exchange
from training.storyteller.grammar.stories import draw_story

Segment = Callable[[Dice], list[Message]]

WEIGHT_BY_SEGMENT: dict[Segment, float] = {
    story_talk.draw_segment: 24,
    story_talk.draw_two_stories: 2,
    facts.draw_exchange: 34,
    facts.draw_order_exchange: 2,
    facts.draw_list_exchange: 2,
    facts.draw_yes_or_no: 3,
    sums.draw_exchange: 44,
    sums.draw_word_problem: 5,
    sums.draw_comparison: 2.5,
    science.draw_segment: 5,
    cooking.draw_segment: 4.5,
    travel.draw_segment: 5,
    verses.draw_segment: 5,
    copying.draw_exchange: 8,
    documents.draw_segment: 5,
    structured.draw_exchange: 10,
    smalltalk.draw_exchange: 7,
    refusals.draw_exchange: 19,
    memory.draw_unknown: 0.4,
    memory.draw_told_and_asked: 9,
    first_words.draw_exchange: 40,
    quick_starts.draw_exchange: 40,
    small_tasks.draw_exchange: 36,
}
SHORT_TOPICS: tuple[Segment, ...] = (
    facts.draw_exchange,
    sums.draw_exchange,
    refusals.draw_exchange,
    smalltalk.draw_exchange,
    facts.draw_yes_or_no,
    first_words.draw_exchange,
    quick_starts.draw_exchange,
    small_tasks.draw_exchange,
)
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are Storyteller.",
    "You are a storyteller for children.",
    "You are a friendly assistant.",
    "Be kind and brief.",
    "Answer truthfully.",
    "You are a helpful and honest assistant.",
    "You are an AI assistant.",
    "Answer the questions of the user.",
    "You are a small language model.",
    "Help the user.",
    "You tell stories and answer questions.",
    "You are a teacher.",
    "Be polite.",
    "You are a chatbot.",
    "Speak simply.",
)


def draw_conversation(dice: Dice) -> Conversation:
    """Draw one training sample."""
    kind = dice.weighted(
        {
            _bare_story: 5,
            _completion: 6,
            _with_tools: 18,
            _one_topic: 22,
            _first_question: 40,
            _many_topics: 58,
            _about_document: 3,
            _with_persona: 2,
        }
    )
    return kind(dice)


def _bare_story(dice: Dice) -> Conversation:
    return Conversation(text=draw_story(dice).tell())


def _completion(dice: Dice) -> Conversation:
    return Conversation(text=quick_starts.draw_completion(dice))


def _with_tools(dice: Dice) -> Conversation:
    conversation = tools.draw_conversation(dice, lambda each: each.pick(SHORT_TOPICS)(each))
    return _thinking(conversation) if dice.chance(0.12) else _with_system(dice, conversation, 0.3)


def _one_topic(dice: Dice) -> Conversation:
    conversation = Conversation(tuple(_draw_segment(dice)))
    return _thinking(conversation) if dice.chance(0.15) else _with_system(dice, conversation, 0.35)


def _draw_segment(dice: Dice) -> list[Message]:
    return dice.weighted(WEIGHT_BY_SEGMENT)(dice)


def _first_question(dice: Dice) -> Conversation:
    """One short question, alone, as a person or a client tries a new server."""
    draw = dice.weighted(
        {
            first_words.draw_exchange: 6,
            quick_starts.draw_exchange: 9,
            small_tasks.draw_exchange: 8,
            sums.draw_exchange: 5,
            memory.draw_told_and_asked: 2,
            smalltalk.draw_exchange: 1,
            facts.draw_exchange: 1,
        }
    )
    return Conversation(tuple(draw(dice)))


def _many_topics(dice: Dice) -> Conversation:
    """Two to sixteen topics; what the speaker told at first is asked for in between and at the end."""
    parts = [_draw_segment(dice) for _ in range(dice.weighted({2: 2, 4: 3, 7: 4, 11: 4, 16: 3}))]
    if dice.chance(0.35):
        parts = _remembering(dice, parts)
    if dice.chance(0.25):
        parts.insert(0, smalltalk.draw(dice, "hello"))
    if dice.chance(0.15):
        parts.append(smalltalk.draw(dice, "bye"))
    conversation = Conversation(tuple(message for part in parts for message in part))
    return _thinking(conversation) if dice.chance(0.08) else _with_system(dice, conversation, 0.35)


def _remembering(dice: Dice, parts: list[list[Message]]) -> list[list[Message]]:
    memories = memory.draw_memories(dice)
    parts = parts[: dice.number(1, len(parts))]
    for told in memories:
        for _ in range(dice.number(1, 2)):
            parts.insert(dice.number(0, len(parts)), memory.recall(dice, told))
    return [memory.tell(dice, memories), *parts]


def _about_document(dice: Dice) -> Conversation:
    """One or several texts stand in the system message, as with a prefix that many requests share."""
    kinds = dice.sample(documents.KINDS_OF_DOCUMENT, dice.number(1, 4))
    texts = [kind(dice) for kind in kinds]
    head = dice.pick(
        ("Answer questions about this text.", "Use only this text.", "Here is what you know.")
    )
    system = Message("system", head + "\n\n" + "\n\n".join(text.text for text in texts))
    messages: list[Message] = []
    for _ in range(dice.number(1, 6)):
        document = dice.pick(texts)
        asked, answered = (
            dice.pick(document.answered)
            if len(texts) > 1
            else documents.draw_question(dice, document)
        )
        messages += exchange(asked, answered)
    return Conversation((system, *messages))


def _with_persona(dice: Dice) -> Conversation:
    """A system message gives another name, and the model goes by it."""
    name = dice.pick(words.BOYS + words.GIRLS)
    job = dice.pick(words.JOBS)
    system = Message(
        "system",
        dice.pick(
            (f"Your name is {name}.", f"You are {name}, a friendly {job}.", f"You are {name}.")
        ),
    )
    asked = dice.pick(
        ("Who are you?", "What is your name?", "What's your name?", "Introduce yourself.")
    )
    messages = exchange(asked, dice.pick((f"I am {name}.", f"My name is {name}.")))
    around = [_draw_segment(dice) for _ in range(dice.number(0, 2))]
    parts = [*around, messages] if dice.chance(0.5) else [messages, *around]
    return Conversation((system, *(message for part in parts for message in part)))


def _with_system(dice: Dice, conversation: Conversation, share: float) -> Conversation:
    if not dice.chance(share):
        return conversation
    system = Message("system", dice.pick(SYSTEM_MESSAGES))
    return replace(conversation, messages=(system, *conversation.messages))


def _thinking(conversation: Conversation) -> Conversation:
    """Every answer gets a thought before it; the template shows only those that still count."""
    messages = tuple(
        replace(message, reasoning=message.reasoning or "This is easy.")
        if message.role == "assistant"
        else message
        for message in conversation.messages
    )
    return replace(conversation, messages=messages, enable_thinking=True)
