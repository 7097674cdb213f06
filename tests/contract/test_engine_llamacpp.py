"""What every engine promises its host, by the llama.cpp adapter over a small random GGUF model."""

import asyncio
import json
import re

import pytest

pytest.importorskip("xllamacpp", reason="needs xllamacpp and gguf (the extra llamacpp)")

import gguf_models
from dynamo.base import errors
from dynamo.engine.adapters.llamacpp import engine
from dynamo.engine.adapters.settings import LlamacppConfig
from dynamo.protocols import blocks, generate
from dynamo.worker import engines
from engine_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from engine_suite import PROMPT, Host, Sink
from salt_suite import *  # noqa: F403 (the same)

# llama.cpp reports no logprobs of a prompt.
del test_prompt_logprobs_are_reported_once_even_for_a_cached_prefix  # noqa: F821
del test_a_prompt_of_one_token_has_no_logprobs  # noqa: F821

TOKENS = ["a", "b", "ab", *(f"w{n}" for n in range(250))]
SHAPE = {"max_num_seqs": 8, "threads": 1, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model of ASCII words, so that llama.cpp withholds no token, whatever it draws."""
    folder = tmp_path_factory.mktemp("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        path = gguf_models.write_model(folder / "tiny.gguf", tokens=TOKENS)
        return engines.find_model("llamacpp", str(path))


@pytest.fixture(scope="module", autouse=True)
def shared_server():
    """llama.cpp's server, started once: a second one in the same process may wait for ever for the end of the first."""
    with pytest.MonkeyPatch.context() as patch:
        servers, start = [], engine.xllamacpp.Server

        def start_server(params):
            if not servers:
                servers.append(start(params))
            return servers[0]

        patch.setattr(engine.xllamacpp, "Server", start_server)
        yield


@pytest.fixture
def make_engine(directory):
    return lambda **settings: engines.build(
        "llamacpp", directory, LlamacppConfig(**SHAPE | settings)
    )


@pytest.fixture
def break_down():
    def fail(started):
        class BrokenServer:
            def handle_completions(self, *_):
                raise RuntimeError("out of order")

        started._library._server = BrokenServer()
        return "engine process died"

    return fail


async def test_start_returns_the_facts_of_the_file(host):
    facts = host.facts

    assert (facts.context_length, facts.kv_block_size, facts.total_kv_blocks) == (512, 16, 256)
    assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (8, 64)
    assert not facts.supports_thinking_limit


FORMS = {
    "choice": ({"choice": ("ab", "ba")}, r"ab|ba"),
    "regex": ({"regex": "(ab){2}"}, "abab"),
    "lark": ({"grammar": 'start: "b" "ab"'}, "bab"),
    "lark of our names": (
        {"grammar": 'start: answer TEXT // start "\nanswer: "b"\nTEXT: /ab/'},
        "bab",
    ),
    "gbnf": ({"grammar": 'root ::= "a" "b"'}, "ab"),
}


def guided_request(**fields):
    sampling = generate.SamplingOptions(
        temperature=0.0, guided_decoding=generate.GuidedDecoding(**fields)
    )
    return generate.Request(
        id="a",
        model="m",
        token_ids=blocks.pack(PROMPT),
        sampling_options=sampling,
        eos_token_ids=(254,),
    )


@pytest.mark.parametrize("form", FORMS)
async def test_guided_answer_has_its_form(host, form):
    fields, pattern = FORMS[form]
    host.engine.submit(guided_request(**fields))
    await host.sink.until(lambda: host.sink.has_ended("a") or host.sink.errors)
    text = "".join([*TOKENS, "", ""][token] for token in host.sink.tokens("a"))

    assert not host.sink.errors
    assert re.fullmatch(pattern, text)


PATTERNS = [{"pattern": f".*a.{{{i}}}b.*"} for i in range(16)]
ENDLESS = {"type": "string", "allOf": [{"allOf": PATTERNS[:8]}, {"allOf": PATTERNS[8:]}]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": '{"type": "object", "not": {"type": "string"}}'}, "Unimplemented keys"),
        ({"regex": "(ab"}, "unclosed group"),
        ({"grammar": "start: ((("}, "Expected token"),
        ({"grammar": "root ::= ((("}, "failed to parse grammar"),
        ({"json": json.dumps(ENDLESS)}, "2 s of processor time"),
    ],
    ids=["schema", "regex", "lark", "gbnf", "without end"],
)
async def test_grammar_that_cannot_be_followed_is_refused(host, fields, reason):
    host.engine.submit(guided_request(**fields))
    await host.sink.until(lambda: host.sink.has_ended("a") or host.sink.errors)

    assert isinstance(host.sink.errors["a"], errors.InvalidRequest)
    assert reason in str(host.sink.errors["a"])


async def test_request_that_is_aborted_while_its_grammar_is_tried_never_begins(host, monkeypatch):
    library, is_tried = host.engine._library, asyncio.Event()
    monkeypatch.setattr(library._grammars, "check", lambda _: is_tried.wait())
    host.engine.submit(guided_request(regex="ab"))
    await asyncio.sleep(0)
    host.engine.abort("a")
    await asyncio.sleep(0.01)
    is_tried.set()
    await asyncio.sleep(0.01)

    assert (library._completions, library._names) == ({}, {})
    assert not host.sink.of("a")


async def test_stop_begins_none_of_the_requests_that_wait(make_engine):
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    started, sink = make_engine(max_num_seqs=1), Sink()
    host = Host(started, sink, await started.start(sink))
    host.submit("runs", PROMPT, max_tokens=400)
    host.submit("waits", PROMPT, max_tokens=400)
    await sink.until(lambda: sink.of("runs"))
    await started.stop()

    assert not sink.has_ended("runs")
    assert not problems
