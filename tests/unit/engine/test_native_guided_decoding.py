"""Compilation of grammars: which constraints are refused, and with which message."""

import json

import pytest
import tokenizers
import torch

from dynamo.base import errors
from dynamo.engine.native import guided_decoding, sampler
from dynamo.protocols import generate
from guided import EOS, STORYTELLER

VOCAB = 4096
TOKENIZER = STORYTELLER / "tokenizer.json"


@pytest.fixture(scope="module")
def known():
    return guided_decoding.GrammarBuilder(TOKENIZER, VOCAB, EOS)


def refusal(known, **fields):
    with pytest.raises(errors.InvalidRequest) as caught:
        known.build(generate.GuidedDecoding(**fields, param="here"))
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


def test_another_guided_decoding_backend_is_refused():
    with pytest.raises(errors.InvalidRequest, match="'xgrammar'") as caught:
        guided_decoding.check_backend(generate.GuidedDecoding(regex="a", backend="xgrammar"))

    assert caught.value.param == "guided_decoding_backend"


def test_an_unreadable_tokenizer_raises_engine_failed(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(errors.EngineFailed, match="llguidance does not read"):
        guided_decoding.GrammarBuilder(path, VOCAB, EOS)
    path.write_text('{"model": {"type": "Morse"}}')
    with pytest.raises(errors.EngineFailed, match="llguidance does not read"):
        guided_decoding.GrammarBuilder(path, VOCAB, EOS)


def test_tokenizer_with_more_tokens_than_the_model_guides_answers():
    known = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    builder = guided_decoding.GrammarBuilder(TOKENIZER, VOCAB - 100, EOS)
    guide = builder.build(generate.GuidedDecoding(regex="[a-z]+")).begin()
    masked = sampler.apply_guides(torch.zeros(1, VOCAB - 100), {0: guide}, [False])
    allowed = (masked[0] > -torch.inf).nonzero().flatten().tolist()

    assert masked.shape == (1, VOCAB - 100)
    assert allowed
    assert all(known.decode([token]).strip().islower() for token in allowed)
