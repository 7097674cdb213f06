"""A conversation whose answers are known, for the tests of what shows it."""

from dynamo.base import errors
from dynamo.cli import session


class Talk:
    """Answers with the number of messages it was shown."""

    def __init__(self, model="m"):
        self.model, self.seen, self.options = model, [], None
        self.failure = None
        self.messages, self.thoughts = [], ""

    def check(self, options):
        if options.get("temperature") == 99:
            raise errors.InvalidRequest("temperature: too hot")

    def chat(self, messages, on_text, on_thought=None, **fields):
        self.seen.append([message["content"] for message in messages])
        self.messages = messages
        self.options = fields
        if self.failure is not None:
            raise self.failure
        if self.thoughts:
            on_thought(self.thoughts)
        on_text(f"answer {len(self.seen)}")
        return session.Answer(f"answer {len(self.seen)}", "stop", 1, 1, 0.1, self.thoughts)


class Loop:
    """Everything has happened already."""

    def call(self, answer):
        return answer
