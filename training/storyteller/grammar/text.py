"""Small rules of English: articles, capitals, lists, and the noise people type with."""

from collections.abc import Sequence

from training.storyteller.grammar.dice import Dice

_AN_EXCEPTIONS = ("uni", "use", "eu", "one", "ukulele")


def article(noun: str) -> str:
    """Return the noun phrase with `a` or `an` before it."""
    starts_with_vowel = noun[0].lower() in "aeiou" and not noun.lower().startswith(_AN_EXCEPTIONS)
    return f"{'an' if starts_with_vowel or noun.startswith(('hour', 'honest')) else 'a'} {noun}"


def capital(sentence: str) -> str:
    """Raise the first letter, also behind an opening quote."""
    start = 1 if sentence.startswith('"') else 0
    return sentence[:start] + sentence[start : start + 1].upper() + sentence[start + 1 :]


def join_words(words: Sequence[str], last: str = "and") -> str:
    """Join words as English does: `a, b and c`."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def listed(text: str) -> tuple[str, ...]:
    """Split a table written as one comma-separated string."""
    return tuple(part.strip() for part in text.replace("\n", " ").split(",") if part.strip())


def typed(dice: Dice, request: str) -> str:
    """Write a request the way people type it: often without capitals or the final stop."""
    if dice.chance(0.25):
        request = request.rstrip(".?!")
    if dice.chance(0.15):
        request = request.lower()
    elif dice.chance(0.1):
        request = request[:1].lower() + request[1:]
    return request


def polite(dice: Dice, request: str) -> str:
    """Put courtesy around a request in the imperative (`Tell me ...`)."""
    lowered = request[0].lower() + request[1:]
    return dice.weighted(
        {
            capital(request) + ".": 10,
            f"Please {lowered}.": 2,
            f"{capital(request)}, please.": 2,
            f"Can you {lowered}?": 2,
            f"Could you {lowered}?": 1,
            f"Could you please {lowered}?": 1,
            f"Will you {lowered}?": 0.5,
            f"I would like you to {lowered}.": 0.5,
            f"Hi! {capital(request)}.": 0.5,
            f"Hello, can you {lowered}?": 0.5,
            f"Okay, now {lowered}.": 0.5,
        }
    )


_IMPERATIVES = tuple(
    f"{verb} "
    for verb in listed("""
Say, Write, Give, Explain, Count, List, Translate, Name, Print, Return, Generate, Create, Make, Tell,
Describe, Compose, Calculate, Teach, Define, Introduce""")
)


def approached(dice: Dice, request: str) -> str:
    """Put the words before a request, or around one in the imperative, that people begin a talk with."""
    lowered = request[:1].lower() + request[1:]
    if request.startswith(_IMPERATIVES) and dice.chance(0.6):
        return polite(dice, request.rstrip(".?!"))
    return dice.pick(("Hi, {}", "Hello! {}", "Hey, {}", "So, {}", "Okay, {}", "Now, {}")).format(
        dice.pick((request, lowered))
    )
