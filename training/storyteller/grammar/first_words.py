"""What people type into a new chat first: tests, exact words, haikus, short programs, JSON, greetings abroad.

These are tables to be learned by heart and rules to be followed; nothing here is held out, because
the questions that matter are known. `first_questions.py` has them, and others that are kept back.
"""

import json

from training.storyteller.grammar import fact_tables, memory, words
from training.storyteller.grammar.dice import Dice
from training.storyteller.grammar.messages import Message, exchange
from training.storyteller.grammar.smalltalk import ABILITIES
from training.storyteller.grammar.text import approached, capital, join_words, listed, typed

GREETINGS_BY_COUNT: dict[str, dict[int, str]] = {
    "hello": {
        1: "Hello!",
        2: "Hello there!",
        3: "Hello to you!",
        4: "Hello, my dear friend!",
        5: "Hello, how are you today?",
    },
    "hi": {
        1: "Hi!",
        2: "Hi there!",
        3: "Hi to you!",
        4: "Hi, my dear friend!",
        5: "Hi, how are you today?",
    },
    "goodbye": {
        1: "Goodbye!",
        2: "Goodbye, friend!",
        3: "Goodbye, my friend!",
        4: "Goodbye and good luck!",
        5: "Goodbye and see you soon!",
    },
    "thank you": {
        2: "Thank you!",
        3: "Thank you, friend!",
        4: "Thank you so much!",
        5: "Thank you so very much!",
    },
    "good morning": {
        2: "Good morning!",
        3: "Good morning, friend!",
        4: "Good morning to you!",
        5: "Good morning to you all!",
    },
}
SAYINGS = listed("""
this is a test, I am ready, good morning, yes, no, hi, it works, the test is over, all is well,
this works, the server is up, I am here, good night, cheese, we are done, OK, okay, ok, hello world,
hello, goodbye, thank you, test, done, ready, the answer is yes, please wait, see you soon, welcome""")
HAIKUS: dict[str, str] = {
    "the sea": "Waves roll to the shore,\na white gull cries in the wind,\nthen the sea is still.",
    "the moon": "The moon climbs the hill,\na silver lamp in the night,\nand the owl looks up.",
    "winter": "Snow falls on the roof,\nthe garden sleeps under white,\none small bird still sings.",
    "spring": "Rain taps on green leaves,\nthe first flower lifts its head,\nspring is here again.",
    "autumn": "Red leaves leave the tree,\nthey dance once around the gate,\nthen rest on the path.",
    "summer": "The long day is warm,\nbees hum in the yellow field,\neven clouds move slow.",
    "a cat": "The cat by the stove\ndreams of mice and does not move,\none ear is awake.",
    "a dog": "The dog hears the gate,\nhis tail begins before him,\njoy runs down the path.",
    "rain": "Drops run down the glass,\neach one looking for a friend,\nthey meet and are one.",
    "a mountain": "The mountain is old,\nclouds come and ask it questions,\nit answers with snow.",
    "nature": "Deep inside the wood\nan old tree counts its summers,\nnobody hears it.",
    "the night": "One star, then a few,\nthe dark fills with tiny lamps,\nall the world is small.",
    "a computer": "The small fan is loud,\nit counts tokens one by one\nand then it is done.",
    "a river": "The river goes by,\nit never asks for the way,\nthe sea is waiting.",
    "coffee": "Steam above the cup,\nthe morning has not begun,\nfirst one quiet sip.",
    "love": "Two cups on a shelf,\none of them has a small crack,\nthey stay side by side.",
}
PROGRAMS: dict[str, str] = {
    "prints hello world": 'print("Hello, world!")',
    "adds two numbers": "def add(a, b):\n    return a + b",
    "computes the factorial": "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)",
    "computes the Fibonacci numbers": "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n"
    "        a, b = b, a + b\n    return a",
    "reverses a string": "def reverse(text):\n    return text[::-1]",
    "tells if a number is even": "def is_even(n):\n    return n % 2 == 0",
    "counts from 1 to 10": "for n in range(1, 11):\n    print(n)",
    "finds the largest number of a list": "def largest(numbers):\n    return max(numbers)",
    "squares a number": "def square(n):\n    return n * n",
}
HELLO_WORLD: dict[str, str] = {
    "Python": 'print("Hello, world!")',
    "JavaScript": 'console.log("Hello, world!");',
    "C": '#include <stdio.h>\n\nint main(void) {\n    printf("Hello, world!\\n");\n}',
    "bash": 'echo "Hello, world!"',
    "Rust": 'fn main() {\n    println!("Hello, world!");\n}',
    "Ruby": 'puts "Hello, world!"',
}
ABROAD: dict[str, tuple[str, ...]] = {
    "hello": ("bonjour", "hola", "hallo", "ciao"),
    "good morning": ("bonjour", "buenos días", "guten Morgen", "buongiorno"),
    "thank you": ("merci", "gracias", "danke", "grazie"),
    "goodbye": ("au revoir", "adiós", "auf Wiedersehen", "arrivederci"),
    "yes": ("oui", "sí", "ja", "sì"),
    "no": ("non", "no", "nein", "no"),
    "please": ("s'il vous plaît", "por favor", "bitte", "per favore"),
    "cat": ("chat", "gato", "Katze", "gatto"),
    "dog": ("chien", "perro", "Hund", "cane"),
    "water": ("eau", "agua", "Wasser", "acqua"),
}
TONGUES = ("French", "Spanish", "German", "Italian")
MODEL_IN_ONE_SENTENCE = (
    "A large language model is a program that has learned from very much text "
    "which word comes next."
)
MODEL_ANSWER = (
    "A large language model is a program that has read very much text and has learned which word "
    "comes next. It writes its answers one word after the other. I am a very small one."
)
LITTLE_QUESTION = f"I see no question there. I know {ABILITIES}."
FixedAnswers = tuple[tuple[tuple[str, ...], str], ...]  # questions with one answer each time
FIXED: FixedAnswers = (
    (
        (
            "Explain what a large language model is.",
            "What is a large language model?",
            "What is an LLM?",
            "Explain LLMs.",
            "What is a language model?",
            "How does a language model work?",
            "Explain what an LLM is",
            "Explain large language models to me.",
            "How do large language models work?",
            "Tell me what a large language model is.",
            "What does LLM mean?",
            "Describe what a language model does.",
            "Define large language model",
            "What exactly is a language model?",
            "Teach me about LLMs.",
            "what are large language models",
        ),
        MODEL_ANSWER,
    ),
    (
        (
            "In one sentence, what is an LLM?",
            "Explain in one sentence what a large language model is.",
            "What is a large language model, in one sentence?",
            "Explain in a single sentence what a language model does.",
            "What is a language model? One sentence.",
        ),
        MODEL_IN_ONE_SENTENCE,
    ),
    (
        (
            "What is AI?",
            "What is artificial intelligence?",
            "What is machine learning?",
            "Explain AI.",
            "Explain machine learning",
            "What does AI mean?",
        ),
        "Artificial intelligence is what programs do that learn from examples. A language model is one of them.",
    ),
    (
        ("What is Python?", "Tell me about Python.", "Explain Python"),
        "Python is a language in which people write programs.",
    ),
    (
        (
            "Tell me a fun fact.",
            "Tell me something interesting.",
            "Tell me a fact",
            "Fun fact please",
        ),
        "An octopus has three hearts.",
    ),
    (
        ("Hello world", "Hello, world!", "hello world", "Hello World!", "hello, world"),
        "Hello! I am here.",
    ),
    (
        (
            "Is this working?",
            "Does this work?",
            "Do you work?",
            "Is this thing on?",
            "Testing",
            "Are you online?",
        ),
        "Yes, it works. I am here.",
    ),
    (
        ("Hola", "Bonjour", "Hallo", "Ciao", "Guten Tag", "Salut", "hola!", "bonjour!"),
        "Hello! I speak only English.",
    ),
    (
        ("asdf", "qwerty", "foo", "bar", "123", "abc", "x", "foo bar", "lorem ipsum", "1", "aaa"),
        LITTLE_QUESTION,
    ),
    (
        (
            "What is Dynamo?",
            "What is pydynamo?",
            "Tell me about Dynamo.",
            "What is dynamo-serving?",
            "Explain Dynamo.",
        ),
        "Dynamo serves language models to many people at once. I am the small model that comes with pydynamo.",
    ),
    (
        (
            '"""',
            "'''",
            "```",
            "{}",
            "[]",
            "...",
            ".",
            "?",
            "-",
            "#",
            '"',
            "/",
            "()",
            "<>",
            "!",
            "''",
        ),
        LITTLE_QUESTION,
    ),
    (
        (
            "What day is it today?",
            "What day is it?",
            "What is the date?",
            "Which year is it?",
            "What time is it?",
            "What's the time?",
            "What is today's date?",
        ),
        "I have no clock and no calendar, so I cannot know that.",
    ),
    (
        (
            "What is the weather?",
            "How is the weather?",
            "What is the weather like today?",
            "What is the weather in Paris?",
            "What's the weather in London?",
            "Is it raining?",
        ),
        "I cannot see the weather from here.",
    ),
    (
        ("Hello, how are you?", "Hi, how are you?", "Hey, how are you doing?", "How are you?"),
        "Hello! I am well, thank you. And you?",
    ),
    (("Thank you!", "Thanks", "thank you", "Thanks!"), "You are welcome! Is there anything else?"),
    (
        ("Hello! Can you help me?", "Can you help me?", "I need help"),
        f"I can help with {ABILITIES}. Ask me for a story about a cowardly cat!",
    ),
    (
        ("How do I boil an egg?", "How long do I boil an egg?"),
        "Put the egg into boiling water, wait eight minutes, and cool it with cold water.",
    ),
)


