"""What the speaker tells about themself, to be asked for again many turns later."""

from dataclasses import dataclass

from training.storyteller.grammar import fact_tables, words
from training.storyteller.grammar.dice import Dice
from training.storyteller.grammar.messages import Message, exchange
from training.storyteller.grammar.text import article, listed, typed

COMMON_NAMES = listed("""
Ann, Bob, Alex, John, Mary, David, Sarah, Michael, Lisa, James, Laura, Robert, Kate, Tony, Chris,
Maria, Daniel, Eva, Mark, Susan, Thomas, Kim, Steve, Linda, Jim, Barbara, Joe, Karen, Mike, Sandra,
Matt, Julie, Andrew, Rachel, Kevin, Amy, Brian, Angela, Eric, Emily, Adam, Jessica, Nick, Olivia,
Luke, Hannah, Ryan, Rebecca, Ali, Priya, Wei, Carlos, Ahmed, Yuri, Pierre, Hans, Lena, Marta""")
PET_NAMES = listed(
    "Rex, Bella, Luna, Max, Milo, Charlie, Buddy, Coco, Daisy, Simba, Fido, Oscar, Rocky, Lucky"
)
SYLLABLES = listed(
    "ba, ke, lo, mi, ru, ta, no, zi, fa, du, ge, po, ri, sa, ve, xi, mo, tri, go, bel, zan, kor, lim, nar, dra"
)
NAME_QUESTIONS = (
    "What is my name?",
    "Do you remember my name?",
    "What's my name?",
    "Who am I?",
    "Can you tell me my name?",
    "How am I called?",
    "Do you still know my name?",
    "What was my name again?",
    "Tell me my name.",
    "Which name did I tell you?",
)


@dataclass(frozen=True, slots=True)
class Memory:
    """One thing that was told: how it is said, acknowledged, asked for, and recalled."""

    told: str
    acknowledged: str
    asked: tuple[str, ...]
    recalled: str


def _any_name(dice: Dice) -> str:
    """Draw a name of the stories, a common one, or one that does not exist, which must be copied."""
    made_up = "".join(dice.pick(SYLLABLES) for _ in range(dice.number(2, 3))).capitalize()
    return dice.pick(
        (
            dice.pick(words.BOYS + words.GIRLS),
            dice.pick(COMMON_NAMES),
            dice.pick(COMMON_NAMES),
            made_up,
        )
    )


def _name(dice: Dice, name: str) -> Memory:
    told = dice.pick(
        (
            f"My name is {name}.",
            f"I am {name}.",
            f"Hello, my name is {name}.",
            f"Hi, I'm {name}.",
            f"Call me {name}.",
            f"Hello! I am {name}.",
            f"You can call me {name}.",
            f"I'm {name} and I am new here.",
            f"Hey, {name} here.",
            f"This is {name}.",
            f"People call me {name}.",
            f"my name's {name}",
            f"Hi! My name is {name}. Nice to meet you.",
        )
    )
    acknowledged = dice.pick(
        (
            f"Nice to meet you, {name}!",
            f"Hello, {name}! How can I help you?",
            f"Hello {name}! Shall I tell you a story?",
        )
    )
    return Memory(told, acknowledged, NAME_QUESTIONS, f"Your name is {name}.")


