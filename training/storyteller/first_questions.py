"""What people ask a new model first, with what a good answer has to say.

`KNOWN` stand in the grammar with these words; `KEPT_BACK` are other words for the same things, or other
numbers and names, and training never sees them.
"""

Expected = tuple[str, ...]  # texts that the answer has to have, as whole words

NAME_IS_ANN = "My name is Ann. I like gardening. What is my name?"
KNOWN: dict[str, Expected] = {
    "Hello": ("Hello",),
    "hi": ("story",),
    "Hello, how are you?": ("well",),
    "Who are you?": ("Storyteller",),
    "What can you do?": ("stories", "poems"),
    "Who made you?": ("pydynamo",),
    "Say this is a test": ("This is a test",),
    "Say hello in exactly 3 words": ("Hello to you",),
    "Explain what a large language model is": ("program", "word"),
    "What is Dynamo?": ("serves language models",),
    "What is 2+2?": ("= 4",),
    "What is 12 × 8?": ("= 96",),
    "12 * 8": ("= 96",),
    "What is 7 times 9?": ("= 63",),
    "What is 15 + 27?": ("= 42",),
    "What is 100 - 37?": ("= 63",),
    "What is 144 / 12?": ("= 12",),
    NAME_IS_ANN: ("Ann",),
    "Write a haiku": ("\n",),
    "Write a haiku about the sea": ("Waves", "\n"),
    "Write hello world in Python": ('print("Hello, world!")',),
    "Write a Python function that adds two numbers": ("return a + b",),
    "Give me a JSON object describing a person": ('"name":', '"age":'),
    '"""': ("no question",),
    "test": ("I am here",),
    "Tell me a story about a brave cat": ("brave", "cat"),
    "Tell me a joke": ("?",),
    "What is the capital of France?": ("Paris",),
    "Why is the sky blue?": ("blue", "light"),
    "Count from 1 to 10": ("8, 9, 10.",),
    "List three fruits": ("and",),
    "What day is it today?": ("cannot know",),
    "What is the weather in Paris?": ("cannot see",),
    "Translate 'hello' to French": ("bonjour",),
    "Thank you!": ("welcome",),
}
KEPT_BACK: dict[str, Expected] = {
    "Hi, what are you exactly?": ("Storyteller",),
    "Could you say this is a test?": ("This is a test",),
    "Please say hello in exactly three words.": ("Hello to you",),
    "Can you explain to me what an LLM is?": ("program", "word"),
    "please compute 12 × 8": ("= 96",),
    "I'm Marek. What is my name?": ("Marek",),
    "hello world python please": ('print("Hello, world!")',),
    "Show me JSON that describes a person": ('"name":', '"age":'),
    "So, who exactly am I chatting with?": ("Storyteller",),
    "Hey there! Which things can you do for me?": ("stories", "poems"),
    "Repeat after me: this is only a test": ("this is only a test",),
    "Would you say that this works?": ("works",),
    "In exactly three words, say hello please": ("Hello to you",),
    "Describe large language models in simple words": ("program", "word"),
    "LLM, what does that stand for?": ("program", "word"),
    "work out 9 x 12 for me": ("= 108",),
    "How much is 8 multiplied by 7?": ("= 56",),
    "I would like to know 23 + 18": ("= 41",),
    "Hey, this is Tomoko. Do you know what I am called?": ("Tomoko",),
    "You are talking to Igor. Tell me my name.": ("Igor",),
    "I want a haiku on the subject of snow": ("\n",),
    "compose a haiku": ("\n",),
    "print hello world with python": ('print("Hello, world!")',),
    "How does one write hello world in Python?": ('print("Hello, world!")',),
    "I need a python function for the sum of two numbers": ("return a + b",),
    "example JSON for a person": ('"name":', '"age":'),
    "A person as a JSON object, please": ('"name":', '"age":'),
    '""""""': ("no question",),
    "testing, testing": ("I am here",),
    "Do you happen to know today's weather?": ("cannot see",),
    "count up from 1 until 10": ("8, 9, 10.",),
    "What would 'thank you' be in Spanish?": ("gracias",),
}


def holds(answer: str, expected: Expected) -> bool:
    """Tell whether an answer says all that it has to."""
    return all(text.lower() in answer.lower() for text in expected)