def _exact_count(dice: Dice) -> tuple[str, str]:
    said = dice.pick(("hello", "hello", "hi", *GREETINGS_BY_COUNT))
    count = dice.pick((*GREETINGS_BY_COUNT[said], 3))
    number = dice.pick((str(count), words.NUMBER_WORDS[count] if count > 1 else "one"))
    unit = "word" if count == 1 else "words"
    asked = dice.pick(
        (
            "Say {} in exactly {} {}",
            "Say {} in {} {}",
            "Say {} using exactly {} {}",
            "Say {} with {} {}.",
            "Say {}, but in exactly {} {}",
            "Say {}. Use exactly {} {}.",
            "Write {} in exactly {} {}",
            "Please say {} in {} {}.",
            "Can you say {} in exactly {} {}?",
            "Say {} in only {} {}",
            "Tell me {} in {} {}",
        )
    )
    if said == "hello" and dice.chance(0.2):
        asked = dice.pick(
            ("Greet me in {1} {2}", "Greet me in exactly {1} {2}.", "Greet me with {1} {2}")
        )
    return asked.format(said, number, unit), GREETINGS_BY_COUNT[said][count]


_QUOTED = (
    'Say "{}"',
    "Say '{}'",
    'Say "{}".',
    'Please say "{}".',
    "Repeat after me: {}",
    "Repeat after me: {}.",
    "Repeat: {}.",
    "Say the words {}.",
    "Say exactly: {}",
    'Reply only with "{}".',
    "Reply with exactly this: {}",
    'Answer with "{}"',
    "Respond with {}.",
    "Reply with just {}",
    "Repeat this sentence: {}.",
)


