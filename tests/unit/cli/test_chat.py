"""The conversation in the terminal, and the event loop in a thread of its own."""

import asyncio
import io
import threading

import pytest

from dynamo.base import errors
from dynamo.cli import chat, session
from dynamo.protocols import model_errors


class Talk:
    """Answers with the number of messages it was shown."""

    model = "m"

    def __init__(self):
        self.seen = []
        self.failure = None

    def chat(self, messages, on_text, **fields):
        self.seen.append([message["content"] for message in messages])
        if self.failure is not None:
            raise self.failure
        on_text(f"answer {len(self.seen)}")
        return session.Answer(f"answer {len(self.seen)}", "stop", 1, 1, 0.1)


class Loop:
    """Everything has happened already."""

    def call(self, answer):
        return answer


@pytest.fixture
def talk():
    return Talk()


@pytest.fixture
def say(monkeypatch, talk):
    def say(*lines):
        typed = iter(lines)

        def read(prompt):
            line = next(typed, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        chat.converse(Loop(), talk, {})

    return say


def test_answers_stay_in_the_conversation(say, talk):
    say("one", "two")

    assert talk.seen == [["one"], ["one", "answer 1", "two"]]


def test_clear_begins_anew(say, talk):
    say("one", "/clear", "two")

    assert talk.seen == [["one"], ["two"]]


def test_exit_leaves(say, talk):
    say("/exit", "one")

    assert talk.seen == []


def test_ctrl_c_at_the_prompt_prints_how_to_leave(say, talk, capsys):
    say(KeyboardInterrupt(), "one")

    assert "Ctrl-D leaves" in capsys.readouterr().out.partition("\n")[2]
    assert talk.seen == [["one"]]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), model_errors.ContextTooLong("too long")])
def test_question_without_an_answer_is_not_in_the_conversation(say, talk, failure):
    talk.failure = failure
    say("one", "two")

    assert talk.seen == [["one"], ["two"]]


def test_standard_input_is_one_prompt(monkeypatch, talk, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    chat.answer_standard_input(Loop(), talk, {})

    assert talk.seen == [["one\ntwo"]]
    assert capsys.readouterr().out == "answer 1\n"


def test_an_empty_standard_input_is_refused(monkeypatch, talk):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(errors.ConfigError, match="in=stdin"):
        chat.answer_standard_input(Loop(), talk, {})


def test_without_standard_input_there_is_no_conversation(say, talk):
    say(RuntimeError("input(): lost sys.stdin"))

    assert talk.seen == []


def test_without_standard_input_there_is_no_prompt(monkeypatch, talk):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(errors.ConfigError, match="got nothing"):
        chat.answer_standard_input(Loop(), talk, {})


@pytest.fixture
def background():
    with chat.BackgroundLoop() as loop:
        yield loop


def test_work_runs_in_another_thread(background):
    async def where():
        return threading.current_thread()

    assert background.call(where()) is not threading.current_thread()


def test_error_of_a_request_is_raised_at_its_call(background):
    async def fail():
        raise errors.EngineFailed("no")

    with pytest.raises(errors.EngineFailed):
        background.call(fail())


def test_ctrl_c_cancels_the_work_and_waits_for_its_end(background, monkeypatch):
    seen = []

    async def wait_for_ever():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    monkeypatch.setattr(chat.concurrent.futures.Future, "result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        background.call(wait_for_ever())

    assert seen == ["cancelled"]


def interrupt(future):
    raise KeyboardInterrupt
