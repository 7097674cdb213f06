"""Compilation of grammars: which constraints are refused, with which message, and what is cached."""

import json
import threading

import pytest

from dynamo.base import errors
from dynamo.engine.native import guided_decoding
from dynamo.protocols import generate
from guided import EOS, STORYTELLER

DEADLINE_S = 30
VOCAB = 4096
TOKENIZER = STORYTELLER / "tokenizer.json"


@pytest.fixture(scope="module")
def known():
    made = guided_decoding.GrammarCompiler(TOKENIZER, VOCAB)
    yield made
    made.stop()


def refusal(known, **fields):
    with pytest.raises(errors.InvalidRequest) as caught:
        known.compile(generate.GuidedDecoding(**fields, param="here"), EOS)
    assert caught.value.param == "here"
    assert str(caught.value).startswith("here: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"not": {}, "x-guidance": {"lenient": True}}, 'Unimplemented keys: ["not"]'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"oneOf": [{}, {}], "x-guidance": {"coerce_one_of": True}}, "oneOf"),
        ({"type": "object", "if": {}, "then": {}}, "if"),
        ({"type": "string", "format": "zorro"}, "Unknown format: zorro"),
        ({"type": "string", "pattern": "^(?=a)b"}, "regex parse error"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "Unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "zebra"}, "zebra"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "#"}, "cannot be followed"),
        ({"$ref": "https://example.com/x"}, "does not fetch"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(known, schema, words):
    assert words in refusal(known, json=json.dumps(schema))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"json": "{"}, "cannot be followed"),
        ({"json": "[]"}, "cannot be followed"),
        ({"regex": "(ab"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"grammar": "start: nobody"}, "nobody"),
        ({"grammar": "root ::= nobody"}, "nobody"),
        ({"grammar": "root ::= " + "(" * 5_000}, "cannot be followed"),
        ({"grammar": "start: " + "(" * 4_000 + '"a"' + ")" * 4_000}, "nested"),
        ({"regex": "(" * 60_000 + "a" + ")" * 60_000}, "cannot be followed"),
        ({"json": '{"items":' * 9_000 + "{}" + "}" * 9_000}, "recursion limit"),
        ({"grammar": "\x00"}, "cannot be followed"),
    ],
)
def test_an_invalid_regex_or_grammar_is_refused(known, fields, words):
    assert words in refusal(known, **fields)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"anyOf": [{"required": [f"x{i}"]}, {"required": [f"y{i}"]}]} for i in range(20)]},
        {"allOf": [{"type": "string", "pattern": f"^.*(a|b).{{{i}}}c.*$"} for i in range(20, 40)]},
    ],
)  # fmt: skip
def test_a_schema_with_too_many_states_is_refused(known, schema):
    assert "cannot be followed" in refusal(known, json=json.dumps(schema))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "got 0"),
        ({"regex": "a", "json": "{}"}, "got 2"),
        ({"json": "x" * (guided_decoding.MAX_CHARS + 1)}, "at most 131072 characters"),
        ({"grammar": "x" * 20_000}, "at most 8192 characters"),
        ({"grammar": "a: b\n" * 1001}, "at most 1000 rules, got 1001"),
        ({"json": '{"$ref": "#"}' * 501}, "at most 500 references, got 501"),
        ({"choice": ("x" * 70_000, "y" * 70_000)}, "got 140000"),
    ],
)
def test_constraints_over_a_limit_are_refused_before_compilation(fields, words):
    with pytest.raises(errors.InvalidRequest, match=words):
        guided_decoding.check(generate.GuidedDecoding(**fields))


def test_another_guided_decoding_backend_is_refused():
    with pytest.raises(errors.InvalidRequest, match="'xgrammar'") as caught:
        guided_decoding.check(generate.GuidedDecoding(regex="a", backend="xgrammar"))

    assert caught.value.param == "guided_decoding_backend"


def test_the_least_recently_used_grammar_leaves_the_cache(known):
    wanted = [
        generate.GuidedDecoding(regex=f"a{{{n}}}") for n in range(1, guided_decoding.MAX_CACHED + 2)
    ]
    first, second = known.compile(wanted[0], EOS), known.compile(wanted[1], EOS)
    for one in (*wanted[2:-1], wanted[0], wanted[-1]):
        known.compile(one, EOS)

    assert known.compile(wanted[0], EOS) is first
    assert known.compile(wanted[1], EOS) is not second


def test_an_unreadable_tokenizer_raises_engine_failed(tmp_path):
    path = tmp_path / "tokenizer.json"
    nothing = guided_decoding.GrammarCompiler(path, VOCAB)
    path.write_text('{"model": {"type": "Morse"}}')
    morse = guided_decoding.GrammarCompiler(path, VOCAB)

    assert not guided_decoding.GrammarCompiler(tmp_path / "none", VOCAB).is_possible
    for known in (nothing, morse):
        with pytest.raises(errors.EngineFailed, match="llguidance does not read"):
            known.compile(generate.GuidedDecoding(regex="a"), EOS)


def test_another_end_token_compiles_another_grammar(known):
    guided = generate.GuidedDecoding(regex="a")
    first = known.compile(guided, EOS)

    assert known.compile(guided, (1,)) is not first
    assert known.compile(guided, (1,)) is known.compile(guided, (1,))


def test_too_many_waiting_compilations_are_refused(monkeypatch):
    known = guided_decoding.GrammarCompiler(TOKENIZER, VOCAB)
    gate, made = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(known, "compile", lambda guided, eos: gate.wait(DEADLINE_S))
    guided = generate.GuidedDecoding(regex="a")
    for _ in range(guided_decoding.MAX_WAITING):
        known.submit(guided, EOS, lambda result: made.release())

    with pytest.raises(errors.Overloaded, match="try later"):
        known.submit(guided, EOS, lambda result: None)
    gate.set()
    assert all(made.acquire(timeout=DEADLINE_S) for _ in range(guided_decoding.MAX_WAITING))
    known.submit(guided, EOS, lambda result: made.release())  # there is room again
    assert made.acquire(timeout=DEADLINE_S)
    known.stop()
