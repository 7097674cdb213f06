"""Copying tasks: repeat words, pick one of them, count or turn them round."""

from training.storyteller.grammar import words
from training.storyteller.grammar.dice import Dice
from training.storyteller.grammar.messages import Message, exchange
from training.storyteller.grammar.text import join_words, typed

POOL = words.THINGS + words.ADJECTIVES + words.BOYS + words.GIRLS
_ORDINALS = ("first", "second", "third", "fourth", "fifth")


def draw_exchange(dice: Dice) -> list[Message]:
    count = dice.number(2, 7)
    drawn = dice.sample(POOL, count)
    spaced, listed = " ".join(drawn), ", ".join(drawn)
    index = dice.number(0, min(count, 5) - 1)
    tasks = {
        "repeat": (
            dice.pick(
                (
                    f"Repeat: {spaced}",
                    f"Repeat these words: {spaced}",
                    f"Say this again: {spaced}",
                    f"Repeat after me: {spaced}",
                    f'Say "{spaced}".',
                    f"Please repeat the words {spaced}.",
                    f"Write exactly this: {spaced}",
                    f"Echo: {spaced}",
                )
            ),
            spaced,
        ),
        "which": (
            f"Which word is the {_ORDINALS[index]} one in this list: {listed}?",
            f"The {_ORDINALS[index]} word is {drawn[index]}.",
        ),
        "last": (
            f"What is the last word of this list: {listed}?",
            f"The last word is {drawn[-1]}.",
        ),
        "count": (
            dice.pick(
                (
                    f"How many words are in this list: {listed}?",
                    f'How many words are in "{spaced}"?',
                    f"Count the words: {spaced}",
                )
            ),
            f"There are {words.NUMBER_WORDS[count]} words in the list.",
        ),
        "reverse": (f"Say these words backwards: {spaced}", " ".join(reversed(drawn))),
        "bullets": (
            f"Make a list of {join_words(drawn)}.",
            "\n".join(f"- {word}" for word in drawn),
        ),
        "numbered": (
            f"Make a numbered list of {join_words(drawn)}.",
            "\n".join(f"{n}. {word}" for n, word in enumerate(drawn, 1)),
        ),
    }
    kind = dice.weighted(
        {
            "repeat": 6,
            "which": 1,
            "last": 1,
            "count": 1,
            "reverse": 1.5,
            "bullets": 1.5,
            "numbered": 1,
        }
    )
    asked, answered = tasks[kind]
    return exchange(asked if kind == "repeat" else typed(dice, asked), answered)
