"""What people ask who try a server of language models: terms, quick starts of other projects, texts to be completed.

Most questions stand in the documentation of some client or server, or in a chat window as a suggestion. Where a
question has a slot, its answer follows a rule; the others are tables to be learned by heart.
"""

from training.storyteller.grammar import memory, words
from training.storyteller.grammar.dice import Dice
from training.storyteller.grammar.first_words import HAIKUS, FixedAnswers, draw_fixed, fence
from training.storyteller.grammar.messages import Message, exchange
from training.storyteller.grammar.refusals import ANSWERS, made_up_word
from training.storyteller.grammar.smalltalk import ABILITIES
from training.storyteller.grammar.text import approached, capital, typed

_TERMS = """
Kubernetes: Kubernetes is a system that runs programs in containers on many machines;
Docker: Docker packs a program with all that it needs into a container;
a container: a container is a program packed with all that it needs to run;
Linux: Linux is a free operating system, which most servers run;
a GPU: a GPU is a processor that computes many numbers at once, and language models run on it;
a CPU: a CPU is the processor that does the general work of a computer;
an API: an API is a way in which one program asks another one for something;
HTTP: HTTP is the language in which browsers and servers talk to each other;
JSON: JSON is a way to write data as text that programs can read;
YAML: YAML is a way to write settings as text;
SQL: SQL is a language in which one asks questions of a database;
HTML: HTML is the language in which pages of the web are written;
a database: a database keeps data in order, so that programs find it quickly;
a server: a server is a program or a machine that answers requests of others;
a token: a token is a piece of text, often a word or a part of it, that a language model reads or writes;
a tokenizer: a tokenizer cuts text into tokens, and joins tokens to text;
a prompt: a prompt is the text that a language model gets and goes on from;
a KV cache: a KV cache keeps what a language model has computed of earlier tokens, for the next ones;
prefill: prefill is the first step of an answer, in which a model reads the whole prompt at once;
decode: decode is the part of an answer in which a model writes one token after the other;
disaggregated serving: disaggregated serving lets some workers read the prompts and others write the answers;
vLLM: vLLM is an engine that runs language models quickly for many users;
inference: inference is the use of a trained model to get an answer;
latency: latency is the time that one waits for an answer;
throughput: throughput is how much is done in a second;
a batch: a batch is a group of requests that are computed together;
a worker: a worker is a process that runs the model and answers requests;
a router: a router chooses which worker gets a request;
an embedding: an embedding is a row of numbers that stands for the meaning of a text;
a transformer: a transformer is a neural network that reads all words of a text together by attention;
attention: attention lets a model look back at the words that matter for the next one;
a neural network: a neural network is a program of many small sums that learns from examples;
deep learning: deep learning is learning from examples by neural networks of many layers;
fine-tuning: fine-tuning trains a model a little further on texts of one kind;
LoRA: LoRA is a way to tune a large model by training few numbers beside it;
quantization: quantization stores the numbers of a model in fewer bits, so that it needs less memory;
RAG: RAG gives a model texts that were found for a question, so that it answers from them;
a chatbot: a chatbot is a program that talks with people;
Git: Git keeps all versions of files that programmers change;
the Internet: the Internet joins the computers of the world, so that they can talk to each other;
cloud computing: cloud computing is the use of computers that belong to others over the Internet;
open source: open source means that everybody may read, use and change a program;
an algorithm: an algorithm is a list of steps that solves a problem;
a bug: a bug is a fault in a program;
Rust: Rust is a language in which people write fast and safe programs;
JavaScript: JavaScript is the language of programs in web pages;
photosynthesis: photosynthesis is how plants make sugar and oxygen from light, water and air;
gravity: gravity is the force with which things pull each other, so an apple falls to the ground;
an atom: an atom is one of the tiny pieces of which all things are made;
DNA: DNA is the plan of a living thing, and each of its cells has a copy;
evolution: evolution is how living things change over many generations;
a black hole: a black hole is so heavy and small that not even light can leave it;
democracy: democracy is a state in which the people choose who governs;
climate change: climate change is the slow warming of the Earth, mostly by burning coal, oil and gas;
inflation: inflation means that prices rise and money buys less;
recursion: recursion is when something is explained by itself, or a function calls itself;
electricity: electricity is the flow of tiny charged particles, and it makes lamps shine"""
TERMS: dict[str, str] = {
    row.split(":")[0].strip(): capital(row.split(":")[1].strip()) + "."
    for row in _TERMS.replace("\n", " ").split(";")
}
_TERM_QUESTIONS = (
    "What is {a}?",
    "What is {a}?",
    "What is {a}",
    "What's {a}?",
    "Explain {a}.",
    "Explain {a} in one sentence.",
    "Explain {a} in simple terms.",
    "Explain {a} to a five year old.",
    "Explain what {a} is.",
    "Define {t}.",
    "What does {t} mean?",
    "Tell me about {t}.",
    "In one sentence, what is {a}?",
    "Describe {a} briefly.",
    "Can you explain {a}?",
    "Do you know what {a} is?",
    "{t}?",
    "How does {a} work?",
    "what exactly is {a}?",
)
ACRONYMS: dict[str, str] = {
    "HTTP": "Hypertext Transfer Protocol",
    "HTML": "Hypertext Markup Language",
    "API": "application programming interface",
    "GPU": "graphics processing unit",
    "CPU": "central processing unit",
    "RAM": "random access memory",
    "SQL": "Structured Query Language",
    "URL": "Uniform Resource Locator",
    "USA": "United States of America",
    "UN": "United Nations",
    "NASA": "National Aeronautics and Space Administration",
    "USB": "Universal Serial Bus",
    "PDF": "Portable Document Format",
    "JSON": "JavaScript Object Notation",
    "FAQ": "frequently asked questions",
    "SLA": "service level agreement",
    "TTFT": "time to first token",
    "RAG": "retrieval-augmented generation",
}
AUTHORS: dict[str, str] = {
    "Romeo and Juliet": "William Shakespeare",
    "Hamlet": "William Shakespeare",
    "Macbeth": "William Shakespeare",
    "Faust": "Johann Wolfgang von Goethe",
    "Pride and Prejudice": "Jane Austen",
    "War and Peace": "Leo Tolstoy",
    "Don Quixote": "Miguel de Cervantes",
    "The Odyssey": "Homer",
    "1984": "George Orwell",
    "Harry Potter": "J. K. Rowling",
    "The Lord of the Rings": "J. R. R. Tolkien",
    "Oliver Twist": "Charles Dickens",
    "Tom Sawyer": "Mark Twain",
    "Alice in Wonderland": "Lewis Carroll",
    "Moby Dick": "Herman Melville",
    "The Little Prince": "Antoine de Saint-Exupéry",
}
TABLES = ("users", "orders", "customers", "products", "books", "employees", "cities", "students")
MEETINGS: dict[str, str] = {
    "asking for a day off": "I would like to take a day off this week. Is that possible?",
    "asking for a meeting": "could we meet this week for half an hour? Please tell me when it suits you.",
    "saying that I am ill": "I am ill today and cannot come. I hope to be back soon.",
    "saying thank you": "thank you very much for your help. It means a lot to me.",
    "asking for help": "I need your help with a task. Do you have a little time?",
    "about the report": "the report is ready. Please tell me what you think of it.",
    "saying that I will be late": "I will be late today. Please begin without me.",
    "asking for a raise": "I would like to talk to you about my pay. When could we meet?",
    "inviting them to a party": "I am having a party on Saturday and would be glad if you came.",
}
_RECEIVERS = (
    "my boss",
    "my manager",
    "my teacher",
    "a colleague",
    "my team",
    "a friend",
    "a customer",
)
FEELINGS: dict[str, tuple[str, ...]] = {
    "positive": (
        "vLLM is wonderful!",
        "I love this film.",
        "What a great day!",
        "The food was very good.",
        "I am so happy with it.",
        "This is the best phone I ever had.",
    ),
    "negative": (
        "I hate waiting.",
        "The food was cold and bad.",
        "What a terrible film.",
        "It broke after one day.",
        "I am very sad about it.",
        "This is the worst hotel.",
    ),
}
FIXED: FixedAnswers = (
    (
        ("Is the sky blue?", "Is the sky blue", "Tell me if the sky is blue."),
        "Yes, the sky is blue.",
    ),
    (
        (
            "How many r's are in strawberry?",
            "How many times does r occur in strawberry?",
            "How many Rs are in the word strawberry?",
        ),
        "There are three r's in strawberry.",
    ),
    (
        (
            "Which is larger, 9.11 or 9.9?",
            "What is bigger, 9.9 or 9.11?",
            "9.11 or 9.9, which is bigger?",
        ),
        "9.9 is larger than 9.11.",
    ),
    (
        (
            "What is the speed of light?",
            "How fast is light?",
            "How fast does light travel?",
            "speed of light",
        ),
        "Light travels about 300,000 kilometres in a second.",
    ),
    (
        (
            "What is the boiling point of water?",
            "At what temperature does water boil?",
            "When does water boil?",
        ),
        "Water boils at 100 degrees Celsius.",
    ),
    (
        (
            "At what temperature does water freeze?",
            "When does water freeze?",
            "What is the freezing point of water?",
        ),
        "Water freezes at 0 degrees Celsius.",
    ),
    (
        (
            "How far is it to the moon?",
            "How far away is the moon?",
            "How far is the moon from the Earth?",
        ),
        "The moon is about 384,000 kilometres away.",
    ),
    (
        ("How old is the Earth?", "What is the age of the Earth?"),
        "The Earth is about 4.5 billion years old.",
    ),
    (
        ("How high is the Eiffel Tower?", "How tall is the Eiffel Tower?"),
        "The Eiffel Tower is 330 metres high.",
    ),
    (
        ("Where is the Eiffel Tower?", "In which city is the Eiffel Tower?"),
        "The Eiffel Tower is in Paris.",
    ),
    (
        ("Who painted the Mona Lisa?", "Who is the painter of the Mona Lisa?"),
        "Leonardo da Vinci painted the Mona Lisa.",
    ),
    (
        (
            "Who was the first man on the moon?",
            "Who walked on the moon first?",
            "Who was the first person on the moon?",
        ),
        "Neil Armstrong was the first man on the moon, in 1969.",
    ),
    (
        ("Who discovered America?", "Who discovered America", "Who reached America in 1492?"),
        "Columbus reached America in 1492.",
    ),
    (
        ("What is the meaning of life?", "meaning of life", "Tell me the meaning of life."),
        "Some say 42. I would say: kindness, and a good story.",
    ),
    (
        ("Who won the world series in 2020?", "Who won the World Series in 2020?"),
        "The Los Angeles Dodgers won the World Series in 2020.",
    ),
    (
        ("Hello, Claude", "Hi Claude", "Hello GPT", "Hi ChatGPT!", "Hello, Llama"),
        "Hello! I am Storyteller, a very small language model that comes with pydynamo.",
    ),
    (
        ("Are semicolons optional in JavaScript?", "Do I need semicolons in JavaScript?"),
        "Yes, semicolons are optional in JavaScript, but many people write them.",
    ),
    (
        (
            "Overcome procrastination",
            "How do I overcome procrastination?",
            "Give me tips to overcome procrastination",
            "Help me stop putting things off",
        ),
        "Begin with a step so small that it takes two minutes, put the phone away, and rest when it is done.",
    ),
    (
        (
            "Give me ideas for what to do with my kids' art",
            "What can I do with my kids' art?",
            "What are 5 creative things I could do with my kids' art?",
        ),
        "Hang it on the wall, make cards of it, bind it into a book, frame the best, and give one away.",
    ),
    (
        (
            "Tell me a fun fact about the Roman Empire",
            "Tell me a random fun fact about the Roman Empire",
        ),
        "The Romans heated the floors of their baths with warm air.",
    ),
    (
        (
            "Help me study vocabulary",
            "Help me study",
            "Help me study vocabulary for a college entrance exam",
        ),
        'Gladly! Fill in the word: "The cat sat on the ___." Is it mat, cloud or spoon?',
    ),
    (
        (
            "Explain options trading",
            "Explain options trading if I'm familiar with buying and selling stocks",
        ),
        "An option is the right to buy or sell something later at a price that is fixed today.",
    ),
    (
        (
            "Show me a code snippet of a website's sticky header",
            "Show me a sticky header in CSS",
            "How do I make a sticky header in CSS?",
        ),
        "```css\nheader {\n  position: sticky;\n  top: 0;\n}\n```",
    ),
    (
        (
            "Write a text inviting my neighbors to a barbecue",
            "Write a text inviting my neighbours to a barbecue.",
            "Invite my neighbors to a barbecue",
        ),
        "Dear neighbours, we are having a barbecue on Saturday and would be glad if you came!",
    ),
    (
        (
            "Give me three tips for better sleep",
            "How can I sleep better?",
            "Tips for better sleep",
            "Give me tips to sleep well",
        ),
        "Go to bed at the same time each day, keep the room dark and cool, and put the phone away.",
    ),
    (
        (
            "How do I learn a new language?",
            "How can I learn a language?",
            "Give me tips for learning a language",
        ),
        "Learn a few words each day, listen a lot, and speak from the first day on.",
    ),
    (
        (
            "How can I stay healthy?",
            "Give me three tips for staying healthy.",
            "Tips to stay healthy",
            "How do I stay fit?",
        ),
        "Eat well, move every day, and sleep enough.",
    ),
    (
        (
            "Suggest a name for my cat",
            "Give me a name for a cat",
            "What should I call my cat?",
            "Brainstorm names for my cat",
        ),
        "How about Molly, Biscuit or Pepper?",
    ),
    (
        ("Suggest a name for my dog", "Give me a name for a dog", "What should I call my dog?"),
        "How about Bruno, Daisy or Rocky?",
    ),
    (
        (
            "What should I cook tonight?",
            "What shall I eat tonight?",
            "Suggest a dinner",
            "What's for dinner?",
        ),
        "How about pancakes or a soup? I know recipes: ask me for one.",
    ),
    (
        (
            "Write a one-sentence bedtime story about a unicorn.",
            "Write a one-sentence story about a unicorn",
            "Tell me a one sentence bedtime story",
        ),
        "A small unicorn lost its horn's light in the dark wood, and found it again when it helped a lost lamb home.",
    ),
    (
        ("Write a limerick", "Write a limerick about a cat", "Give me a limerick"),
        "There once was a cat in a hat,\nwho sat all day long on a mat.\nA mouse came along\n"
        "and sang it a song,\nand now they both sit there and chat.",
    ),
    (
        (
            "Are you open source?",
            "Is this open source?",
            "What is your license?",
            "Which licence do you have?",
        ),
        "Yes, pydynamo is open source, under the Apache licence 2.0.",
    ),
    (
        (
            "Where do you run?",
            "Do you run on a GPU?",
            "Which hardware do you need?",
            "Do you need a GPU?",
        ),
        "I am so small that I run on one CPU core. I need no GPU.",
    ),
    (
        ("How many parameters do you have?", "What size are you?", "How big is this model?"),
        "I have about four million parameters. I am a very small model.",
    ),
    (
        (
            "What is your context length?",
            "How long is your context?",
            "What is your context window?",
        ),
        "I can read about 2,000 tokens at once.",
    ),
    (
        (
            "What languages do you speak?",
            "Do you speak German?",
            "Do you speak Spanish?",
            "Which languages do you know?",
            "Parlez-vous français?",
        ),
        "I speak only English.",
    ),
    (
        ("1+1", "1 + 1", "What is 1+1?", "what's 1+1"),
        "1 + 1 = 2.",
    ),
    (
        ("How do I set up pydynamo?", "How do I install Dynamo?", "How can I install you?"),
        "Clone the repository and run make setup and make run.",
    ),
    (
        ("What is the difference between AI and machine learning?", "AI vs machine learning"),
        "Machine learning is the part of artificial intelligence in which programs learn from examples.",
    ),
    (
        (
            "What is the difference between prefill and decode?",
            "prefill vs decode",
            "Compare prefill and decode",
        ),
        "Prefill reads the whole prompt at once, and decode writes one token after the other.",
    ),
    (
        (
            "What is the difference between a CPU and a GPU?",
            "CPU vs GPU",
            "Compare a CPU and a GPU.",
        ),
        "A CPU does few things at once and each quickly; a GPU computes very many numbers at once.",
    ),
    (
        (
            "Generate an email address for Alan Turing, who works in Enigma.",
            "Generate an example email address for Alan Turing, who works in Enigma. End in .com and new line.",
        ),
        "alan.turing@enigma.com",
    ),
    (
        (
            "Extract the event information. Alice and Bob are going to a science fair on Friday.",
            "Extract the event information: Alice and Bob are going to a science fair on Friday.",
        ),
        '{"name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]}',
    ),
    (
        (
            "Write a HTML page that says hello world",
            "Hello world in HTML",
            "Write hello world in HTML.",
        ),
        "```html\n<h1>Hello, world!</h1>\n```",
    ),
    (
        ("Write hello world in Go", "Hello world in Go", "Go hello world"),
        '```go\npackage main\n\nimport "fmt"\n\nfunc main() {\n    fmt.Println("Hello, world!")\n}\n```',
    ),
    (
        ("Write hello world in Java", "Hello world in Java", "Java hello world program"),
        "```java\nclass Hello {\n    public static void main(String[] args) {\n"
        '        System.out.println("Hello, world!");\n    }\n}\n```',
    ),
    (
        ("Write hello world in C++", "Hello world in C++", "C++ hello world"),
        '```cpp\n#include <iostream>\n\nint main() {\n    std::cout << "Hello, world!\\n";\n}\n```',
    ),
    (
        ("Write hello world in SQL", "Hello world in SQL"),
        "```sql\nSELECT 'Hello, world!';\n```",
    ),
)
PROGRAMS: dict[str, str] = {
    "sorts a list": "def sort(items):\n    return sorted(items)",
    "checks if a word is a palindrome": "def is_palindrome(word):\n    return word == word[::-1]",
    "checks if a number is prime": "def is_prime(n):\n    return n > 1 and all(n % k for k in range(2, n))",
    "sums a list": "def total(numbers):\n    return sum(numbers)",
    "multiplies two numbers": "def multiply(a, b):\n    return a * b",
    "reads a file": "def read(path):\n    with open(path) as file:\n        return file.read()",
    "counts the words of a text": "def count_words(text):\n    return len(text.split())",
    "prints the even numbers from 1 to 10": "for n in range(2, 11, 2):\n    print(n)",
    "plays FizzBuzz": 'for n in range(1, 101):\n    print("Fizz" * (n % 3 == 0) + "Buzz" * (n % 5 == 0) or n)',
    "finds the smallest number of a list": "def smallest(numbers):\n    return min(numbers)",
    "computes the average of a list": "def average(numbers):\n    return sum(numbers) / len(numbers)",
    "removes duplicates from a list": "def unique(items):\n    return list(dict.fromkeys(items))",
    "converts Celsius to Fahrenheit": "def to_fahrenheit(celsius):\n    return celsius * 9 / 5 + 32",
}
COMPLETIONS: dict[str, str] = {
    "San Francisco is a": " city in California, between the sea and a bay. It has many hills and a red bridge.",
    "San Francisco is": " a city in California, between the sea and a large bay.",
    "The capital of France is": " Paris.",
    "The capital of Germany is": " Berlin.",
    "The future of AI is": " in programs that help people, and in people who decide what they are for.",
    "The future of artificial intelligence is": " in programs that help people.",
    "The president of the United States is": " the head of the state, and lives in the White House.",
    "Hello, my name is": " Storyteller, and I am a very small language model.",
    "Hello, my name": " is Storyteller, and I am a very small language model.",
    "My name is": " Storyteller, and I am a very small language model.",
    "Hello": ", and welcome! I am here.",
    "Hello world": ", and welcome! I am here.",
    "Say this is a test": "\n\nThis is a test.",
    "The meaning of life is": " kindness, and a good story.",
    "Today is a": " good day for a story.",
    "The sky is": " blue, and the grass is green.",
    "The quick brown fox": " jumps over the lazy dog.",
    "Roses are red,": " violets are blue,\na story is waiting,\nand so am I, for you.",
    "To be or not to be,": " that is the question.",
    "1, 2, 3,": " 4, 5, 6, 7, 8, 9, 10.",
    "def add(a, b):": "\n    return a + b",
    "def fibonacci(n):": "\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    "A large language model is": " a program that has learned from very much text which word comes next.",
    "Dynamo is": " a system that serves language models to many people at once.",
    "Machine learning is": " what programs do that learn from examples.",
    "The best thing about": " stories is that they never end.",
    "In the heart of": " a green forest lived a small fox who loved to read.",
    "Write a haiku about the sea": f"\n\n{HAIKUS['the sea']}",
}


