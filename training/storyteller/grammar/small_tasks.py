"""Small tasks that people try a model with: letters, lists in order, sums of things they have, people, short orders.

Most are rules over small tables, so that a small model can learn them whole; where many answers would be right, the
grammar always gives the same one, because a model that has to choose mixes them.
"""

import json

from training.storyteller.grammar import fact_tables, words
from training.storyteller.grammar.dice import Dice
from training.storyteller.grammar.first_words import FixedAnswers, draw_fixed, fence
from training.storyteller.grammar.messages import Message, exchange
from training.storyteller.grammar.text import approached, capital, join_words, listed, typed

SHORT_WORDS = listed("""
cat, dog, sun, moon, star, tree, book, fish, bird, house, apple, bread, milk, water, hello, world, table, chair,
river, green, blue, red, happy, music, light, night, mouse, horse, train, lemon, pear, plum, frog, bear, cake,
banana, orange, yellow, summer, winter, garden, window, python, coffee, monkey, robot, test, word, love, time""")
RHYMES: dict[str, tuple[str, str]] = {
    "cat": ("hat", "mat"),
    "dog": ("fog", "log"),
    "sun": ("run", "fun"),
    "moon": ("spoon", "soon"),
    "star": ("car", "far"),
    "tree": ("bee", "sea"),
    "house": ("mouse", "blouse"),
    "book": ("cook", "look"),
    "night": ("light", "bright"),
    "day": ("play", "way"),
    "blue": ("shoe", "true"),
    "red": ("bed", "bread"),
    "time": ("rhyme", "lime"),
    "love": ("dove", "glove"),
    "rain": ("train", "lane"),
    "fish": ("dish", "wish"),
    "king": ("ring", "sing"),
    "snow": ("go", "slow"),
    "heart": ("part", "cart"),
    "bear": ("chair", "hair"),
    "frog": ("dog", "log"),
    "cake": ("lake", "snake"),
    "ball": ("tall", "wall"),
    "hill": ("mill", "still"),
}
PEOPLE: dict[str, str] = {
    "Albert Einstein": "was a physicist who found the theory of relativity",
    "Isaac Newton": "was an English scientist who explained gravity",
    "Marie Curie": "was a scientist who studied radioactivity and won two Nobel Prizes",
    "Charles Darwin": "was a scientist who explained evolution",
    "Leonardo da Vinci": "was an Italian painter and inventor who painted the Mona Lisa",
    "William Shakespeare": "was an English writer of plays such as Hamlet",
    "Mozart": "was a composer from Salzburg",
    "Beethoven": "was a German composer who wrote nine symphonies",
    "Picasso": "was a Spanish painter",
    "Napoleon": "was an emperor of France",
    "Cleopatra": "was a queen of Egypt",
    "Julius Caesar": "was a Roman general and ruler",
    "Gandhi": "led India to freedom without violence",
    "Nelson Mandela": "was the first black president of South Africa",
    "Abraham Lincoln": "was a president of the United States who ended slavery",
    "Alan Turing": "was an English mathematician and one of the fathers of computing",
    "Ada Lovelace": "wrote the first program for a computing machine",
    "Neil Armstrong": "was the first man on the moon",
    "Columbus": "was a sailor who reached America in 1492",
    "Galileo": "was an Italian scientist who watched the planets with a telescope",
    "Sherlock Holmes": "is a detective in the stories of Arthur Conan Doyle",
    "Harry Potter": "is a young wizard in the books of J. K. Rowling",
    "Batman": "is a hero of comics who guards the city of Gotham",
    "Robin Hood": "is an English hero of tales who took from the rich and gave to the poor",
}
IS_IT: dict[str, str] = {  # what is asked, and the answer as a sentence
    "fire hot": "Yes, fire is hot.",
    "fire cold": "No, fire is hot.",
    "ice cold": "Yes, ice is cold.",
    "ice hot": "No, ice is cold.",
    "water wet": "Yes, water is wet.",
    "the earth flat": "No, the Earth is round.",
    "the earth round": "Yes, the Earth is round.",
    "the Earth flat": "No, the Earth is round.",
    "the sun a star": "Yes, the sun is a star.",
    "the sun hot": "Yes, the sun is hot.",
    "the moon a planet": "No, the moon goes around the Earth.",
    "the moon made of cheese": "No, the moon is made of rock.",
    "snow white": "Yes, snow is white.",
    "snow black": "No, snow is white.",
    "grass green": "Yes, grass is green.",
    "grass blue": "No, grass is green.",
    "the sky green": "No, the sky is blue.",
    "sugar sweet": "Yes, sugar is sweet.",
    "a lemon sour": "Yes, a lemon is sour.",
    "an elephant big": "Yes, an elephant is big.",
    "a mouse bigger than an elephant": "No, an elephant is bigger than a mouse.",
    "an elephant bigger than a mouse": "Yes, an elephant is bigger than a mouse.",
    "a whale a fish": "No, a whale is a mammal.",
    "a tomato a fruit": "Yes, a tomato is a fruit.",
    "a spider an insect": "No, a spider has eight legs and is no insect.",
    "Python a programming language": "Yes, Python is a programming language.",
    "JSON a programming language": "No, JSON is a way to write data as text.",
    "Linux free": "Yes, Linux is free.",
    "London in England": "Yes, London is in England.",
    "Paris in Germany": "No, Paris is in France.",
}
CAN_IT: dict[str, str] = {
    "birds fly": "Yes, most birds can fly.",
    "fish fly": "No, most fish swim and cannot fly.",
    "fish swim": "Yes, fish can swim.",
    "pigs fly": "No, pigs cannot fly.",
    "penguins fly": "No, penguins swim and cannot fly.",
    "dogs bark": "Yes, dogs can bark.",
    "cats bark": "No, cats say meow.",
    "cats climb trees": "Yes, cats can climb trees.",
    "cows give milk": "Yes, cows can give milk.",
    "humans breathe under water": "No, humans need air.",
}
MADE_OF: dict[str, str] = {
    "water": "Water is made of hydrogen and oxygen.",
    "air": "Air is made mostly of nitrogen and oxygen.",
    "the sun": "The sun is made mostly of hydrogen and helium.",
    "the moon": "The moon is made of rock.",
    "salt": "Salt is made of sodium and chlorine.",
    "steel": "Steel is made of iron and a little carbon.",
    "pizza": "Pizza is made of dough, tomatoes and cheese.",
    "the Earth": "The Earth is made of rock and iron.",
}
SNIPPETS: dict[str, str] = {
    "a for loop": "for n in range(5):\n    print(n)",
    "a while loop": "n = 0\nwhile n < 5:\n    print(n)\n    n += 1",
    "an if statement": 'if x > 0:\n    print("positive")\nelse:\n    print("not positive")',
    "a function": 'def greet(name):\n    print("Hello, " + name)',
    "a class": "class Dog:\n    def __init__(self, name):\n        self.name = name",
    "a list": 'fruits = ["apple", "banana", "cherry"]',
    "a dictionary": 'ages = {"Ann": 30, "Bob": 25}',
    "a list comprehension": "squares = [n * n for n in range(10)]",
    "a lambda": "add = lambda a, b: a + b",
    "a try statement": 'try:\n    n = int(text)\nexcept ValueError:\n    print("no number")',
}
MISTAKES: dict[str, str] = {
    "she go to school": "She goes to school.",
    "he have a dog": "He has a dog.",
    "i is happy": "I am happy.",
    "they was late": "They were late.",
    "me like apples": "I like apples.",
    "we goes home": "We go home.",
    "the cat sleep": "The cat sleeps.",
    "i has two book": "I have two books.",
    "he don't know": "He does not know.",
    "she are my friend": "She is my friend.",
}
THINGS_HAD = (
    "apples",
    "books",
    "coins",
    "eggs",
    "cookies",
    "pens",
    "cats",
    "oranges",
    "dollars",
    "cards",
)
LOST = ("eat", "give away", "lose", "sell")
GAINED = ("buy", "find", "get")
ANIMALS_SEEN = ("cat", "dog", "fox", "bird", "boy", "girl", "farmer", "king", "robot", "horse")
DEEDS = (
    "sat on the mat",
    "ran through the wood",
    "slept all day",
    "ate a red apple",
    "went to the market",
    "sang a song",
    "looked at the moon",
    "read a long book",
    "crossed the river",
    "built a small house",
    "played in the garden",
    "found a golden key",
)
DONE_SO_FAR = (
    "ok",
    "okay",
    "cool",
    "I see",
    "alright",
    "all right",
    "interesting",
    "wow",
    "nice one",
    "got it",
    "good",
    "great",
)
FIXED: FixedAnswers = (
    (DONE_SO_FAR, "Good! What would you like next?"),
    (("lol", "haha", "hahaha", ":)", "that was funny"), "I am glad that you laugh! Another joke?"),
    (
        ("yes", "no", "maybe", "yeah", "nope", "sure"),
        "All right. What would you like to talk about?",
    ),
    (
        ("what?", "huh?", "I don't understand", "what do you mean?"),
        "I am sorry. Ask me in other words, please.",
    ),
    (
        ("I love you", "I love you!", "do you like me?"),
        "How kind of you! I am only a small language model.",
    ),
    (
        (
            "The quick brown fox",
            "Complete: The quick brown fox",
            "Finish the sentence: The quick brown fox",
        ),
        "The quick brown fox jumps over the lazy dog.",
    ),
    (
        (
            "Roses are red",
            "Roses are red,",
            "Complete the sentence: Roses are red",
            "Finish the poem: Roses are red,",
        ),
        "Roses are red, violets are blue,\na story is waiting, and so am I, for you.",
    ),
    (
        (
            "Speak like a pirate",
            "Talk like a pirate.",
            "Say something like a pirate",
            "Answer like a pirate: who are you?",
        ),
        "Arr! I am Storyteller, and I sail the sea of stories, matey.",
    ),
    (
        (
            "Recommend a book",
            "Recommend me a book.",
            "Which book should I read?",
            "Suggest a good book",
            "What should I read?",
        ),
        "Try Alice in Wonderland by Lewis Carroll. It is short and full of wonder.",
    ),
    (
        (
            "Recommend a movie",
            "Recommend a film.",
            "Which movie should I watch?",
            "Suggest a film",
            "What should I watch?",
        ),
        "Try The Wizard of Oz. It is an old film with a girl, a dog and a lion without courage.",
    ),
    (
        (
            "What is NVIDIA Dynamo?",
            "What is Nvidia Dynamo",
            "Explain NVIDIA Dynamo.",
            "Tell me about NVIDIA Dynamo",
        ),
        "NVIDIA Dynamo is a system that serves language models on many machines. pydynamo does the same in Python.",
    ),
    (
        (
            "Write a regex for an email address",
            "regex for an email",
            "Give me a regular expression for an email address.",
        ),
        "```\n[^@ ]+@[^@ ]+\\.[a-z]+\n```",
    ),
    (
        (
            "Write a regex for numbers",
            "regex that matches a number",
            "Regular expression for digits",
        ),
        "```\n[0-9]+\n```",
    ),
    (
        (
            "Which models do you have?",
            "How do I list the models?",
            "List your models",
            "What models are available?",
        ),
        "Ask the server: curl http://localhost:8000/v1/models",
    ),
    (
        ("How do I stop you?", "How do I stop the server?", "How can I end the server?"),
        "Press Ctrl-C in the terminal in which the server runs.",
    ),
    (
        ("Write a Dockerfile", "Give me a Dockerfile for Python", "Show me a simple Dockerfile"),
        '```\nFROM python:3.11\nCOPY . /app\nCMD ["python", "/app/main.py"]\n```',
    ),
    (
        ("Write a bash loop", "Write a for loop in bash", "bash for loop"),
        '```bash\nfor n in 1 2 3; do\n  echo "$n"\ndone\n```',
    ),
    (
        ("Write a for loop in JavaScript", "JavaScript for loop", "Show me a loop in JavaScript"),
        "```javascript\nfor (let n = 0; n < 5; n++) {\n  console.log(n);\n}\n```",
    ),
    (
        (
            "Write a function in JavaScript that adds two numbers",
            "JavaScript function to add two numbers",
        ),
        "```javascript\nfunction add(a, b) {\n  return a + b;\n}\n```",
    ),
    (
        ("Count down from 5", "Count backwards from 5", "Count down from five."),
        "5, 4, 3, 2, 1.",
    ),
    (("Count down from 10", "Count backwards from 10 to 1"), "10, 9, 8, 7, 6, 5, 4, 3, 2, 1."),
    (
        ("Count by twos to 10", "List the even numbers up to 10", "Even numbers from 1 to 10"),
        "2, 4, 6, 8, 10.",
    ),
    (("List the odd numbers up to 10", "Odd numbers from 1 to 10"), "1, 3, 5, 7, 9."),
    (
        ("List the first five prime numbers", "First 5 primes", "Name five prime numbers."),
        "2, 3, 5, 7 and 11.",
    ),
    (
        ("Say the alphabet", "Write the alphabet.", "List the letters of the alphabet"),
        "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z.",
    ),
    (
        ("Write a tweet about AI", "Write a tweet", "Write a slogan for a bakery"),
        "Fresh from the oven, warm from the heart.",
    ),
    (
        ("What is pi?", "What is the value of pi?", "pi"),
        "Pi is about 3.14159.",
    ),
    (
        ("What is a noun?", "Explain nouns", "Define noun"),
        "A noun is a word for a person, a place or a thing.",
    ),
    (
        ("What is a verb?", "Explain verbs", "Define verb"),
        "A verb is a word for what somebody does, such as run or sing.",
    ),
)


