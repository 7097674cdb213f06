"""Limits of a request that no engine and no model changes.

A worker checks what any caller sends to its port, and the frontend guided answers (the types of its APIs have narrower
limits for the rest), so that no request can hold or end an engine. Limits of one engine (context, vocabulary, choices)
are in `engine.refusal`.

A guided answer is limited by what its grammar costs to compile. Sizes are those of OpenAI's structured outputs (5,000
properties, 1,000 values of enums, 120,000 characters) or above; an enum of 20,000 strings held vLLM's xgrammar for 66
seconds. Small schemas can be costly too: the native engine compiles a grammar where it can be ended, and what is known
to be costly is refused here, before any engine sees it.
"""  # decider

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.protocols import generate

MAX_CHARS = 2**17  # of a schema, regex, grammar or all choices together
MAX_GRAMMAR_CHARS = 2**13  # of one in Lark or GBNF
MAX_RULES = 1000  # of a grammar
MAX_CHOICES = 1024  # of a guided answer
NUM_CHOICES = range(1, 1025)  # answers to one prompt; those that do not run at once are queued
MAX_VALUES = 1024  # of all enums of a schema
MAX_REFERENCES = 500
MAX_DEPTH = 128  # of a schema as JSON: two for each level of properties
MAX_DIGITS = 5  # of multipleOf, leading and trailing zeros aside
MAX_PATTERNS = 8  # of one allOf
MAX_STOP_IDS = 256
MAX_ALLOWED_IDS = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_MARKS = 16
MAX_NAME_CHARS = 1024  # of ids and names
MAX_ANNOTATIONS = 64
MAX_TOKENS = 2**31
MAX_PRIORITY = 2**31  # in both directions
_SEEDS = range(-(2**63), 2**64)
_CONSTRAINTS = ("json", "regex", "choice", "grammar")

# Allowed values of sampling options, in words and as a test.
_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("from 0 to 1,000", lambda x: 0 <= x <= 1000),
    "top_p": ("from 0 (the likeliest token) to 1", lambda x: 0 <= x <= 1),
    "top_k": ("at least 0", lambda x: x >= 0),
    "min_p": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("from 0.001 to 1,000", lambda x: 1e-3 <= x <= 1e3),
    "presence_penalty": ("from -1,000 to 1,000", lambda x: abs(x) <= 1000),
    "frequency_penalty": ("from -1,000 to 1,000", lambda x: abs(x) <= 1000),
    "seed": ("a whole number of 64 bits", lambda x: x is None or x in _SEEDS),
    "n": ("from 1 to 1,024", lambda x: x in NUM_CHOICES),
}


def check(request: generate.Request) -> None:
    """Raise InvalidRequest, which names the parameter, for a request that no engine has to serve."""
    options = request.sampling_options
    for name, (expected, is_allowed) in _ALLOWED.items():
        value = getattr(options, name)
        if not is_allowed(value):
            raise invalid(name, expected, value)
    if options.logit_bias and not all(abs(x) <= 1000 for x in options.logit_bias.values()):
        worst = max(options.logit_bias.values(), key=lambda x: math.inf if x != x else abs(x))
        raise invalid("logit_bias", "values from -1,000 to 1,000", worst)
    for param, unit, number, allowed in _numbers(request):
        if number not in allowed:
            raise invalid(param, f"from {allowed[0]} to {allowed[-1]}{unit}", number)
    if options.guided_decoding is not None:
        check_guided(options.guided_decoding)


def _numbers(request: generate.Request) -> Iterator[tuple[str, str, int, range]]:
    """Yield parameter, unit, number and allowed range of all that is counted."""
    stops, thinking = request.stop_conditions, request.thinking
    if stops.max_tokens is not None:
        yield "max_tokens", "", stops.max_tokens, range(1, MAX_TOKENS)
    yield "min_tokens", "", stops.min_tokens, range(MAX_TOKENS)
    yield "first_choice", "", request.first_choice, range(2**32)
    yield "priority", "", request.priority, range(-MAX_PRIORITY, MAX_PRIORITY + 1)
    yield "text_len", " tokens", request.text_len, range(request.prompt_len + 1)
    if request.cache_hint is not None:
        yield "cache_hint", " seconds", request.cache_hint.ttl_s, range(MAX_TOKENS)
    for name in ("id", "model", "lora_name", "cache_salt", "session_id"):
        yield name, " characters", len(getattr(request, name) or ""), range(MAX_NAME_CHARS + 1)
    yield "annotations", " items", len(request.annotations), range(MAX_ANNOTATIONS + 1)
    yield "eos_token_ids", " ids", len(request.eos_token_ids), range(MAX_STOP_IDS + 1)
    yield "stop_token_ids", " ids", len(stops.stop_token_ids), range(MAX_STOP_IDS + 1)
    yield "stop", " strings", len(stops.stop), range(MAX_STOPS + 1)
    num_allowed = len(request.sampling_options.allowed_token_ids)
    yield "allowed_token_ids", " ids", num_allowed, range(MAX_ALLOWED_IDS + 1)
    longest = max(map(len, stops.stop), default=0)
    yield "stop", " characters in each", longest, range(MAX_STOP_CHARS + 1)
    if thinking is not None:
        yield "thinking", " tokens", thinking.max_tokens, range(MAX_TOKENS)
        yield "thinking", " tokens that end it", len(thinking.close_ids), range(1, MAX_MARKS + 1)
        yield "thinking", " tokens that begin it", len(thinking.open_ids), range(MAX_MARKS + 1)