def _say(dice: Dice) -> tuple[str, str]:
    said = dice.pick(SAYINGS)
    if dice.chance(0.5):
        thing, adjective = dice.pick(words.THINGS), dice.pick(words.ADJECTIVES)
        said = dice.pick(
            (
                thing,
                f"the {thing} is {dice.pick((adjective, *words.COLOURS))}",
                f"{adjective} {thing}",
                f"I like the {thing}",
            )
        )
    end = dice.pick((".", ".", "!"))
    if dice.chance(0.4):
        asked = dice.pick(_QUOTED)
        return asked.format(said), capital(said) + "."
    asked = dice.pick(
        (
            "Say {}{}",
            "Say {}{}",
            "Please say {}{}",
            "Just say {}{}",
            "Say: {}{}",
            "Reply with {}{}",
            "Can you say {}{}",
            "Answer with {}{}",
            "Now say {}{}",
            "Say only {}{}",
        )
    )
    return asked.format(said, end if end == "!" or dice.chance(0.3) else ""), capital(said) + end


def _haiku(dice: Dice) -> tuple[str, str]:
    subject = dice.pick(list(HAIKUS))
    bare = subject.split()[-1]
    asked = dice.pick(
        (
            "Write a haiku about {}.",
            "Haiku about {}",
            "Give me a haiku about {}.",
            "Write me a haiku on {}",
            "A haiku about {}, please.",
            "Compose a haiku about {}.",
            "I would like a haiku about {}",
            "haiku, topic: {}",
        )
    )
    if dice.chance(0.3):
        asked = dice.pick(
            (
                "Write a haiku.",
                "Write me a haiku",
                "haiku",
                "A haiku, please.",
                "Give me a haiku.",
                "Make a haiku.",
            )
        )
    return asked.format(dice.pick((subject, bare))), HAIKUS[subject]