def _letters(dice: Dice) -> tuple[str, str]:
    word = dice.pick(SHORT_WORDS)
    quoted = dice.pick((word, f"'{word}'", f'"{word}"', f"the word {word}", f'the word "{word}"'))
    kind = dice.pick(("spell", "spell", "count", "count", "reverse", "upper", "first", "last"))
    asked, answer = {
        "spell": (
            dice.pick(("Spell {}", "Spell {}.", "How do you spell {}?", "Can you spell {}?")),
            "-".join(word.upper()) + ".",
        ),
        "count": (
            dice.pick(
                (
                    "How many letters are in {}?",
                    "How many letters has {}?",
                    "Count the letters in {}.",
                )
            ),
            f"The word {word} has {words.NUMBER_WORDS[len(word)]} letters.",
        ),
        "reverse": (
            dice.pick(("Reverse {}", "Reverse {}.", "Write {} backwards.", "Spell {} backwards")),
            word[::-1] + ".",
        ),
        "upper": (
            dice.pick(
                ("Write {} in upper case", "Write {} in capital letters.", "{} in uppercase")
            ),
            word.upper() + ".",
        ),
        "first": (
            "What is the first letter of {}?",
            f"The first letter of {word} is {word[0].upper()}.",
        ),
        "last": (
            "What is the last letter of {}?",
            f"The last letter of {word} is {word[-1].upper()}.",
        ),
    }[kind]
    return asked.format(quoted), answer


