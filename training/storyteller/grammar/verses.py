"""Short poems and letters of a simple form, about whatever is asked for."""

from training.storyteller.grammar import words
from training.storyteller.grammar.dice import Dice
from training.storyteller.grammar.messages import Message, exchange
from training.storyteller.grammar.text import article, capital, polite, typed

COUPLETS = (
    "The {x} is quiet, the {x} is small,\nbut I love the {x} the best of all.",
    "When morning comes and the sky is blue,\nI think of the {x}, and the {x} thinks too.",
    "O {x}, dear {x}, so fine to see,\nyou make me as happy as I can be.",
    "It stood in the sun, it stood in the rain,\nand then came the night and the moon again.",
    "I looked for the {x} by night and by day,\nand there it was, not far away.",
    "The wind may blow and the snow may fall,\nthe {x} does not mind it, not at all.",
    "Some like silver and some like gold,\nI like the {x}, both new and old.",
    "A bird sang high in the apple tree:\nThe {x} is for you, the {x} is for me.",
    "The stars look down and the night is deep,\nthe {x} and I will go to sleep.",
    "So sing with me this little song:\nThe {x} is here, so what can go wrong?",
    "The children dance and the church bells ring,\nand all of the {x} the poets sing.",
    "The day is over, the road was long,\nthe {x} has taught me this little song.",
    "There once was a {x} beside the sea,\nit was as {adj} as it could be.",
    "The {adj} {x} goes up the hill,\nthe world is wide and the air is still.",
    "In winter white and in summer green,\nthe finest {x} that was ever seen.",
)
RHYME_SUBJECTS = (
    *words.THINGS,
    "sea",
    "moon",
    "sun",
    "rain",
    "night",
    "morning",
    "wind",
    "snow",
    "spring",
    "garden",
    "friend",
    "mother",
    "winter",
    "forest",
)
POEM_ADJECTIVES = ("small", "bold", "sweet", "bright", "kind", "soft", "proud", "green")
POEM_WISHES = (
    "write a poem about {x}",
    "write a short poem about {x}",
    "make a rhyme about {x}",
    "tell me a poem about {x}",
    "write me some verses about {x}",
    "give me a poem about {x}",
    "compose a little poem about {x}",
)

OCCASIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "birthday": (
        "for the birthday",
        (
            "All the best for your birthday!",
            "I hope that you get {an_item} and eat a lot of cake.",
            "May the new year of your life be happy.",
        ),
    ),
    "thanks": (
        "to say thank you for {an_item}",
        (
            "Thank you very much for the {item}.",
            "I use the {item} every day and think of you.",
            "You have made me very happy.",
        ),
    ),
    "invitation": (
        "with an invitation on {day}",
        (
            "I would like to invite you on {day}.",
            "We will eat {food} and play until evening.",
            "Please bring your {item} along.",
        ),
    ),
    "apology": (
        "to say sorry about {an_item}",
        (
            "I am very sorry that I broke your {item}.",
            "I was not careful, and that was wrong.",
            "On {day} I will bring you a new {item}.",
        ),
    ),
    "greeting": (
        "from a holiday",
        (
            "Greetings from our holiday!",
            "We live {home} and eat {food} every day.",
            "On {day} we found {an_item} at {spot}.",
        ),
    ),
    "illness": (
        "because {they} is ill",
        (
            "I heard that you are ill.",
            "I am sending you {food} and {an_item}.",
            "Get well soon! I will visit you on {day}.",
        ),
    ),
}
CLOSINGS = (
    "Yours, {sender}",
    "Best wishes, {sender}",
    "With love, {sender}",
    "Kind regards, {sender}",
)


def poem(dice: Dice, subject: str) -> str:
    slots = {"x": subject, "adj": dice.pick(POEM_ADJECTIVES)}
    couplets = dice.sample(COUPLETS, dice.number(2, 4))
    lines = "\n".join(couplets).format(**slots).split("\n")
    return "\n".join(capital(line.replace(f"a {subject}", article(subject))) for line in lines)


def draw_poem(dice: Dice) -> list[Message]:
    subject = dice.pick(RHYME_SUBJECTS)
    named = dice.pick((f"the {subject}", article(subject)))
    wish = dice.pick(POEM_WISHES).format(x=named)
    asked = polite(dice, wish) if dice.chance(0.8) else f"I want a poem about {named}."
    if dice.chance(0.15):
        asked = dice.pick(
            ("Write a poem.", "Write me a poem", "A poem, please.", "Tell me a poem.")
        )
    return exchange(
        typed(dice, asked),
        poem(dice, subject),
        f"The poem is about the {subject}. Each two lines rhyme.",
    )


def draw_letter(dice: Dice) -> list[Message]:
    sender, receiver = dice.sample(words.BOYS + words.GIRLS, 2)
    item, noun = dice.pick(words.ITEMS), dice.pick(words.HOME_NOUNS)
    slots = words.pronoun_slots(receiver) | {
        "item": item,
        "an_item": article(item),
        "day": dice.pick(words.DAYS),
        "food": dice.pick(words.FOODS),
        "spot": dice.pick(words.SPOTS),
        "home": f"in {article(noun)} {dice.pick(words.HOME_SITES)}",
        "sender": sender,
    }
    purpose, lines = OCCASIONS[dice.pick(list(OCCASIONS))]
    form = dice.pick(("letter", "letter", "short letter", "note", "card", "email"))
    signed = f" from {sender}" if dice.chance(0.6) else f" and sign it as {sender}"
    wish = f"write {article(form)} to {receiver} {purpose}{signed}".format(**slots)
    body = " ".join(capital(line.format(**slots)) for line in lines)
    closing = dice.pick(CLOSINGS).format(**slots).replace(", ", ",\n")
    return exchange(
        typed(dice, polite(dice, wish)),
        f"Dear {receiver},\n\n{body}\n\n{closing}",
        f"The letter goes to {receiver} and comes from {sender}.",
    )


def draw_segment(dice: Dice) -> list[Message]:
    return draw_poem(dice) if dice.chance(0.6) else draw_letter(dice)
