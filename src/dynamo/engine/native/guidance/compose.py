"""From what was asked for to the text of a grammar, as llguidance reads it.

Everything becomes a list of grammars that refer to each other by name: thoughts before an answer, an answer, the
arguments of a call. So each JSON schema stays whole, and a reference in it means what it meant.
"""

import itertools
import json
from typing import Any

import llguidance

from dynamo.protocols import generate


def grammar(guided: generate.GuidedDecoding, tokenizer: llguidance.LLTokenizer) -> str:
    """A list of grammars in the library's own form; the first is what it begins with. Raises ValueError."""
    answer, *inner = _answer(guided, tokenizer)
    if guided.thoughts is None:
        return json.dumps({"grammars": [answer, *inner]})
    lead = {"lark_grammar": _lead(guided.thoughts, tokenizer)}
    return json.dumps({"grammars": [lead, {**answer, "name": "answer"}, *inner]})


def _answer(
    guided: generate.GuidedDecoding, tokenizer: llguidance.LLTokenizer
) -> list[dict[str, Any]]:
    """The grammar of the answer itself, and those that it needs."""
    if guided.calls is None:
        return [_text(guided)]
    calls, *schemas = _calls(guided.calls, tokenizer)
    if not any((guided.json, guided.regex, guided.choice, guided.grammar)):
        return [calls, *schemas]
    either = {"lark_grammar": "start: text | calls\ntext: @text\ncalls: @calls"}
    return [either, {**_text(guided), "name": "text"}, {**calls, "name": "calls"}, *schemas]


def _text(guided: generate.GuidedDecoding) -> dict[str, Any]:
    """The grammar of an answer that calls nothing."""
    if guided.json is not None:
        return _json_grammar(guided.json)
    if guided.regex is not None:
        return {"lark_grammar": f"start: /{llguidance.regex_to_lark(guided.regex, '')}/"}
    if guided.choice is not None:
        return {"lark_grammar": "start: " + " | ".join(map(_quote, guided.choice))}
    return {"lark_grammar": llguidance.grammar_from("grammar", guided.grammar or "")}


def _json_grammar(schema: str) -> dict[str, Any]:
    """Of a schema, which cannot choose for itself how JSON is written or what is ignored. Raises ValueError.

    White space is a blank, or a line break and an indentation: a small model that is held to JSON would like to write
    nothing else.
    """
    text = llguidance.LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "lenient": False,
            "item_separator": ",",
            "key_separator": ":",
            "coerce_one_of": False,
            "whitespace_flexible": True,
            "whitespace_pattern": r"( |\r?\n[ \t]{0,40})?",
        },
    )
    (grammar,) = json.loads(text)["grammars"]
    return {"json_schema": grammar["json_schema"]}


def _calls(
    calls: generate.GuidedToolCalls, tokenizer: llguidance.LLTokenizer
) -> list[dict[str, Any]]:
    """A grammar for each tool's arguments, and one around them."""
    begin, between, end = (
        _literal(text, tokenizer) for text in (calls.begin, calls.between, calls.end)
    )
    more = f"({between} call){{0,{calls.max_calls - 1}}}" if calls.max_calls > 1 else ""
    rules = [
        f"call_{i}: {_quote(_head(tool.name))} @tool_{i} {_quote('}')}"
        for i, tool in enumerate(calls.tools)
    ]
    lark = [
        f"start: {begin} call {more} {end}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(calls.tools))),
        *rules,
    ]
    schemas = [
        {**_json_grammar(tool.parameters), "name": f"tool_{i}"}
        for i, tool in enumerate(calls.tools)
    ]
    return [{"lark_grammar": "\n".join(lark)}, *schemas]


def _head(name: str) -> str:
    """Of a call, up to its arguments."""
    return f'{{"name": {_quote(name)}, "arguments": '


def _lead(thoughts: generate.GuidedReasoning, tokenizer: llguidance.LLTokenizer) -> str:
    """Thoughts, and then the answer, in Lark. A mark is a token of its own, or text that must be looked for."""
    opens = " | ".join(_literal(mark, tokenizer) for mark in thoughts.opens)
    closes = [_literal(mark, tokenizer) for mark in thoughts.closes]
    is_text = any(close.startswith('"') for close in closes)
    thought = f"(({opens}) thinking BLANKS)?" if opens else "thinking BLANKS"
    return "\n".join(
        (
            f"start: {thought} answer",
            "answer: @answer",
            f"thinking{'[lazy]' if is_text else ''}: TEXT ({' | '.join(closes)})",
            r"TEXT: /(.|\n)*/",
            r"BLANKS: /[ \t\r\n]{0,4}/",
        )
    )


def _literal(text: str, tokenizer: llguidance.LLTokenizer) -> str:
    """This text in Lark, where tokens like `<think>` are not text but tokens."""
    ids = tokenizer.tokenize_str(text, parse_special=True)
    runs = itertools.groupby(ids, tokenizer.is_special_token)
    return " ".join(
        " ".join(f"<[{token_id}]>" for token_id in run)
        if is_special
        else _quote(tokenizer.decode_str(list(run)))
        for is_special, run in runs
    )


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
