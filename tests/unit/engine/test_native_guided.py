"""Guided answers of the built-in model follow their constraint, and other answers of the batch are unchanged."""

import json
import re

import jsonschema
import msgspec
import pytest
import torch

from dynamo.base import errors
from dynamo.engine.native import sampler
from dynamo.engine.native.sequence import Sequence
from dynamo.protocols import blocks, generate
from guided import EOS as EOS_IDS
from guided import Storyteller

QUESTIONS = ["Tell me a story about a cat", "What is 17 + 25?", "x"]
EOS, LENGTH = generate.FinishReason.EOS, generate.FinishReason.LENGTH
WORD = {"type": "string", "maxLength": 8}
SCHEMAS = {
    "enum": {"enum": ["red", 7, None, {"a": [1]}]},
    "const": {"const": {"deep": ["ü", "\n", '"']}},
    "bounds": {"type": "integer", "minimum": -5, "maximum": 12},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [WORD, {"type": "null"}], "items": False, "minItems": 2},
    "any of": {"anyOf": [{"type": "null"}, {"type": "array", "items": WORD, "maxItems": 2}]},
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,5}-[0-9]{2}$"},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "uuid": {"type": "string", "format": "uuid"},
    "nested": {
        "type": "object",
        "properties": {
            "name": WORD,
            "home": {
                "type": "object",
                "properties": {"kind": {"enum": ["hut", "tent"]}, "rooms": {"enum": [1, 2]}},
                "required": ["kind", "rooms"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "home"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "reference": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"enum": [1, 2]},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/last"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            },
            "last": {"type": "object", "properties": {}, "additionalProperties": False},
        },
        "type": "array",
        "items": {"$ref": "#/$defs/node"},
        "minItems": 1,
        "maxItems": 2,
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
}  # fmt: skip
SHAPES = {"greedy": {"temperature": 0.0}} | {
    f"seed {seed}": {"temperature": 1.0, "seed": seed} for seed in range(4)
}
DRAWING = {
    "few": {"top_k": 5},
    "likeliest": {"top_p": 0.5},
    "warm": {"temperature": 2.0},
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.9, "frequency_penalty": 2.0, "presence_penalty": 2.0},
    "bias": {"logit_bias": {5: 100.0, 2: 100.0}},
}


@pytest.fixture(scope="module")
def model():
    return Storyteller()


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_fits_its_schema(model, name):
    guided = generate.GuidedDecoding(json=json.dumps(SCHEMAS[name]))
    for number, question in enumerate(QUESTIONS):
        for how, sampling in SHAPES.items():
            model.ask(f"{number} {how}", question, guided, **sampling)

    for answer in model.answers().values():
        assert answer.end is EOS
        jsonschema.validate(
            json.loads(answer.text), SCHEMAS[name], format_checker=jsonschema.FormatChecker()
        )


@pytest.mark.parametrize("how", DRAWING)
def test_a_schema_holds_for_any_sampling_options(model, how):
    guided = generate.GuidedDecoding(json=json.dumps(SCHEMAS["nested"]))
    for seed in range(6):
        model.ask(str(seed), "Tell me a story", guided, **{"seed": seed} | DRAWING[how])

    for answer in model.answers().values():
        jsonschema.validate(json.loads(answer.text), SCHEMAS["nested"])


@pytest.mark.parametrize(
    "pattern",
    [r"[ab]{3,7}c", r"(cat|dog)s? and [A-Z][a-z]{1,9}!", r"\d{3}/\d{4}", r"^[^x\n]{5}$", "ü😀?"],
)
def test_every_answer_is_a_full_match(model, pattern):
    for how, sampling in SHAPES.items():
        model.ask(how, "Say it", generate.GuidedDecoding(regex=pattern), **sampling)

    for answer in model.answers().values():
        assert answer.end is EOS
        assert re.fullmatch(pattern, answer.text)


def test_every_answer_is_one_of_the_choices(model):
    choices = ("red", "blue", 'a "quoted"\nline', "red wine", "/* ü */")
    for seed in range(20):
        guided = generate.GuidedDecoding(choice=choices)
        model.ask(str(seed), "Which?", guided, seed=seed, temperature=2.0)

    found = {answer.text for answer in model.answers().values()}
    assert found <= set(choices)
    assert len(found) > 1