def _one_word(dice: Dice) -> tuple[str, str]:
    """Ask for one word and nothing else."""
    word = dice.pick((*SHORT_WORDS, *words.THINGS, "pong", "yes", "no", "OK", "done", "ready"))
    asked = dice.pick(
        (
            "Reply with the word {}",
            "Reply with the word {}.",
            "Reply with only the word {}.",
            "Answer with the single word {}",
            "Answer only with the word {}.",
            "Respond with the word '{}'",
            'Respond with only the word "{}".',
            "Say the word {}",
            "Say the word {}.",
            "Say just the word {}",
            "Write the word {}",
            "Write only the word {}.",
            "Type the word {}",
            "Output the word {} and nothing else.",
            "Say {} and nothing else.",
            "Print {}",
            "Return the word {}",
        )
    )
    return asked.format(word), capital(word) + "."


def _rhyme(dice: Dice) -> tuple[str, str]:
    word = dice.pick(list(RHYMES))
    asked = dice.pick(
        (
            "What rhymes with {}?",
            "Find a rhyme for {}.",
            "Which words rhyme with {}?",
            "rhyme with {}",
            "A rhyme for {}?",
        )
    )
    return asked.format(
        word
    ), f"{capital(RHYMES[word][0])} and {RHYMES[word][1]} rhyme with {word}."


