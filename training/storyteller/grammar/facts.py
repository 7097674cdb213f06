"""Questions about small facts, each with several wordings.

A fact keeps its short answer apart, so that the evaluation can look for it. Of every fact one
wording in eight is held out: training sees the fact, but not asked in this way.
"""

from collections.abc import Callable
from dataclasses import dataclass

from training.storyteller.grammar import fact_tables as tables
from training.storyteller.grammar import words
from training.storyteller.grammar.definitions import DEFINITIONS, UNCOUNTED
from training.storyteller.grammar.dice import Dice, is_held_out
from training.storyteller.grammar.messages import Message, exchange
from training.storyteller.grammar.text import article, capital, join_words, listed, typed


@dataclass(frozen=True, slots=True)
class Fact:
    """A question, the answer, and the short answer that must occur in it."""

    question: str
    answer: str
    short: str
    is_held_out: bool
    topic: str


@dataclass(frozen=True, slots=True)
class Topic:
    """A table with the ways to ask and to answer; `{key}` and `{value}` come from its rows."""

    name: str
    rows: dict[str, str]
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    weight: float = 1.0


def _plural_verb(key: str) -> str:
    return "are" if key in ("chips", "raisins") else "is"


TOPICS: tuple[Topic, ...] = (
    Topic(
        "capital",
        tables.CAPITALS,
        (
            "What is the capital of {key}?",
            "Which city is the capital of {key}?",
            "Tell me the capital of {key}.",
            "What's the capital of {key}?",
            "Name the capital of {key}.",
            "Do you know the capital of {key}?",
            "capital of {key}?",
            "{Key}: what is its capital?",
            "What is the capital city of {key}?",
        ),
        ("The capital of {key} is {value}.",),
        3,
    ),
    Topic(
        "country",
        {value: key for key, value in tables.CAPITALS.items() if value not in key},
        (
            "Which country has the capital {key}?",
            "{Key} is the capital of which country?",
            "In which country is {key}?",
            "Where is {key}?",
            "What country is {key} in?",
        ),
        ("{Key} is the capital of {value}.",),
        1.5,
    ),
    Topic(
        "continent",
        tables.CONTINENTS,
        (
            "On which continent is {key}?",
            "Where is {key}?",
            "What continent is {key} on?",
            "Which continent does {key} belong to?",
        ),
        ("{Key} is in {value}.",),
    ),
    Topic(
        "language",
        tables.LANGUAGES,
        (
            "What language do they speak in {key}?",
            "Which language is spoken in {key}?",
            "What do people speak in {key}?",
        ),
        ("In {key} people speak {value}.",),
    ),
    Topic(
        "sound",
        tables.SOUNDS,
        (
            "What sound does {a_key} make?",
            "What does {a_key} say?",
            "How does {a_key} go?",
            "Which sound does the {key} make?",
            "What noise does {a_key} make?",
        ),
        ("{A_key} says {value}.", "The {key} says {value}."),
    ),
    Topic(
        "colour",
        tables.COLOURS_OF,
        (
            "What colour is {key}?",
            "What color is {key}?",
            "Which colour has {key}?",
            "Tell me the colour of {key}.",
            "What is the color of {key}?",
        ),
        ("{Key} is {value}.",),
        1.5,
    ),
    Topic(
        "opposite",
        tables.OPPOSITES,
        (
            "What is the opposite of {key}?",
            "What's the opposite of {key}?",
            "Which word is the opposite of {key}?",
            "Tell me the opposite of {key}.",
            "opposite of {key}?",
            "The opposite of {key} is what?",
        ),
        ("The opposite of {key} is {value}.",),
        1.5,
    ),
    Topic(
        "legs",
        tables.LEGS,
        (
            "How many legs does {a_key} have?",
            "How many legs has {a_key}?",
            "Tell me how many legs {a_key} has.",
        ),
        ("{A_key} has {value} legs.",),
    ),
    Topic(
        "young",
        tables.YOUNG,
        (
            "What is a baby {key} called?",
            "What do you call a young {key}?",
            "What is the young of {a_key}?",
        ),
        ("A young {key} is called {a_value}.",),
    ),
    Topic(
        "home",
        tables.HOMES,
        (
            "Where does {a_key} live?",
            "What is the home of {a_key} called?",
            "Where do you find {a_key}?",
        ),
        ("{A_key} lives in {a_value}.",),
    ),
    Topic(
        "food",
        tables.FOODS_OF,
        ("What does {a_key} eat?", "What do you feed {a_key}?", "Which food does {a_key} like?"),
        ("{A_key} eats {value}.",),
    ),
    Topic(
        "job",
        tables.JOBS_OF,
        (
            "Who {key}?",
            "What do you call someone who {key}?",
            "Which job is it when someone {key}?",
        ),
        ("Someone who {key} is {value}.", "{Value} {key}."),
    ),
    Topic(
        "planet",
        tables.PLANETS,
        ("Which planet is {key}?", "What is the planet {key}?", "Name the planet {key}."),
        ("The planet {key} is {value}.",),
    ),
    Topic(
        "shape",
        tables.SHAPES,
        (
            "How many sides does {a_key} have?",
            "How many corners has {a_key}?",
            "{A_key} has how many sides?",
        ),
        ("{A_key} has {value} sides.",),
        0.7,
    ),
    Topic(
        "material",
        tables.MATERIALS,
        (
            "What is {key} made of?",
            "From what do you make {key}?",
            "What do you need to make {key}?",
        ),
        ("{Key} {verb} made of {value}.",),
    ),
    Topic(
        "superlative",
        tables.SUPERLATIVES,
        (
            "What is {key}?",
            "Which is {key}?",
            "Tell me {key}.",
            "Do you know {key}?",
            "Who or what is {key}?",
        ),
        ("{Value} is {key}.", "{Key} is {value}."),
        1.3,
    ),
    Topic(
        "amount",
        tables.AMOUNTS,
        ("How many {key}?", "Tell me how many {key} there are.", "How many {key} are there?"),
        ("There are {value} {key}.",),
        1.3,
    ),
    Topic(
        "group",
        tables.GROUPS,
        (
            "What is {a_key}?",
            "What kind of thing is {a_key}?",
            "To which group does {a_key} belong?",
        ),
        ("{A_key} is {a_value}.",),
        1.3,
    ),
    Topic(
        "season",
        tables.SEASON_OF,
        (
            "In which season is {key}?",
            "Which season is {key} in?",
            "What season do we have in {key}?",
        ),
        ("{Key} is in {value}.",),
    ),
    Topic(
        "hello",
        tables.HELLOS,
        ("How do you say hello in {key}?", "What is hello in {key}?", "Say hello in {key}."),
        ("In {key} you say {value}.",),
        0.7,
    ),
    Topic(
        "definition",
        DEFINITIONS,
        (
            "What is {a_key}?",
            "What's {a_key}?",
            "Explain what {a_key} is.",
            "What do you mean by {a_key}?",
            "Can you tell me what {a_key} is?",
            "Define {a_key}.",
            "Tell me what {a_key} is.",
            "what is {a_key}",
        ),
        ("{A_key} is {value}.",),
        4,
    ),
)
TOPIC_BY_NAME = {topic.name: topic for topic in TOPICS}
WEIGHT_BY_TOPIC = {topic.name: topic.weight for topic in TOPICS}
_PROPER = frozenset(
    listed(
        "Paris, France, Monday, May, Mars, Venus, chess, football, tennis, tea, milk, red, gold, iron"
    )
)