def _other_memories(dice: Dice) -> list[Memory]:
    city = dice.pick(list(fact_tables.CAPITALS.values()))
    colour, hobby, job = dice.pick(words.COLOURS), dice.pick(words.HOBBIES), dice.pick(words.JOBS)
    pet, age = dice.pick(words.PETS), dice.number(4, 90)
    pet_name, relative_name = dice.sample(words.BOYS + words.GIRLS, 2)
    pet_name = dice.pick((pet_name, dice.pick(PET_NAMES)))
    relative = dice.pick(("brother", "cousin", "best friend", "teacher", "neighbour"))
    fruit = dice.pick(words.FRUITS[:12])
    return [
        Memory(
            f"I live in {city}.",
            f"{city} is a nice place.",
            ("Where do I live?", "In which city do I live?"),
            f"You live in {city}.",
        ),
        Memory(
            f"My favourite colour is {colour}.",
            f"{colour.capitalize()} is a lovely colour.",
            ("What is my favourite colour?", "Which colour do I like best?"),
            f"Your favourite colour is {colour}.",
        ),
        Memory(
            f"I like {hobby}.",
            f"{hobby.capitalize()} is fun!",
            ("What do I like?", "What is my hobby?"),
            f"You like {hobby}.",
        ),
        Memory(
            f"I am {article(job)}.",
            "That is an interesting job.",
            ("What is my job?", "What do I do for a living?"),
            f"You are {article(job)}.",
        ),
        Memory(
            dice.pick(
                (f"I have {article(pet)} called {pet_name}.", f"My {pet} is called {pet_name}.")
            ),
            f"{pet_name} is a good name for {article(pet)}.",
            (
                f"What is the name of my {pet}?",
                f"What is my {pet} called?",
                "Which pet do I have and what is its name?",
            ),
            f"Your {pet} is called {pet_name}.",
        ),
        Memory(
            f"I am {age} years old.",
            "That is a fine age.",
            ("How old am I?", "What is my age?"),
            f"You are {age} years old.",
        ),
        Memory(
            f"My {relative} is called {relative_name}.",
            f"{relative_name} is a nice name.",
            (f"What is my {relative} called?", f"What is the name of my {relative}?"),
            f"Your {relative} is called {relative_name}.",
        ),
        Memory(
            f"I love to eat {fruit} cake.",
            f"{fruit.capitalize()} cake is delicious.",
            ("Which cake do I like?", "What do I love to eat?"),
            f"You love to eat {fruit} cake.",
        ),
    ]


def draw_memories(dice: Dice) -> list[Memory]:
    """The name, mostly, and up to three other things."""
    name = _name(dice, _any_name(dice))
    others = dice.sample(_other_memories(dice), dice.weighted({0: 4, 1: 3, 2: 2, 3: 1}))
    return [name, *others] if dice.chance(0.8) or not others else others


def tell(dice: Dice, memories: list[Memory]) -> list[Message]:
    """Tell everything at once, or a turn each."""
    if len(memories) == 2 and dice.chance(0.5):
        first, second = memories
        told = f"{first.told} {second.told}"
        return exchange(
            told, f"{first.acknowledged.split('!')[0].rstrip('.')}. {second.acknowledged}"
        )
    messages: list[Message] = []
    for memory in memories:
        messages += exchange(typed(dice, memory.told), memory.acknowledged)
    return messages


def recall(dice: Dice, memory: Memory) -> list[Message]:
    return exchange(
        typed(dice, dice.pick(memory.asked)), memory.recalled, "I look back at what I was told."
    )


def draw_told_and_asked(dice: Dice) -> list[Message]:
    """Tell one to three things and ask for one of them: in the same message, or right after it."""
    memories = [
        _name(dice, _any_name(dice)),
        *dice.sample(_other_memories(dice), dice.number(0, 2)),
    ]
    memory = memories[0] if dice.chance(0.5) else dice.pick(memories)
    if dice.chance(0.5):
        told = " ".join(
            each.told if each.told[-1] in ".!" else f"{each.told}." for each in memories
        )
        return exchange(f"{told} {dice.pick(memory.asked)}", memory.recalled)
    return tell(dice, memories) + recall(dice, memory)


def draw_unknown(dice: Dice) -> list[Message]:
    """Asked for a name that was never told."""
    asked, answered = dice.pick(
        (
            ("What is my name?", "You have not told me your name."),
            ("Where do I live?", "You have not told me where you live."),
            ("How old am I?", "You have not told me how old you are."),
            ("Who am I?", "You have not told me your name."),
        )
    )
    return exchange(typed(dice, asked), answered)