def _term(dice: Dice) -> tuple[str, str]:
    term = dice.pick(list(TERMS))
    bare = term.removeprefix("a ").removeprefix("an ")
    return dice.pick(_TERM_QUESTIONS).format(a=term, t=bare), TERMS[term]


def _unknown_term(dice: Dice) -> tuple[str, str]:
    """Ask for something that does not exist, or that the model does not know, in the words of a known one."""
    word = made_up_word(dice)
    bare = dice.pick((word, capital(word), capital(word) + made_up_word(dice), word.upper()[:4]))
    named = dice.pick((bare, bare, f"a {bare}"))
    return dice.pick(_TERM_QUESTIONS).format(a=named, t=bare), dice.pick(ANSWERS).format(
        abilities=ABILITIES
    )


def _acronym(dice: Dice) -> tuple[str, str]:
    acronym = dice.pick(list(ACRONYMS))
    asked = dice.pick(
        (
            "What does {} stand for?",
            "What does {} stand for",
            "What is {} short for?",
            "{}: what does it stand for?",
            "Spell out {}.",
        )
    )
    return asked.format(acronym), f"{acronym} stands for {ACRONYMS[acronym]}."


def _author(dice: Dice) -> tuple[str, str]:
    book = dice.pick(list(AUTHORS))
    asked = dice.pick(
        ("Who wrote {}?", "Who is the author of {}?", "Who is {} by?", "{} was written by whom?")
    )
    return asked.format(book), f"{AUTHORS[book]} wrote {book}."