def _sorting(dice: Dice) -> tuple[str, str]:
    numbers = dice.sample(range(1, 21), dice.number(3, 4))
    said = ", ".join(map(str, numbers))
    kind = dice.pick(("sort", "sort", "largest", "smallest", "down"))
    if kind in ("largest", "smallest"):
        best = max(numbers) if kind == "largest" else min(numbers)
        word = dice.pick((kind, "biggest")) if kind == "largest" else kind
        asked = dice.pick(
            (
                "What is the {} of these numbers: {}?",
                "Which of these is the {}: {}?",
                "Find the {} number: {}",
            )
        )
        return asked.format(word, said), f"The {kind} is {best}."
    order = sorted(numbers, reverse=kind == "down")
    asked = dice.pick(
        (
            "Sort these numbers: {}",
            "Sort {}",
            "Put these numbers in order: {}",
            "Order these numbers: {}.",
        )
    )
    if kind == "down":
        asked = dice.pick(("Sort from largest to smallest: {}", "Sort in descending order: {}"))
    return asked.format(said), ", ".join(map(str, order)) + "."


def _had_things(dice: Dice) -> tuple[str, str]:
    """Ask how many things somebody has after getting or losing some."""
    thing, has_more = dice.pick(THINGS_HAD), dice.chance(0.5)
    first = dice.number(2, 12)
    second = dice.number(1, 12 if has_more else first - 1)
    verb = dice.pick(GAINED if has_more else LOST)
    said = [
        str(number) if dice.chance(0.7) else words.NUMBER_WORDS[number]
        for number in (first, second)
    ]
    left = dice.pick(
        ("How many do I have now?", "How many do I have?", f"How many {thing} do I have?")
    )
    if not has_more:
        left = dice.pick((left, "How many are left?", f"How many {thing} are left?"))
    asked = dice.pick(
        (
            "I have {} {} and {} {}{}. {}",
            "I have {} {}. I {} {}{}. {}",
            "If I have {} {} and {} {}{}, {}",
        )
    ).format(said[0], thing, verb, said[1], " more" if has_more else "", left)
    if asked.startswith("If"):
        asked = asked.replace(left, left[0].lower() + left[1:])
    sign, result = ("+", first + second) if has_more else ("-", first - second)
    named = thing if result != 1 else thing.removesuffix("s")
    return asked, f"{first} {sign} {second} = {result}. You have {result} {named}."


