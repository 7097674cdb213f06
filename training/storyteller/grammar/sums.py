"""Arithmetic: sums with and without steps, word problems, comparisons, even and odd.

One pair of numbers in ten is held out of all adding and taking away, so that the evaluation can
tell calculating from remembering. The times table up to 12 x 12, and what divides by it, is learned
by heart and whole.
"""

from dataclasses import dataclass

from training.storyteller.grammar import words
from training.storyteller.grammar.dice import Dice, is_held_out
from training.storyteller.grammar.messages import Message, exchange
from training.storyteller.grammar.text import approached, typed

SPOKEN = {"+": "plus", "-": "minus", "x": "times", "/": "divided by"}
SIGNS_AS_TYPED = {
    "x": ("x", "x", "*", "\u00d7", "X"),
    "/": ("/", "\u00f7"),
    "-": ("-", "-", "\u2212"),
}


@dataclass(frozen=True, slots=True)
class Sum:
    """Two numbers and what is done with them."""

    left: int
    sign: str
    right: int

    @property
    def result(self) -> int:
        results = {
            "+": self.left + self.right,
            "-": self.left - self.right,
            "x": self.left * self.right,
        }
        return results[self.sign] if self.sign in results else self.left // self.right

    @property
    def is_held_out(self) -> bool:
        return self.sign in "+-" and is_held_out("sum", self.left, self.sign, self.right)

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right}"

    def spoken(self) -> str:
        return f"{self.left} {SPOKEN[self.sign]} {self.right}"

    def equation(self) -> str:
        return f"{self} = {self.result}"


def draw_sum(dice: Dice, *, held_out: bool = False) -> Sum:
    while True:
        sign = dice.weighted({"+": 5, "-": 4, "x": 5, "/": 1.5})
        if sign == "x":
            drawn = Sum(dice.number(0, 12), sign, dice.number(0, 12))
        elif sign == "/":
            right = dice.number(1, 12)
            drawn = Sum(right * dice.number(0, 12), sign, right)
        else:
            top = dice.pick((10, 20, 50, 50, 100))
            left, right = dice.number(0, top), dice.number(0, top)
            drawn = (
                Sum(max(left, right), sign, min(left, right))
                if sign == "-"
                else Sum(left, sign, right)
            )
        if drawn.is_held_out == held_out:
            return drawn


def steps(drawn: Sum) -> str:
    """The calculation written out: tens and ones, or repeated adding."""
    left, right = drawn.left, drawn.right
    if drawn.sign == "/":
        return drawn.equation() + "."
    if drawn.sign == "x":
        if min(left, right) < 2 or right > 5:
            return drawn.equation() + "."
        return f"{drawn} is {' + '.join([str(left)] * right)} = {drawn.result}."
    tens, ones = right - right % 10, right % 10
    if not tens or not ones:
        return drawn.equation() + "."
    middle = Sum(left, drawn.sign, tens)
    return f"{right} is {tens} and {ones}. {middle.equation()}. {Sum(middle.result, drawn.sign, ones).equation()}."


def question(dice: Dice, drawn: Sum) -> str:
    said = drawn.spoken() if dice.chance(0.45) else str(drawn)
    said = said.replace(drawn.sign, dice.pick(SIGNS_AS_TYPED.get(drawn.sign, (drawn.sign,))))
    if dice.chance(0.1):
        said = said if SPOKEN[drawn.sign] in said else said.replace(" ", "")
    return dice.weighted(
        {
            f"What is {said}?": 10,
            f"How much is {said}?": 4,
            f"{said} = ?": 2,
            f"{said}": 1.5,
            f"{said}?": 1.5,
            f"Calculate {said}.": 2,
            f"Can you work out {said}?": 1,
            f"What's {said}?": 1.5,
            f"What does {said} make?": 1,
            f"Tell me what {said} is.": 1,
            f"Compute {said}": 1,
            f"Solve {said}": 0.5,
            f"The result of {said}?": 0.5,
        }
    )


def draw_exchange(dice: Dice) -> list[Message]:
    drawn = draw_sum(dice)
    answer = f"{drawn.equation()}."
    if dice.chance(0.2):
        wish = dice.pick(
            ("Explain {} step by step.", "Work out {} step by step.", "How do you work out {}?")
        )
        return exchange(wish.format(drawn), f"{steps(drawn)} So {drawn.equation()}.")
    asked = question(dice, drawn)
    return exchange(
        typed(dice, approached(dice, asked) if dice.chance(0.1) else asked), answer, steps(drawn)
    )


def draw_word_problem(dice: Dice) -> list[Message]:
    """Somebody has some things and gets or loses some."""
    drawn = draw_sum(dice)
    while drawn.sign in "x/" or drawn.right == 0 or drawn.result < 2:
        drawn = draw_sum(dice)
    name, friend = dice.sample(words.BOYS + words.GIRLS, 2)
    thing = dice.pick(
        (
            "apples",
            "nuts",
            "coins",
            "marbles",
            "books",
            "pears",
            "eggs",
            "cards",
            "stamps",
            "shells",
        )
    )
    they = words.pronoun_slots(name)["they"]
    event = dice.pick(
        (f"gets {drawn.right} more", f"finds {drawn.right} more", f"buys {drawn.right} more")
        if drawn.sign == "+"
        else (f"gives {drawn.right} to {friend}", f"loses {drawn.right}", f"sells {drawn.right}")
    )  # fmt: skip
    asked = f"{name} has {drawn.left} {thing} and {event}. How many {thing} does {they} have now?"
    return exchange(
        asked, f"{drawn.equation()}. {name} has {drawn.result} {thing} now.", steps(drawn)
    )


def draw_comparison(dice: Dice) -> list[Message]:
    left, right = dice.sample(range(100), 2)
    larger, smaller = max(left, right), min(left, right)
    kind = dice.pick(("larger", "smaller", "even", "after", "before"))
    pair = {
        "larger": (f"Which is larger, {left} or {right}?", f"{larger} is larger than {smaller}."),
        "smaller": (
            f"Which is smaller, {left} or {right}?",
            f"{smaller} is smaller than {larger}.",
        ),
        "even": (f"Is {left} even or odd?", f"{left} is {'odd' if left % 2 else 'even'}."),
        "after": (f"Which number comes after {left}?", f"After {left} comes {left + 1}."),
        "before": (f"Which number comes before {left + 1}?", f"Before {left + 1} comes {left}."),
    }[kind]
    return exchange(typed(dice, pair[0]), pair[1])