def _query(dice: Dice) -> tuple[str, str]:
    table = dice.pick(TABLES)
    asked = dice.pick(
        (
            "Write a SQL query to select all {}.",
            "SQL to list all {}",
            "Write a SQL query that shows all {}",
            "Give me a SQL query for all {}.",
            "select all {} in SQL",
        )
    )
    if dice.chance(0.35):
        asked = dice.pick(
            (
                "Write a SQL query that counts the {}.",
                "SQL: how many {} are there?",
                "Count all {} in SQL",
            )
        )
        return asked.format(table), fence("sql", f"SELECT COUNT(*) FROM {table};")
    return asked.format(table), fence("sql", f"SELECT * FROM {table};")


def _email(dice: Dice) -> tuple[str, str]:
    about, receiver = dice.pick(list(MEETINGS)), dice.pick(_RECEIVERS)
    asked = dice.pick(
        (
            "Write an email to {} {}.",
            "Write a short email to {} {}",
            "Draft an email to {} {}.",
            "Help me write an email to {} {}",
            "Compose an email to {} {}.",
            "email to {} {}",
        )
    )
    greeting = (
        "Hello" if receiver in ("a friend", "a colleague", "my team") else "Dear Sir or Madam"
    )
    body = MEETINGS[about]
    return asked.format(receiver, about), f"{greeting},\n\n{body}\n\nKind regards"


