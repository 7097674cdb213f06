"""A conversation with a worker in the same process, over memory planes."""

import asyncio
import io
import threading

import pytest
from tests.unit.cli.scripted_talks import Loop, Talk

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.cli import session
from dynamo.preprocess import preprocessor
from dynamo.preprocess.parsers import formats
from dynamo.protocols import generate
from waiting import PATIENT_S


class Text:
    """Tokens are letters; `!` is a stop string."""

    def __init__(self):
        self.num_tokens, self.stop_reason = 0, None

    def push(self, output):
        self.num_tokens += len(output.token_ids)
        text = "".join(map(chr, output.token_ids))
        if "!" in text:
            self.stop_reason = "!"
        return text.partition("!")[0]


class Processor:
    """Takes the place of a model's preprocessor."""

    def __init__(self, parsers=None):
        self.parsers, self.shown = parsers, None

    async def prepare_conversation(self, request, request_id):
        packed = generate.Request(
            id=request_id,
            model=request.model,
            token_ids=b"1234",
            sampling_options=generate.SamplingOptions(n=request.n or 1),
        )
        return preprocessor.Prepared(packed, None, parsers=self.parsers)

    def make_answer_text(self, request, shown=None, *, shows_marks=False):
        self.shown = shown
        return Text()


class Endpoint:
    """Streams the outputs of the test, and then ends, fails or stays silent."""

    def __init__(self, *outputs, error=None, is_silent=False):
        self.outputs, self.error, self.is_silent = outputs, error, is_silent
        self.is_closed, self.asked = False, asyncio.Event()

    async def stream(self, request, *, item_type, among):
        assert among == {1}
        self.asked.set()
        try:
            for output in self.outputs:
                yield output
            if self.is_silent:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


def said(text, end=None):
    return generate.Output(tuple(map(ord, text)), end)


async def find_workers():
    return {1}


def talk(endpoint, processor=None):
    processor = processor or Processor()
    return session.Session(endpoint, processor, "m", clocks.SystemClock(), find_workers)


ASKED = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("end", "expected"),
    [(generate.FinishReason.EOS, "stop"), (generate.FinishReason.LENGTH, "length")],
)
async def test_text_is_passed_on_as_each_output_arrives(end, expected):
    pieces = []
    endpoint = Endpoint(said("a"), said("bc", end))
    answer = await talk(endpoint).chat(ASKED, pieces.append)

    assert pieces == ["a", "bc"]
    assert answer[:4] == ("abc", expected, 1, 3)


async def test_thoughts_are_no_part_of_the_text():
    parsers = formats.select_format(None, "basic", "").parsers("", None)
    outputs = said("<think>hm"), said("</think>yes.", generate.FinishReason.EOS)
    pieces, thoughts = [], []
    answer = await talk(Endpoint(*outputs), Processor(parsers)).chat(
        ASKED, pieces.append, thoughts.append
    )

    assert (answer.text, answer.thoughts) == ("yes.", "hm")
    assert ("".join(pieces), "".join(thoughts)) == ("yes.", "hm")
    assert answer.message == {"role": "assistant", "content": "yes.", "reasoning_content": "hm"}


async def test_call_is_a_line_of_text_with_its_name_and_arguments():
    parsers = formats.select_format("mistral", None, "").parsers("", {"f": {}})
    outputs = said('[TOOL_CALLS]f[ARGS]{"a": 1} ', generate.FinishReason.EOS)
    answer = await talk(Endpoint(outputs), Processor(parsers)).chat(ASKED, stream=True)

    assert answer.text == '{"name": "f", "arguments": {"a": 1}}\n'


async def test_option_of_special_tokens_reaches_the_text():
    processor = Processor()
    end = said("a", generate.FinishReason.LENGTH)
    await talk(Endpoint(end), processor).chat(ASKED, skip_special_tokens=False)

    assert processor.shown.skip_special_tokens is False