@pytest.mark.parametrize(
    "grammar",
    [
        'start: sum\nsum: NUMBER | sum "+" NUMBER\nNUMBER: /[0-9]/',
        'root ::= num ("+" num)*\nnum ::= [0-9]',
    ],
)
def test_every_answer_follows_its_grammar_in_lark_or_gbnf(model, grammar):
    for seed in range(8):
        model.ask(str(seed), "What is 1 + 1?", generate.GuidedDecoding(grammar=grammar), seed=seed)

    for answer in model.answers().values():
        assert re.fullmatch(r"\d(\+\d)*" if answer.end is EOS else r"\d(\+\d?)*", answer.text)


def test_guided_answers_do_not_change_free_answers_in_the_batch(model):
    model.ask("alone", QUESTIONS[0], temperature=0.0)
    model.ask("seeded", QUESTIONS[0], seed=7)
    alone = model.answers()
    guided = generate.GuidedDecoding(json=json.dumps(SCHEMAS["nested"]))
    for number, how in enumerate(SHAPES.values()):
        model.ask(f"guided {number}", QUESTIONS[1], guided, **how)
    model.ask("alone", QUESTIONS[0], temperature=0.0)
    model.ask("seeded", QUESTIONS[0], seed=7)
    together = model.answers()

    assert together["alone"] == alone["alone"]
    assert together["seeded"] == alone["seeded"]


def test_several_choices_each_follow_the_grammar(model):
    model.ask("n", "Which?", generate.GuidedDecoding(regex="[ab]{4}"), n=3, temperature=2.0, seed=1)

    assert re.fullmatch("[ab]{12}", model.answers()["n"].text)


def test_a_guided_answer_ends_at_max_tokens(model):
    stop = generate.StopConditions(max_tokens=5)
    model.ask("cut", "x", generate.GuidedDecoding(regex="a{50}"), stop=stop)
    answer = model.answers()["cut"]

    assert answer.end is LENGTH
    assert len(answer.token_ids) == 5
    assert set(answer.text) == {"a"}


@pytest.mark.parametrize(
    "longer",
    [
        generate.StopConditions(max_tokens=60, min_tokens=10),
        generate.StopConditions(max_tokens=60, ignore_eos=True),
    ],
)
def test_ignore_eos_extends_a_guided_answer_as_far_as_its_grammar_allows(model, longer):
    model.ask("open", "x", generate.GuidedDecoding(regex="a*"), stop=longer, temperature=0.0)
    model.ask("closed", "x", generate.GuidedDecoding(choice=("yes", "no")), stop=longer)
    told = model.answers()

    assert len(told["open"].token_ids) >= 10
    assert told["closed"].end is EOS
    assert told["closed"].text in ("yes", "no")


def test_thoughts_may_precede_a_guided_answer(model):
    thoughts = generate.GuidedReasoning(opens=("<think>",), closes=("</think>",))
    begun = generate.GuidedReasoning(closes=("</think>",))
    for seed in range(4):
        guided = generate.GuidedDecoding(regex="[0-9]{2}", thoughts=thoughts)
        model.ask(f"may {seed}", QUESTIONS[1], guided, seed=seed, logit_bias={3: 9.0, 4: 5.0})
        guided = generate.GuidedDecoding(regex="[0-9]{2}", thoughts=begun)
        model.ask(f"must {seed}", QUESTIONS[1], guided, seed=seed, logit_bias={4: 5.0})
    told = model.answers()
    free = re.compile(r"(<think>.*</think>[ \t\r\n]{0,4})?[0-9]{2}", re.DOTALL)
    forced = re.compile(r".*</think>[ \t\r\n]{0,4}[0-9]{2}", re.DOTALL)

    for name, answer in told.items():
        if answer.end is EOS:
            assert (free if name.startswith("may") else forced).fullmatch(answer.text)
    assert any(a.end is EOS and "</think>" in a.text for a in told.values())