def _with_article(topic: str, word: str) -> str:
    if word in _PROPER or (topic == "definition" and word in UNCOUNTED):
        return word
    return article(word)


def fact_slots(topic: Topic, key: str) -> dict[str, str]:
    value = topic.rows[key]
    a_key = _with_article(topic.name, key)
    return {
        "key": key,
        "Key": capital(key),
        "value": value,
        "Value": capital(value),
        "a_key": a_key,
        "A_key": capital(a_key),
        "a_value": _with_article(topic.name, value),
        "verb": _plural_verb(key),
    }


def make_fact(topic: Topic, key: str, question: str, answer: str) -> Fact:
    slots = fact_slots(topic, key)
    kept_back = is_held_out("fact", topic.name, key, question, one_in=8)
    value = slots["value"].split()[-1]
    return Fact(question.format_map(slots), answer.format_map(slots), value, kept_back, topic.name)


def draw_fact(dice: Dice, *, held_out: bool = False, topic: Topic | None = None) -> Fact:
    """Draw a fact whose wording is held out, or is not."""
    while True:
        table = topic or TOPIC_BY_NAME[dice.weighted(WEIGHT_BY_TOPIC)]
        key = dice.pick(list(table.rows))
        fact = make_fact(table, key, dice.pick(table.questions), dice.pick(table.answers))
        if fact.is_held_out == held_out:
            return fact