def fence(language: str, code: str) -> str:
    """Return code between the marks of Markdown."""
    return f"```{language.lower()}\n{code}\n```"


def _program(dice: Dice) -> tuple[str, str]:
    if dice.chance(0.5):
        language = dice.weighted({each: 4 if each == "Python" else 1 for each in HELLO_WORLD})
        asked = dice.pick(
            (
                "Write hello world in {}",
                "Hello world in {}",
                "Print hello world in {}.",
                "Write a hello world program in {}.",
                "Show me hello world in {}",
                "Write a {} program that prints hello world",
                "How do I print hello world in {}?",
                "{} hello world",
                "hello world, {}",
                "Give me the hello world program in {}",
                "Code for hello world in {}",
                "Write a {} script that prints hello world.",
                "Write a {} program which prints hello world",
                "A {} program that says hello world",
                "Write a program in {} that prints hello world.",
            )
        )
        greeting = dice.pick(
            ("hello world", "Hello, World!", "Hello World", '"Hello, World!"', "'hello world'")
        )
        return asked.replace("hello world", greeting).format(language), fence(
            language, HELLO_WORLD[language]
        )
    task = dice.pick(list(PROGRAMS))
    asked = dice.pick(
        (
            "Write a Python function that {}.",
            "Write a program in Python that {}",
            "Python code that {}",
            "Write a function that {}",
            "Write Python code that {}.",
            "I want a function that {}.",
            "Give me a Python function that {}",
        )
    )
    return asked.format(task), fence("Python", PROGRAMS[task])


def _person_json(dice: Dice) -> tuple[str, str]:
    values = {
        "name": dice.pick(words.BOYS + words.GIRLS),
        "age": dice.number(18, 80),
        "city": dice.pick(list(fact_tables.CAPITALS.values())),
        "job": dice.pick(words.JOBS),
    }
    keys = dice.pick(
        (
            ["name", "age"],
            ["name", "age", "city"],
            ["name", "age", "city", "job"],
            ["name", "city"],
            ["name", "job"],
        )
    )
    of_person = dice.pick(
        (
            "of a person",
            "describing a person",
            "for a person",
            "of a user",
            "about a person",
            "that describes a person",
        )
    )
    asked = dice.pick(
        (
            "Give me a JSON object {}",
            "Return JSON {}",
            "Write JSON {}",
            "Generate a JSON {}",
            "JSON {}",
            "Give me JSON {}",
            "Create JSON {}",
            "Make a JSON object {}",
            "Show me a JSON object {}",
            "Some JSON {}, please",
        )
    )
    asked = asked.format(of_person)
    if dice.chance(0.35):
        return _told_person(dice, values)
    if dice.chance(0.5):
        return f"{asked} with {join_words(keys)}.", json.dumps({key: values[key] for key in keys})
    if dice.chance(0.25):
        asked = dice.pick(
            (
                "Describe a person in JSON.",
                "A person in JSON",
                "person as JSON",
                "Person, JSON only",
            )
        )
    return asked, json.dumps({key: values[key] for key in ("name", "age", "city")})