def test_thinking_limit_within_a_character_ends_the_thought_of_a_guided_answer_after_it(model):
    thoughts = generate.GuidedReasoning(closes=("</think>",))
    guided = generate.GuidedDecoding(regex="[0-9]{2}", thoughts=thoughts)
    request = model.request("r", QUESTIONS[1], guided, temperature=0.0)
    begun = model.ids("hm 😀")[:4]  # the first of the character's four bytes
    (close,) = model.ids("</think>")
    model.submit(
        msgspec.structs.replace(
            request,
            token_ids=request.token_ids + blocks.pack(begun),
            num_resumed=len(begun),
            thinking=generate.ThinkingLimit(max_tokens=2, close_ids=(close,), is_open=True),
        )
    )
    answer = model.answers()["r"]

    assert answer.end is EOS
    assert answer.token_ids.index(close) == 3


def test_thoughts_end_at_a_mark_that_is_plain_text(model):
    thoughts = generate.GuidedReasoning(closes=("Here is my response:", "Here's my response:"))
    guided = generate.GuidedDecoding(regex="[0-9]", thoughts=thoughts)
    grammar = model.builder.build(guided)
    guide = grammar.begin()

    for token in model.ids("hm. Here is my response: 4"):
        assert token in allowed(guide)
        guide.advance(token)
    assert allowed(guide) == set(EOS_IDS)


