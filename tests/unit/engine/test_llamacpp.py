"""The deciders of the llama.cpp adapter: slots, grammars, withheld tokens, the length of the context."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("xllamacpp", reason="needs xllamacpp (the extra llamacpp)")

from dynamo.base import errors
from dynamo.engine.adapters.llamacpp import engine, grammars, slots, translation
from dynamo.engine.adapters.settings import LlamacppConfig
from dynamo.protocols import blocks, generate, kv_events
from engine_suite import replay


def claim(*tokens):
    return slots.SlotClaim(blocks.pack(tokens), blocks.SEED)


def run(table, claimed, output=(7, 8)):
    """Let a request run alone; return its events."""
    table.enqueue(claimed, 0)
    granted, events = table.grant()
    assert granted is claimed
    return events + table.release(claimed, list(output))


def test_request_gets_the_slot_with_its_longest_prefix():
    table = slots.SlotTable(2, 2)
    first, other, again = claim(1, 2, 3, 4, 5), claim(9, 9, 9), claim(1, 2, 3, 4, 6)
    for each in (first, other, again):
        run(table, each)

    assert other.slot is not first.slot
    assert again.slot is first.slot
    assert (other.num_cached, again.num_cached) == (0, 4)


def test_higher_priority_gets_the_next_slot():
    table = slots.SlotTable(1, 2)
    running, low, high = claim(1), claim(2), claim(3)
    table.enqueue(running, 0)
    assert table.grant()[0] is running
    table.enqueue(low, -1)
    table.enqueue(high, 5)
    assert (table.grant()[0], table.num_waiting) == (None, 2)
    table.release(running, None)

    assert table.grant()[0] is high


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(0, 4)),
        max_size=30,
    )
)
def test_published_blocks_are_those_that_slots_keep(steps):
    table, running, events = slots.SlotTable(3, 2), [], []
    for tokens, action in steps:
        if action == 0 and running:
            events += table.release(running.pop(0), [1, 2, 1] if len(tokens) % 2 else None)
        elif action == 1:
            table.clear()
            events.append(kv_events.Cleared())
        else:
            table.enqueue(claim(*tokens), 0)
            granted, removed = table.grant()
            events += removed
            running += [granted] if granted else []
    kept = {name for slot in [*table._idle, *table._running] for name in slot.names}

    assert replay(events).keys() == kept


def ids_of(pieces):
    return {piece: token for token, piece in enumerate(pieces)}


def test_withheld_tokens_are_recovered_by_their_bytes():
    pieces = ["hi ", "é", "x"]
    token_bytes = [text.encode() for text in pieces] + [b"\xf0\x9f", b"\x98", b"\x80", b"\x98\x80"]
    known = token_bytes, ids_of(token_bytes)

    assert translation.recover("hi 😀", 5, 3, known) == (0, 3, 4)
    assert translation.recover("😀", 6, 1, known) == (3,)
    assert translation.recover("\ufffdx", 2, 1, known) is None


def test_tokens_withheld_before_a_special_token_beyond_the_vocabulary_are_recovered():
    pieces = [b"hi ", "é".encode()]

    assert translation.recover("hi é", 9, 2, (pieces, ids_of(pieces))) == (0, 1)


def test_bytes_of_tokens_are_those_of_the_tokenizer():
    vocab = {"Ġcat": 0, "ðŁĺ": 1, "<|end|>": 2}
    byte_level = {
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": 2}],
        "model": {"vocab": vocab},
    }
    other = {"decoder": None, "added_tokens": [], "model": {"vocab": {"▁cat": 0, "<0xF0>": 1}}}
    unigram = {"decoder": None, "model": {"vocab": [["▁cat", -1.5], ["<0xF0>", 0.0]]}}

    assert translation.token_bytes(byte_level) == (
        [b" cat", b"\xf0\x9f\x98", b""], {b" cat": 0, b"\xf0\x9f\x98": 1}
    )  # fmt: skip
    assert translation.token_bytes(other)[0] == [b" cat", b"\xf0"]
    assert translation.token_bytes(unigram) == ([b" cat", b"\xf0"], {b" cat": 0, b"\xf0": 1})


def options(**fields):
    request = generate.Request(id="a", model="m", token_ids=blocks.pack([1, 2]), **fields)
    return translation.completion_options(request, 0, 64)


def guided(**fields):
    form = generate.GuidedDecoding(**fields)
    return options(sampling_options=generate.SamplingOptions(guided_decoding=form))["grammar"]


def test_greedy_answers_need_no_sampling_of_a_whole_vocabulary():
    sampled = generate.SamplingOptions(temperature=0.5, top_k=20)

    assert options(sampling_options=generate.SamplingOptions(temperature=0.0))["top_k"] == 1
    assert options(sampling_options=sampled)["top_k"] == 20
    assert options()["samplers"].index("top_k") < options()["samplers"].index("temperature")


def test_answer_ends_with_the_context():
    assert options()["n_predict"] == 62
    limited = generate.StopConditions(max_tokens=5)
    assert options(stop_conditions=limited)["n_predict"] == 5


def test_guided_answers_become_grammars():
    assert guided(json='{"type": "null"}').startswith(
        '%llguidance {}\nstart: answer\nanswer: %json {"type": "null", "x-guidance": {"whitespace_flexible": '
    )
    assert guided(regex="a/b").splitlines()[2] == r"answer: /a\/b/"
    assert guided(choice=('a"', "b")).splitlines()[2:] == [
        "answer: answer_0 | answer_1",
        'answer_0: "a\\""',
        'answer_1: "b"',
    ]
    assert guided(grammar="root ::= [0-9]") == "root ::= [0-9]"
    thoughts = generate.GuidedReasoning(opens=("<t>",), closes=("</t>",))
    assert 'start: (("<t>") thinking BLANKS)? answer' in guided(regex="a", thoughts=thoughts)


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": 'start: answer\nanswer: "yes" | "no"'},
        {"grammar": 'start: TEXT calls // start "\nTEXT: /start"/\ncalls: "calls" <[3]> start'},
        {"regex": r"C:\\/temp"},
    ],
)
@pytest.mark.parametrize("closes", [(), ("</t>",)])
def test_rules_and_slashes_of_a_client_do_not_collide_with_ours(form, closes):
    thoughts = generate.GuidedReasoning(closes=closes) if closes else None
    grammars.build(generate.GuidedDecoding(**form, thoughts=thoughts))

    assert "start_: TEXT_ calls_ // start" in guided(grammar="start: TEXT calls // start")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling_options": generate.SamplingOptions(presence_penalty=1.0)}, "presence_penalty"),
        ({"output_options": generate.OutputOptions(prompt_logprobs=1)}, "prompt_logprobs"),
        (
            {
                "sampling_options": generate.SamplingOptions(
                    guided_decoding=generate.GuidedDecoding(regex="a+")
                ),
                "stop_conditions": generate.StopConditions(min_tokens=2),
            },
            "min_tokens",
        ),
        (
            {"thinking": generate.ThinkingLimit(max_tokens=1, close_ids=(1,))},
            "nvext.max_thinking_tokens",
        ),
    ],
)
def test_what_llamacpp_cannot_honour_is_refused_by_name(fields, param):
    with pytest.raises(errors.InvalidRequest, match=r"llama\.cpp") as refusal:
        options(**fields)

    assert refusal.value.param == param


async def test_weights_are_loaded_by_the_name_of_their_file(tmp_path, monkeypatch):
    config = {"max_position_embeddings": 512, "kv_bytes_per_token": 1, "vocab_size": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.gguf").symlink_to("/models/m-00001-of-00002.gguf")
    loaded = []
    monkeypatch.setattr(engine.xllamacpp, "Server", lambda params: loaded.append(params.model.path))
    library = engine.LlamaLibrary(tmp_path, LlamacppConfig())
    await library.start(lambda events, rank: None)
    await library.stop()

    assert loaded == ["/models/m-00001-of-00002.gguf"]


async def test_system_that_is_not_linux_has_all_cores_and_no_guided_answers(tmp_path, monkeypatch):
    config = {"max_position_embeddings": 512, "kv_bytes_per_token": 1, "vocab_size": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.gguf").touch()
    threads = []
    monkeypatch.setattr(
        engine.xllamacpp, "Server", lambda params: threads.append(params.cpuparams.n_threads)
    )
    monkeypatch.setattr(engine.sys, "platform", "darwin")
    monkeypatch.delattr(engine.os, "sched_getaffinity")
    monkeypatch.setattr(engine.os, "cpu_count", lambda: 7)
    library = engine.LlamaLibrary(tmp_path, LlamacppConfig())
    facts = await library.start(lambda events, rank: None)
    await library.stop()

    assert threads == [7]
    assert not facts.supports_guided


def test_context_is_what_the_memory_for_kv_holds():
    config = json.loads('{"max_position_embeddings": 40960, "kv_bytes_per_token": 114688}')

    assert engine.choose_context_length(config, LlamacppConfig()) == 9216
    assert engine.choose_context_length(config, LlamacppConfig(kv_cache_memory_gb=64)) == 40960
    assert engine.choose_context_length(config, LlamacppConfig(max_model_len=512)) == 512
    with pytest.raises(errors.ConfigError, match=r"at most 40960"):
        engine.choose_context_length(config, LlamacppConfig(max_model_len=50_000))


class RefusingServer:
    """llama.cpp's server, which answers with an error."""

    def __init__(self, code):
        self._error = {"error": {"code": code, "message": "no"}}

    def handle_completions(self, options, on_result):
        assert on_result(self._error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, errors.InvalidRequest),
        (500, errors.EngineFailed),
        (501, errors.InvalidRequest),
        (503, errors.Overloaded),
    ],
)
def test_error_of_llama_cpp_blames_who_is_at_fault(code, kind):
    table, claimed = slots.SlotTable(1, 2), claim(1, 2)
    table.enqueue(claimed, 0)
    table.grant()
    request = generate.Request(id="a", model="m", token_ids=claimed.prompt)
    completion = engine.Completion(request, {"n_predict": 5}, claimed, print)
    with pytest.raises(kind, match=r"llama\.cpp: no"):
        completion.run(RefusingServer(code), 2, list)
