"""What frontend and worker refuse of any request, whatever the engine."""

import json
import math
import time

import pytest

from dynamo.base import errors
from dynamo.protocols import blocks, generate, limits


def guided(**fields):
    return generate.GuidedDecoding(**fields, param="here")


def schema(content):
    return guided(json=json.dumps(content))


def tool(name, parameters):
    return generate.ToolSchema(name=name, parameters=json.dumps(parameters))


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (guided(), "got 0"),
        (guided(regex="a", json="{}"), "got 2"),
        (guided(json="x" * (limits.MAX_CHARS + 1)), "at most 131072 characters"),
        (guided(grammar="x" * 20_000), "at most 8192 characters"),
        (guided(grammar="a: b\n" * 1001), "at most 1000 rules, got 1001"),
        (guided(json='{"$ref": "#"}' * 501), "at most 500 references, got 501"),
        (guided(choice=("x" * 70_000, "y" * 70_000)), "got 140000"),
        (guided(choice=tuple(map(str, range(1025)))), "at most 1024 choices, got 1025"),
        (guided(json="{"), "a JSON schema that can be read"),
        (guided(json="[]"), "which is an object, got list"),
        (guided(json="[" * 60_000), "a JSON schema that can be read"),
        (schema({"enum": list(range(20_000))}), "at most 1024 values in all enums, got 20000"),
        (
            schema({"properties": {f"p{i}": {"enum": list(range(600))} for i in range(2)}}),
            "values in all enums, got 1200",
        ),
        (guided(json='{"items":' * 200 + "{}" + "}" * 200), "at most 128 levels of nesting"),
        (schema({"type": "integer", "multipleOf": 62615533}), "at most 5 digits, got 62615533"),
        (
            schema({"properties": {"enum": {"const": {"multipleOf": 123456.5}}}}),
            "at most 5 digits",
        ),
        (
            schema({"allOf": [{"pattern": f".*a.{{{i}}}b.*"} for i in range(16)]}),
            "at most 8 patterns in one allOf, got 16",
        ),
        (
            guided(
                calls=generate.GuidedToolCalls(
                    tools=(tool("f", {}), tool("g", {"enum": list(range(2000))})),
                    begin="",
                    between="",
                    end="",
                )
            ),
            "values in all enums",
        ),
    ],
)
def test_constraint_over_a_limit_is_refused_by_name(constraint, words):
    with pytest.raises(errors.InvalidRequest, match=words) as caught:
        limits.check_guided(constraint)

    assert caught.value.param == "here"


@pytest.mark.parametrize(
    "content",
    [
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 1_000_000},
        {"properties": {"enum": {"type": "string"}, "allOf": {"type": "null"}}},
        {"enum": [[i] for i in range(1000)]},
        True,
    ],
)
def test_ordinary_schema_is_within_the_limits(content):
    limits.check_guided(schema(content))


def test_largest_schemas_are_checked_quickly():
    wide = {"properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
    began_at = time.thread_time()
    limits.check_guided(schema(wide))

    assert time.thread_time() - began_at < 0.5


def request(stops=None, sampling=None, **fields):
    return generate.Request(
        id="r",
        model="m",
        token_ids=blocks.pack([1]),
        stop_conditions=generate.StopConditions(**(stops or {})),
        sampling_options=generate.SamplingOptions(**(sampling or {})),
        **fields,
    )


@pytest.mark.parametrize(
    ("absurd", "param"),
    [
        (request(sampling={"n": 0}), "n"),
        (request(sampling={"temperature": math.nan}), "temperature"),
        (request(sampling={"temperature": 1e300}), "temperature"),
        (request(sampling={"repetition_penalty": 1e-300}), "repetition_penalty"),
        (request(sampling={"frequency_penalty": -1e300}), "frequency_penalty"),
        (request(sampling={"logit_bias": {1: 1e39}}), "logit_bias"),
        (request(sampling={"logit_bias": {1: 0.0, 2: math.nan}}), "logit_bias"),
        (request(sampling={"allowed_token_ids": (1,) * 1025}), "allowed_token_ids"),
        (request(sampling={"seed": 2**64}), "seed"),
        (request({"max_tokens": 2**40}), "max_tokens"),
        (request({"min_tokens": -1}), "min_tokens"),
        (request({"stop_token_ids": tuple(range(10_000))}), "stop_token_ids"),
        (request({"stop": ("x",) * 100}), "stop"),
        (request({"stop": ("x" * 10_000,)}), "stop"),
        (request(eos_token_ids=tuple(range(10_000))), "eos_token_ids"),
        (request(first_choice=2**40), "first_choice"),
        (request(cache_salt="x" * 10_000), "cache_salt"),
        (request(session_id="x" * 10_000), "session_id"),
        (request(annotations=("x",) * 1000), "annotations"),
        (request(priority=2**64 - 1), "priority"),
        (request(text_len=-5), "text_len"),
        (request(text_len=2**40), "text_len"),
        (request(cache_hint=generate.CacheHint(ttl_s=-1)), "cache_hint"),
        (request(cache_hint=generate.CacheHint(ttl_s=2**62)), "cache_hint"),
        (request(thinking=generate.ThinkingLimit(max_tokens=1, close_ids=())), "thinking"),
        (request(thinking=generate.ThinkingLimit(max_tokens=-1, close_ids=(1,))), "thinking"),
        (
            request(thinking=generate.ThinkingLimit(max_tokens=1, close_ids=tuple(range(99)))),
            "thinking",
        ),
    ],
)
def test_absurd_parameter_is_refused_by_name(absurd, param):
    with pytest.raises(errors.InvalidRequest) as caught:
        limits.check(absurd)

    assert caught.value.param == param


def test_widest_parameters_of_the_apis_are_within_the_limits():
    limits.check(
        request(
            {"max_tokens": 2**31 - 1, "stop": ("x" * 1024,) * 4, "stop_token_ids": (1,) * 128},
            {
                "n": 128,
                "temperature": 2.0,
                "top_k": 2**31 - 1,
                "repetition_penalty": 2.0,
                "presence_penalty": -2.0,
                "frequency_penalty": 2.0,
                "seed": -(2**63),
                "logit_bias": {1: -100.0, 2: 100.0},
            },
        )
    )