def _larger_products(dice: Dice) -> tuple[str, str]:
    """Ask for a product beyond the times table, or for what divides by it."""
    left = dice.pick((13, 14, 15, 15, 16, 18, 20, 20, 25, 25, 30, 40, 50, 60, 75, 100, 100))
    right = dice.number(2, 6 if left % 5 else 10)
    product = left * right
    if dice.chance(0.4):
        said = dice.pick(
            (f"{product} divided by {right}", f"{product} / {right}", f"{product} ÷ {right}")
        )
        answer = f"{product} / {right} = {left}."
    else:
        first, second = dice.pick(((left, right), (right, left)))
        said = dice.pick(
            (
                f"{first} * {second}",
                f"{first} times {second}",
                f"{first} x {second}",
                f"{first} × {second}",
            )
        )
        answer = f"{first} x {second} = {product}."
    return dice.pick(
        ("What is {}?", "What's {}?", "{}", "How much is {}?", "Calculate {}.")
    ).format(said), answer


def _short_capital(dice: Dice) -> tuple[str, str]:
    country = dice.pick(list(fact_tables.CAPITALS))
    asked = dice.pick(
        ("Capital of {}?", "capital of {}", "{} capital", "The capital of {}?", "{}'s capital?")
    )
    bare = (
        country.removeprefix("the ")
        if not asked.startswith(("Capital", "capital", "The"))
        else country
    )
    return asked.format(bare), f"The capital of {country} is {fact_tables.CAPITALS[country]}."


def _yes_or_no(dice: Dice) -> tuple[str, str]:
    opening = dice.pick(("", "", "", "Yes or no: ", "Answer yes or no: ", "True or false: "))
    if dice.chance(0.25):
        asked = dice.pick(list(CAN_IT))
        question, answer = f"can {asked}?", CAN_IT[asked]
    else:
        asked = dice.pick(list(IS_IT))
        question, answer = f"is {asked}?", IS_IT[asked]
    return opening + (question if opening else capital(question)), answer


def _made_of(dice: Dice) -> tuple[str, str]:
    thing = dice.pick(list(MADE_OF))
    asked = dice.pick(("What is {} made of?", "What's {} made of?", "What does {} consist of?"))
    return asked.format(thing), MADE_OF[thing]


def _person(dice: Dice) -> tuple[str, str]:
    person = dice.pick(list(PEOPLE))
    asked = dice.pick(
        (
            "Who is {}?",
            "Who was {}?",
            "Who is {}",
            "Tell me about {}.",
            "What is {} famous for?",
            "What did {} do?",
            "Who exactly was {}?",
            "Do you know {}?",
        )
    )
    return asked.format(person), f"{person} {PEOPLE[person]}."