def check_guided(guided: generate.GuidedDecoding) -> None:
    """Raise InvalidRequest, which says the limit, unless there is one constraint and it is within all limits."""
    constraints = [name for name in _CONSTRAINTS if getattr(guided, name)]
    if len(constraints) != 1 and not (guided.calls is not None and not constraints):
        raise _refuse(guided, f"one of {', '.join(_CONSTRAINTS)}", len(constraints))
    for unit, size, limit in _sizes(guided):
        if size > limit:
            raise _refuse(guided, f"at most {limit} {unit}", size)
    tools = guided.calls.tools if guided.calls is not None else ()
    for schema in (guided.json, *(tool.parameters for tool in tools)):
        if schema is not None:
            _check_schema(schema, guided)


def _sizes(guided: generate.GuidedDecoding) -> Iterator[tuple[str, int, int]]:
    """Yield unit, size and limit of all that is counted without reading a schema."""
    tools = guided.calls.tools if guided.calls is not None else ()
    schemas = [guided.json or "", *(tool.parameters for tool in tools)]
    names = (tool.name for tool in tools)
    texts = [*schemas, *names, guided.regex or "", *(guided.choice or ())]
    yield "characters", sum(map(len, texts)), MAX_CHARS
    yield "choices", len(guided.choice or ()), MAX_CHOICES
    yield "references", max(schema.count("$ref") for schema in schemas), MAX_REFERENCES
    yield "characters", len(guided.grammar or ""), MAX_GRAMMAR_CHARS
    yield "rules", (guided.grammar or "").replace("::", ":").count(":"), MAX_RULES


def _check_schema(schema: str, guided: generate.GuidedDecoding) -> None:
    """Check what a schema contains, without recursion. Raises InvalidRequest."""
    try:
        root = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refuse(guided, "a JSON schema that can be read", error) from error
    if not isinstance(root, dict | bool):
        raise _refuse(guided, "a JSON schema, which is an object", type(root).__name__)
    num_values = 0
    level: list[Any] = [root]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for node in level:
            if isinstance(node, list):
                below += node
            elif isinstance(node, dict):
                values = enum if isinstance(enum := node.get("enum"), list) else None
                num_values += len(values or ())
                _check_traps(node, guided)
                below += (each for key, each in node.items() if key != "enum" or each is not values)
        if num_values > MAX_VALUES:
            raise _refuse(guided, f"at most {MAX_VALUES} values in all enums", num_values)
        level = [node for node in below if isinstance(node, dict | list)]
        if not level:
            return
    raise _refuse(guided, f"at most {MAX_DEPTH} levels of nesting", "more")


def _check_traps(node: dict[str, Any], guided: generate.GuidedDecoding) -> None:
    """Refuse keywords that are known to take seconds or for ever to compile."""
    multiple = node.get("multipleOf")
    if isinstance(multiple, int | float):
        digits = repr(multiple).partition("e")[0].replace(".", "").strip("0")
        if len(digits) > MAX_DIGITS:
            raise _refuse(guided, f"multipleOf with at most {MAX_DIGITS} digits", multiple)
    branches = node.get("allOf")
    if isinstance(branches, list):
        num_patterns = sum(isinstance(each, dict) and "pattern" in each for each in branches)
        if num_patterns > MAX_PATTERNS:
            raise _refuse(guided, f"at most {MAX_PATTERNS} patterns in one allOf", num_patterns)


def _refuse(guided: generate.GuidedDecoding, expected: str, value: object) -> errors.InvalidRequest:
    return errors.InvalidRequest.of_param(guided.param, f"expected {expected}, got {value}")


def invalid(param: str, expected: str, value: object) -> errors.InvalidRequest:
    """Return the error of a parameter with a value that is not allowed."""
    return errors.InvalidRequest.of_param(param, f"expected {expected}, got {value!r:.100}")