async def test_field_named_as_an_argument_of_ours_is_refused_like_any_unknown_one():
    with pytest.raises(errors.InvalidRequest, match=r"`on_text`, `self`"):
        await talk(Endpoint()).chat(ASKED, self=1, on_text=2)


async def test_stop_string_ends_the_stream():
    endpoint = Endpoint(said("a!b"), said("never told"), is_silent=True)
    answer = await talk(endpoint).chat(ASKED)

    assert (answer.text, answer.finish_reason) == ("a", "stop")
    assert endpoint.is_closed


async def test_lost_worker_raises_an_error():
    endpoint = Endpoint(said("a"), error=errors.StreamBroken("gone"))
    with pytest.raises(errors.StreamBroken):
        await talk(endpoint).chat(ASKED)


async def test_cancelling_stops_the_worker():
    endpoint = Endpoint(is_silent=True)
    asking = asyncio.create_task(talk(endpoint).chat(ASKED))
    await endpoint.asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    assert endpoint.is_closed


async def test_error_for_an_invalid_field_names_the_field():
    with pytest.raises(errors.InvalidRequest, match="temperature"):
        await talk(Endpoint()).chat(ASKED, temperature=99)


async def test_request_for_several_choices_is_refused():
    with pytest.raises(errors.InvalidRequest, match="n: expected 1"):
        await talk(Endpoint()).chat(ASKED, n=2)


async def test_closed_reader_ends_the_stream():
    def write(piece):
        raise BrokenPipeError(32, "Broken pipe")

    endpoint = Endpoint(said("a"), is_silent=True)
    with pytest.raises(BrokenPipeError):  # which `dynamo` ends with, as it does in every command
        await talk(endpoint).chat(ASKED, write)

    assert endpoint.is_closed


@pytest.fixture
def scripted_talk():
    return Talk()


def test_standard_input_is_one_prompt(monkeypatch, scripted_talk, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    session.answer_standard_input(Loop(), scripted_talk, {})

    assert scripted_talk.seen == [["one\ntwo"]]
    assert capsys.readouterr().out == "answer 1\n"


def test_an_empty_standard_input_is_refused(monkeypatch, scripted_talk):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(errors.ConfigError, match="in=stdin"):
        session.answer_standard_input(Loop(), scripted_talk, {})


@pytest.mark.parametrize("lenience", ["strict", "surrogateescape"])
def test_standard_input_that_is_no_text_is_refused(monkeypatch, scripted_talk, lenience):
    piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=lenience)
    monkeypatch.setattr("sys.stdin", piped)
    with pytest.raises(errors.ConfigError, match="in=stdin: expected text in UTF-8: "):
        session.answer_standard_input(Loop(), scripted_talk, {})


def test_answer_goes_nowhere_if_standard_output_is_closed(monkeypatch, scripted_talk):
    monkeypatch.setattr("sys.stdin", io.StringIO("one"))
    monkeypatch.setattr("sys.stdout", None)
    session.answer_standard_input(Loop(), scripted_talk, {})

    assert scripted_talk.seen == [["one"]]


def test_without_standard_input_there_is_no_prompt(monkeypatch, scripted_talk):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(errors.ConfigError, match="got nothing"):
        session.answer_standard_input(Loop(), scripted_talk, {})


@pytest.fixture
def background():
    with session.BackgroundLoop() as loop:
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

    monkeypatch.setattr(session.concurrent.futures.Future, "result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        background.call(wait_for_ever())

    assert seen == ["cancelled"]


def test_ctrl_c_does_not_wait_for_what_blocks_the_event_loop():
    """The import of an engine's library takes some ten seconds."""
    release = threading.Event()
    loop = session.BackgroundLoop().__enter__()
    loop._loop.call_soon_threadsafe(release.wait)
    loop.__exit__(KeyboardInterrupt)
    release.set()
    loop._thread.join(PATIENT_S)

    assert not loop._thread.is_alive()
    loop._loop.close()


def interrupt(future):
    raise KeyboardInterrupt