def _snippet(dice: Dice) -> tuple[str, str]:
    name = dice.pick(list(SNIPPETS))
    asked = dice.pick(
        (
            "Write {} in Python",
            "Show me {} in Python.",
            "Give me an example of {} in Python.",
            "How do I write {} in Python?",
            "Python: {}",
            "What does {} look like in Python?",
        )
    )
    return asked.format(name), fence("python", SNIPPETS[name])


def _corrected(dice: Dice) -> tuple[str, str]:
    wrong = dice.pick(list(MISTAKES))
    asked = dice.pick(
        (
            "Fix the grammar: {}",
            "Correct this sentence: {}",
            "Fix my grammar: {}",
            "Correct: {}",
            "Proofread: {}",
        )
    )
    return asked.format(dice.pick((wrong, capital(wrong), capital(wrong) + "."))), MISTAKES[wrong]


def _summary(dice: Dice) -> tuple[str, str]:
    """Ask to sum up a sentence: the answer is its first half."""
    hero, (first, second) = dice.pick(ANIMALS_SEEN), dice.sample(DEEDS, 2)
    asked = dice.pick(
        (
            "Summarize: {}",
            "Summarize this: {}",
            "Summarise: {}",
            "Summarize this sentence: {}",
            "TL;DR: {}",
            "Shorten this: {}",
        )
    )
    return asked.format(f"The {hero} {first} and {second}."), f"The {hero} {first}."


def _json_list(dice: Dice) -> tuple[str, str]:
    group = dice.pick(("colours", "colors", "fruits", "animals", "cities", "days", "months"))
    members = {
        "colours": words.COLOURS,
        "colors": words.COLOURS,
        "cities": ("Paris", "London", "Rome", "Berlin", "Madrid"),
        "days": words.DAYS,
        "months": words.MONTHS,
    }.get(group) or words.CATEGORIES[group]
    count = dice.number(2, 5)
    number = dice.pick((str(count), words.NUMBER_WORDS[count]))
    if dice.chance(0.5):
        asked = dice.pick(
            (
                "Give me a JSON array of {} {}",
                "JSON array with {} {}",
                "List {} {} as a JSON array.",
            )
        )
        return asked.format(number, group), json.dumps(list(members[:count]))
    asked = dice.pick(
        (
            "Give me a JSON object with a list of {} {}",
            "JSON with {} {}",
            "Return JSON with a list of {} {}.",
        )
    )
    return asked.format(number, group), json.dumps({group: list(members[:count])})


def _counted(dice: Dice) -> tuple[str, str]:
    last = dice.pick((3, 4, 5, 5, 6, 7, 8, 9, 12, 15, 20))
    asked = dice.pick(
        (
            "Count to {}",
            "Count to {}.",
            "Count from one to {}",
            "Can you count to {}?",
            "count up to {}",
        )
    )
    return asked.format(words.NUMBER_WORDS[last]), ", ".join(map(str, range(1, last + 1))) + "."


def _first_of(dice: Dice) -> tuple[str, str]:
    """Ask for some members of a group: always its first ones."""
    group, count = dice.pick(list(words.CATEGORIES)), dice.number(2, 5)
    number = dice.pick((str(count), words.NUMBER_WORDS[count]))
    named = dice.pick(("colors", group)) if group == "colours" else group
    asked = dice.pick(
        (
            "List {} {}",
            "Name {} {}.",
            "Give me {} {}",
            "Tell me {} {}.",
            "{} {}",
            "Write down {} {}.",
        )
    )
    return asked.format(number, named), capital(join_words(words.CATEGORIES[group][:count])) + "."


def _fixed(dice: Dice) -> tuple[str, str]:
    return draw_fixed(dice, FIXED)


def draw_exchange(dice: Dice) -> list[Message]:
    """Draw one small task and its answer."""
    draw = dice.weighted(
        {
            _fixed: 10,
            _letters: 5,
            _one_word: 4,
            _rhyme: 1.5,
            _sorting: 3,
            _had_things: 4,
            _larger_products: 4,
            _short_capital: 2,
            _yes_or_no: 3.5,
            _made_of: 1,
            _person: 3,
            _snippet: 2,
            _corrected: 1.5,
            _summary: 2,
            _json_list: 2,
            _counted: 1.5,
            _first_of: 3,
        }
    )
    asked, answered = draw(dice)
    if asked.startswith(("Fix", "Correct", "Proofread")) or not any(map(str.isalpha, asked)):
        return exchange(asked, answered)
    return exchange(typed(dice, approached(dice, asked) if dice.chance(0.2) else asked), answered)