def allowed(guide):
    bits = bytearray(4096 // 8)
    guide.fill(memoryview(bits), may_end=True)
    return {token for token in range(4096) if bits[token >> 3] >> (token & 7) & 1}


@pytest.mark.parametrize(
    ("begin", "between", "end", "pattern"),
    [
        ("[", ", ", "]", r"\[(?P<call>.*)\]"),
        (
            "<tool_call>\n",
            "\n</tool_call>\n<tool_call>\n",
            "\n</tool_call>",
            r"<tool_call>\n(?P<call>.*)\n</tool_call>",
        ),
    ],
)
def test_forced_tool_calls_have_arguments_of_their_schema(model, begin, between, end, pattern):
    number = {"$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}}
    add = number | {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    tools = (
        generate.ToolSchema(name="add", parameters=json.dumps(add)),
        generate.ToolSchema(name="add_ü", parameters='{"type": "object", "maxProperties": 0}'),
    )
    calls = generate.GuidedToolCalls(
        tools=tools, begin=begin, between=between, end=end, max_calls=1
    )
    thoughts = generate.GuidedReasoning(opens=("<think>",), closes=("</think>",))
    guided = generate.GuidedDecoding(calls=calls, thoughts=thoughts)
    for how, sampling in SHAPES.items():
        model.ask(how, QUESTIONS[1], guided, logit_bias={3: 50.0, 4: 50.0}, **sampling)

    for answer in model.answers().values():
        assert answer.end is EOS
        call = json.loads(
            re.fullmatch(pattern, answer.text.rpartition("</think>")[2].lstrip(), re.DOTALL)["call"]
        )
        schemas = {one.name: json.loads(one.parameters) for one in tools}
        jsonschema.validate(call["arguments"], schemas[call["name"]])


def test_an_answer_may_be_a_tool_call_or_a_guided_text(model):
    tool = generate.ToolSchema(name="add", parameters='{"type": "object", "maxProperties": 0}')
    frame = ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
    calls = generate.GuidedToolCalls(tools=(tool,), begin=frame[0], between=frame[1], end=frame[2])
    guided = generate.GuidedDecoding(json='{"enum": ["yes", "no"]}', calls=calls)
    for liking in (-50.0, 50.0):  # for the mark of a call
        model.ask(str(liking), "x", guided, logit_bias={5: liking})
    told = model.answers()

    assert told["-50.0"].text in ('"yes"', '"no"')
    call = told["50.0"].text.removeprefix(frame[0]).removesuffix(frame[2])
    assert json.loads(call) == {"name": "add", "arguments": {}}


@pytest.mark.parametrize(
    "bomb",
    [
        generate.GuidedDecoding(regex="((a{1,1000}){1,1000}){1,1000}"),
        generate.GuidedDecoding(grammar="start: a\na: " + "a a | " * 200 + '"x"'),
    ],
    ids=["regex", "grammar"],
)
def test_a_grammar_that_becomes_too_complex_fails_only_its_request(model, bomb):
    on = generate.StopConditions(max_tokens=150, ignore_eos=True)
    model.ask("bomb", "x", bomb, seed=1, stop=on)
    model.ask("free", QUESTIONS[0], temperature=0.0)
    told = model.answers()

    assert isinstance(told["bomb"].end, errors.InvalidRequest)
    assert "too complex" in str(told["bomb"].end)
    assert told["free"].end in (EOS, LENGTH)


def draw_after(model, guided, text, *likeliest):
    """Return the text that is drawn after `text`, a token per list of the likeliest tokens, in falling order."""
    request = model.request("r", "x", guided, temperature=0.0)
    prompt = [*blocks.unpack(request.token_ids)]
    answer = model.ids(text)
    sequence = Sequence(
        request=msgspec.structs.replace(request, num_resumed=len(answer)),
        index=0,
        token_ids=prompt + answer,
        prompt_len=len(prompt) + len(answer),
        grammar=model.builder.build(guided),
    )
    drawing, drawn_ids = sampler.Sampler(), []
    for tokens in likeliest:
        logits = torch.zeros(1, model.parts.vocab_size)
        for rank, token in enumerate(tokens):
            logits[0, model.tokenizer.token_to_id(token)] = 20.0 - rank
        (drawn,) = drawing.sample(logits, [sequence])
        drawn_ids.append(drawn.token_id)
        sequence.token_ids.append(drawn.token_id)
    return model.tokenizer.decode(drawn_ids)


@pytest.mark.parametrize(
    ("guided", "text"),
    [
        (generate.GuidedDecoding(regex="[a-z]+"), ""),
        (generate.GuidedDecoding(choice=("crocodile", "codile")), ""),
        (
            generate.GuidedDecoding(
                json='{"type":"object","properties":{"animal":{"type":"string","pattern":"^[a-z]+$"}},'
                '"required":["animal"]}'
            ),
            '{"animal": "',
        ),
    ],
)
def test_word_begins_with_its_first_token_where_its_blank_is_not_allowed(model, guided, text):
    assert draw_after(model, guided, text, ["Ġcrocodile", "codile"]) == "c"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("[a-z]+", "crocodile"), ("c[a-z]*|codile", "crocodile"), ("co[a-z]*|d", "d")],
)
def test_word_is_spelled_to_its_end_though_the_model_expects_another_token(
    model, pattern, expected
):
    spelling = model.ids("crocodile")
    guided = generate.GuidedDecoding(regex=pattern)
    drawn = draw_after(model, guided, "", ["Ġcrocodile", "d"], *[["o", "a"]] * (len(spelling) - 1))

    assert len(spelling) > 2
    assert drawn.startswith(expected)


def test_word_that_began_otherwise_is_not_spelled_on(model):
    guided = generate.GuidedDecoding(regex="[a-z]+")

    assert draw_after(model, guided, "", ["c", "Ġcrocodile"], ["o", "a"]) == "co"


@pytest.mark.parametrize(
    ("pattern", "text", "drawn"),
    [("[ a-z]+", "", " crocodile"), ("[a-z]+", "cat", "codile")],
)
def test_blank_is_dropped_only_where_a_text_begins_without_one(model, pattern, text, drawn):
    guided = generate.GuidedDecoding(regex=pattern)

    assert draw_after(model, guided, text, ["Ġcrocodile", "codile"]) == drawn


def test_guided_request_that_excludes_all_tokens_is_invalid(model):
    end = EOS_IDS[0]
    stop = generate.StopConditions(min_tokens=2, stop_token_ids=(end,))
    guided = generate.GuidedDecoding(json='{"type": "object"}')
    model.ask("r", "Hello", guided, stop=stop, allowed_token_ids=(end,))

    fault = model.answers()["r"].end

    assert isinstance(fault, errors.InvalidRequest)
    assert fault.param == "min_tokens"