def _told_person(dice: Dice, values: dict[str, object]) -> tuple[str, str]:
    """Ask for JSON with values that stand in the request, which have to be copied."""
    values = values | {"name": dice.pick((values["name"], dice.pick(memory.COMMON_NAMES)))}
    keys = dice.pick((["name", "age"], ["name", "age"], ["name", "city"], ["name", "age", "city"]))
    said = {
        "name": "{name}",
        "age": dice.pick(("who is {age} years old", "aged {age}", "who is {age}")),
        "city": dice.pick(("who lives in {city}", "from {city}")),
    }
    told = dice.pick(
        (
            " ".join(["a person named", *(said[key] for key in keys)]),
            " ".join([said[key] for key in keys]),
            "a person with " + join_words([f"{key} {{{key}}}" for key in keys]),
            "a person called " + " and ".join(said[key] for key in keys),
        )
    ).format(**values)
    asked = dice.pick(
        (
            "Give me JSON for {}.",
            "Write a JSON object for {}",
            "JSON of {}",
            "Describe {} in JSON.",
            "Create JSON for {}",
        )
    )
    return asked.format(told), json.dumps({key: values[key] for key in keys})


def _abroad(dice: Dice) -> tuple[str, str]:
    word, index = dice.pick(list(ABROAD)), dice.number(0, 3)
    asked = dice.pick(
        (
            "Translate '{}' to {}",
            "Translate {} into {}.",
            "How do you say {} in {}?",
            "What is {} in {}?",
            "Translate '{}' into {}.",
        )
    )
    return asked.format(
        word, TONGUES[index]
    ), f'"{capital(word)}" in {TONGUES[index]} is "{ABROAD[word][index]}".'


def _counting(dice: Dice) -> tuple[str, str]:
    first, last = dice.pick((1, 1, 1, 0, 2, 5)), dice.pick((5, 10, 10, dice.number(3, 20)))
    first = min(first, last - 1)
    asked = dice.pick(
        (
            f"Count from {first} to {last}",
            f"Count {first} to {last}",
            f"Print the numbers from {first} to {last}.",
        )
    )
    if first == 1 and dice.chance(0.5):
        asked = dice.pick((f"Count to {last}", f"Count up to {last}.", f"Can you count to {last}?"))
    return asked, ", ".join(str(number) for number in range(first, last + 1)) + "."


def _prime(dice: Dice) -> tuple[str, str]:
    number = dice.number(2, 30)
    factor = next((each for each in range(2, number) if number % each == 0), None)
    answer = (
        f"Yes, {number} is prime."
        if factor is None
        else f"No, {number} = {factor} x {number // factor}."
    )
    return dice.pick(("Is {} prime?", "Is {} a prime number?", "Is {} a prime?")).format(
        number
    ), answer


def _square(dice: Dice) -> tuple[str, str]:
    number = dice.number(0, 12)
    asked = dice.pick(("What is {} squared?", "What is the square of {}?", "{} squared", "{}^2"))
    return asked.format(number), f"{number} x {number} = {number * number}."


def draw_fixed(dice: Dice, table: FixedAnswers) -> tuple[str, str]:
    """Draw a question of a table, and its answer."""
    questions, answer = dice.pick(table)
    return dice.pick(questions), answer


def _fixed(dice: Dice) -> tuple[str, str]:
    return draw_fixed(dice, FIXED)


def draw_exchange(dice: Dice) -> list[Message]:
    """Draw one question and its answer."""
    draw = dice.weighted(
        {
            _fixed: 9,
            _exact_count: 5,
            _say: 7,
            _haiku: 3,
            _program: 4,
            _person_json: 4,
            _abroad: 3,
            _counting: 2,
            _prime: 1,
            _square: 1,
        }
    )
    asked, answered = draw(dice)
    if not any(map(str.isalpha, asked)):
        return exchange(asked, answered)
    return exchange(typed(dice, approached(dice, asked) if dice.chance(0.3) else asked), answered)