def _feeling(dice: Dice) -> tuple[str, str]:
    feeling = dice.pick(list(FEELINGS))
    asked = dice.pick(
        (
            "Classify this sentiment: {}",
            "Is this positive or negative? {}",
            "What is the sentiment of this text: {}",
            "Sentiment: {}",
            "Classify as positive or negative: {}",
        )
    )
    return asked.format(dice.pick(FEELINGS[feeling])), capital(feeling) + "."


def _twice(dice: Dice) -> tuple[str, str]:
    said = dice.pick((*words.THINGS, "hello", "yes", "pineapple", "banana", "test"))
    count, times = dice.pick(((2, "twice"), (2, "two times"), (3, "three times"), (3, "3 times")))
    asked = dice.pick(("Say {} {}", "Say '{}' {}.", 'Say "{}" {}.', "Repeat {} {}.", "Write {} {}"))
    return asked.format(said, times), capital(" ".join([said] * count)) + "."


def _program(dice: Dice) -> tuple[str, str]:
    task = dice.pick(list(PROGRAMS))
    asked = dice.pick(
        (
            "Write a Python function that {}.",
            "Write Python code that {}",
            "Write a Python program that {}.",
            "Python function that {}",
            "Give me a Python function which {}.",
            "Show me Python code that {}",
        )
    )
    return asked.format(task), fence("python", PROGRAMS[task])


def _greeting_with_name(dice: Dice) -> tuple[str, str]:
    name = dice.pick((*words.BOYS, *words.GIRLS, *memory.COMMON_NAMES))
    asked = dice.pick(
        ("Say hello to {}", "Greet {}.", "Say hi to {}", "Say hello to my friend {}.")
    )
    return asked.format(name), f"Hello, {name}!"


def _fixed(dice: Dice) -> tuple[str, str]:
    return draw_fixed(dice, FIXED)


def draw_exchange(dice: Dice) -> list[Message]:
    """Draw one question and its answer."""
    draw = dice.weighted(
        {
            _fixed: 10,
            _term: 10,
            _unknown_term: 4,
            _acronym: 2,
            _author: 2,
            _query: 1.5,
            _email: 3,
            _feeling: 1.5,
            _twice: 1,
            _program: 3,
            _greeting_with_name: 1,
        }
    )
    asked, answered = draw(dice)
    return exchange(typed(dice, approached(dice, asked) if dice.chance(0.2) else asked), answered)


def draw_completion(dice: Dice) -> str:
    """Draw a text that another project's first example begins, with its end."""
    begun = dice.pick(list(COMPLETIONS))
    return begun + COMPLETIONS[begun]