def draw_exchange(dice: Dice) -> list[Message]:
    fact = draw_fact(dice)
    reasoning = f"This is a question about {TOPIC_HINTS.get(fact.topic, fact.topic)}. I know it."
    return exchange(typed(dice, fact.question), fact.answer, reasoning)


TOPIC_HINTS = {
    "capital": "capitals",
    "country": "countries",
    "definition": "the meaning of a word",
    "legs": "legs",
    "amount": "how many there are",
    "young": "young animals",
    "superlative": "the first, largest or last of all",
}


def draw_order_exchange(dice: Dice) -> list[Message]:
    """Before and after: days, months, and numbers; and reciting them."""
    table, noun = dice.pick(((words.DAYS, "day"), (words.MONTHS, "month")))
    index = dice.number(0, len(table) - 1)
    here, after, before = table[index], table[(index + 1) % len(table)], table[index - 1]
    pairs: tuple[Callable[[], tuple[str, str]], ...] = (
        lambda: (f"Which {noun} comes after {here}?", f"After {here} comes {after}."),
        lambda: (f"What comes after {here}?", f"After {here} comes {after}."),
        lambda: (f"What {noun} is before {here}?", f"Before {here} comes {before}."),
        lambda: (f"Name the {noun}s in order.", f"The {noun}s are {join_words(table)}."),
        lambda: (f"What are the {noun}s?", f"The {noun}s are {join_words(table)}."),
        lambda: _today(dice),
        lambda: _counting(dice),
    )
    asked, answered = dice.pick(pairs)()
    return exchange(typed(dice, asked), answered)


def _today(dice: Dice) -> tuple[str, str]:
    index = dice.number(0, 6)
    today, tomorrow, yesterday = (
        words.DAYS[index],
        words.DAYS[(index + 1) % 7],
        words.DAYS[index - 1],
    )
    if dice.chance(0.5):
        return f"Today is {today}. What day is tomorrow?", f"Tomorrow is {tomorrow}."
    return f"Today is {today}. What day was yesterday?", f"Yesterday was {yesterday}."


def _counting(dice: Dice) -> tuple[str, str]:
    low = dice.pick((1, 1, 1, dice.number(2, 60)))
    high = low + dice.number(3, 12)
    numbers = join_words([str(number) for number in range(low, high + 1)])
    asked = dice.pick((f"Count from {low} to {high}.", f"Can you count from {low} to {high}?"))
    if low == 1 and dice.chance(0.5):
        asked = f"Count to {high}."
    return asked, f"{capital(numbers)}."


def draw_list_exchange(dice: Dice) -> list[Message]:
    """Name some members of a group: always the first ones, so that none is named twice."""
    group = dice.pick(list(words.CATEGORIES))
    count = dice.number(2, 5)
    members = join_words(words.CATEGORIES[group][:count])
    word = words.NUMBER_WORDS[count]
    asked = dice.pick(
        (f"Name {word} {group}.", f"Tell me {word} {group}.", f"Give me {count} {group}.",
         f"List {word} {group}.", f"Do you know {word} {group}?", f"Name {count} {group}.")
    )  # fmt: skip
    return exchange(typed(dice, asked), capital(members) + ".")


def draw_yes_or_no(dice: Dice) -> list[Message]:
    """Is a dog an animal, or a fruit? Yes, or no with what it is instead."""
    topic = TOPIC_BY_NAME[dice.pick(("group", "capital", "colour"))]
    key = dice.pick(list(topic.rows))
    slots = fact_slots(topic, key)
    claimed = slots["value"] if dice.chance(0.5) else dice.pick(list(topic.rows.values()))
    said = {
        "group": f"Is {slots['a_key']} {_with_article('group', claimed)}?",
        "capital": f"Is {claimed} the capital of {key}?",
        "colour": f"Is {key} {claimed}?",
    }[topic.name]
    word = "Yes" if claimed == slots["value"] else "No"
    answer = topic.answers[0].format_map(slots | {"Key": key, "A_key": slots["a_key"]})
    answer = answer[0].lower() + answer[1:] if answer.startswith("The ") else answer
    return exchange(typed(dice, said), f"{word}, {answer}")
