"""Guided decoding with llguidance: grammars are composed, compiled, cached, and asked which tokens may come next.

A request's constraint becomes a list of grammars that refer to each other by name: thoughts before an answer, the
answer, the arguments of a tool call. So each JSON schema stays whole, and a reference in it means what its author
meant.

`GrammarBuilder` compiles a grammar in the thread that calls it, for as long as that takes: `grammar_compiler` decides
which one, and for how long. Each sequence then follows a copy (`GrammarGuide`). llguidance was chosen because it
refuses what it cannot promise, and needs neither torch nor a table of all states (docs/decisions/0006). Its own limits
bound a step of a compiled grammar, but not compilation.
"""

import ctypes
import functools
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llguidance

from dynamo.base import errors
from dynamo.engine import trials
from dynamo.protocols import generate

BACKENDS = (None, "auto", "guidance", "llguidance")
MAX_STEP_S = 0.25  # CPU time to compute a mask; an ordinary grammar takes a hundredth of it


# Fuel is time: at worst some 10 ms for one step of a grammar. A state takes 1 to 2 kB.
def _parser_limits(max_items_in_row: int) -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        max_items_in_row=max_items_in_row,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,  # they would write the answer to the log
    )


_LIMITS = _parser_limits(2000)  # a schema may have hundreds of properties
_TEXT_LIMITS = _parser_limits(500)  # of Lark and GBNF, where many items mean an ambiguous grammar
_SILENT = 0


class GrammarGuide:
    """The state of one sequence in its grammar; used by the engine's thread only."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        eos: Sequence[int],
        vocabulary: "Vocabulary",
        *,
        begins_text: bool,
    ) -> None:
        self._matcher = matcher
        self._eos = eos
        self._vocabulary = vocabulary
        self.num_tokens = vocabulary.num_tokens
        self.begins_text = begins_text
        self.spellings: Mapping[tuple[int, ...], float] = {}
        self.candidates: Mapping[tuple[int, ...], float] = {}
        self.error: errors.DynamoError | None = None

    def fill(self, bits: memoryview, *, may_end: bool) -> None:
        """Set the bit of each token that may come next; none, and `error`, if the mask cannot be computed.

        An end token is among them where the grammar allows it; without `may_end` only if no other token can come.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(bits))
        began_at = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(address, len(bits))
        is_slow = time.thread_time() - began_at > MAX_STEP_S
        if is_slow or self._matcher.is_error():  # llguidance then allows the end
            bits[:] = bytes(len(bits))
            self.error = errors.InvalidRequest(
                "the answer was broken off, because its grammar became too complex to follow"
            )
        elif not may_end and self._matcher.is_accepting():
            with_end = bytes(bits)
            for token_id in self._eos:
                bits[token_id >> 3] &= ~(1 << (token_id & 7))
            if not any(bits):
                bits[:] = with_end

    def advance(self, token_id: int) -> None:
        if token_id not in self._eos:
            self._matcher.consume_token(token_id)
            self.begins_text = self._vocabulary.text_of(token_id).endswith('"')
            candidates, self.candidates = self.candidates, {}
            self.spellings = {
                ids[1:]: share
                for ids, share in candidates.items()
                if ids[0] == token_id and ids[1:]
            }

    def spell(self, token_id: int) -> tuple[int, ...]:
        ids = self._vocabulary.spell(token_id)
        return ids if self._matcher.validate_tokens([*ids]) == len(ids) else ()


class CompiledGrammar:
    """A grammar that any number of sequences can follow."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        eos: Sequence[int],
        vocabulary: "Vocabulary",
        *,
        has_thoughts: bool,
    ) -> None:
        self._matcher = matcher
        self._eos = eos
        self._vocabulary = vocabulary
        self._has_thoughts = has_thoughts

    def begin(self) -> GrammarGuide:
        return GrammarGuide(
            self._matcher.deep_copy(),
            self._eos,
            self._vocabulary,
            begins_text=not self._has_thoughts,
        )


class Vocabulary:
    """The texts of a tokenizer's tokens, remembered; used by the engine's thread only."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        self.text_of = functools.cache(lambda token_id: tokenizer.decode_str([token_id]))
        self.spell = functools.cache(self._spell)
        self.num_tokens: int = tokenizer.vocab_size
        self._tokenizer = tokenizer

    def _spell(self, token_id: int) -> tuple[int, ...]:
        text: str = self.text_of(token_id)
        stripped = text.removeprefix(" ")
        if stripped == text or not stripped.strip():
            return ()
        return tuple(self._tokenizer.tokenize_str(stripped))


class GrammarBuilder:
    """Compiles grammars for one tokenizer, of answers that one of the tokens `eos` ends."""

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos: tuple[int, ...]) -> None:
        """Read the model's tokenizer, which takes some tenths of a second. Raises EngineFailed."""
        try:
            text = tokenizer_path.read_text("utf-8")
            try:
                self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=[*eos])
            except ValueError:  # as where it has tokens that the model lacks
                self._tokenizer = llguidance.LLTokenizer(text, eos_token=[*eos])
        except (OSError, ValueError) as error:
            raise errors.EngineFailed(
                f"answers cannot be guided: the tokenizer at {tokenizer_path} is of a kind"
                f" that llguidance does not read: {error}"
            ) from error
        self._vocabulary = Vocabulary(self._tokenizer)
        self.eos = eos

    def build(self, guided: generate.GuidedDecoding) -> CompiledGrammar:
        """Compile a grammar, which may take any time and memory. Raises InvalidRequest."""
        try:
            text = compose(guided, self._tokenizer)
        except (ValueError, RecursionError) as error:
            raise trials.refuse(guided, str(error)) from error
        limits = _LIMITS if guided.grammar is None else _TEXT_LIMITS
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=_SILENT, limits=limits)
        if not matcher.is_error():
            began_at = time.thread_time()
            matcher.compute_bitmask()  # the slowest one: so the first step need not compute it
            if time.thread_time() - began_at > MAX_STEP_S:
                raise trials.refuse(guided, "it is too ambiguous or too complex")
        if matcher.is_error():
            raise trials.refuse(guided, matcher.get_error())
        return CompiledGrammar(
            matcher, self.eos, self._vocabulary, has_thoughts=guided.thoughts is not None
        )


def check_backend(guided: generate.GuidedDecoding) -> None:
    """Raise InvalidRequest for a request that names another library."""
    if guided.backend not in BACKENDS:
        raise errors.InvalidRequest.of_param(
            "guided_decoding_backend",
            f"expected auto or llguidance, which is what this engine has, got {guided.backend!r}",
        )


def compose(guided: generate.GuidedDecoding, tokenizer: llguidance.LLTokenizer) -> str:
    """Return the list of grammars in llguidance's JSON form; the first is the start. Raises ValueError."""
    answer, *inner = _answer_grammars(guided, tokenizer)
    if guided.thoughts is None:
        return json.dumps({"grammars": [answer, *inner]})
    lead = {"lark_grammar": _thoughts_grammar(guided.thoughts, tokenizer)}
    return json.dumps({"grammars": [lead, {**answer, "name": "answer"}, *inner]})


def _answer_grammars(
    guided: generate.GuidedDecoding, tokenizer: llguidance.LLTokenizer
) -> list[dict[str, Any]]:
    """Return the grammar of the answer itself, and those to which it refers."""
    if guided.calls is None:
        return [_text_grammar(guided)]
    calls, *schemas = _calls_grammars(guided.calls, tokenizer)
    if not any((guided.json, guided.regex, guided.choice, guided.grammar)):
        return [calls, *schemas]
    either = {"lark_grammar": "start: text | calls\ntext: @text\ncalls: @calls"}
    return [either, {**_text_grammar(guided), "name": "text"}, {**calls, "name": "calls"}, *schemas]


def _text_grammar(guided: generate.GuidedDecoding) -> dict[str, Any]:
    """Return the grammar of an answer without tool calls."""
    if guided.json is not None:
        return _json_grammar(guided.json)
    if guided.regex is not None:
        return {"lark_grammar": f"start: /{llguidance.regex_to_lark(guided.regex, '')}/"}
    if guided.choice is not None:
        return {"lark_grammar": "start: " + " | ".join(map(_quote, guided.choice))}
    return {"lark_grammar": llguidance.grammar_from("grammar", guided.grammar or "")}


def _json_grammar(schema: str) -> dict[str, Any]:
    """Return the grammar of a schema, which cannot change llguidance's own options. Raises ValueError.

    White space is a blank, or a line break and an indentation of six levels: without a limit, a small model that is
    held to JSON tends to write nothing else, and with 40 blanks the built-in one still ran out of tokens.
    """
    text = llguidance.LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "lenient": False,
            "item_separator": ",",
            "key_separator": ":",
            "coerce_one_of": False,
            "whitespace_flexible": True,
            "whitespace_pattern": r"( |\r?\n[ \t]{0,24})?",
        },
    )
    (grammar,) = json.loads(text)["grammars"]
    return {"json_schema": grammar["json_schema"]}


def _calls_grammars(
    calls: generate.GuidedToolCalls, tokenizer: llguidance.LLTokenizer
) -> list[dict[str, Any]]:
    """Return the grammar of tool calls, and one for each tool's arguments."""
    begin, between, end = (
        _literal(text, tokenizer) for text in (calls.begin, calls.between, calls.end)
    )
    more = f"({between} call){{0,{calls.max_calls - 1}}}" if calls.max_calls > 1 else ""
    heads = [f'{{"name": {_quote(tool.name)}, "arguments": ' for tool in calls.tools]
    lark = [
        f"start: {begin} call {more} {end}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(calls.tools))),
        *(f"call_{i}: {_quote(head)} @tool_{i} {_quote('}')}" for i, head in enumerate(heads)),
    ]
    schemas = [
        {**_json_grammar(tool.parameters), "name": f"tool_{i}"}
        for i, tool in enumerate(calls.tools)
    ]
    return [{"lark_grammar": "\n".join(lark)}, *schemas]


def _thoughts_grammar(thoughts: generate.GuidedReasoning, tokenizer: llguidance.LLTokenizer) -> str:
    """Return thoughts and then the answer in Lark. A mark is a token of its own, or text that must be searched."""
    opens = " | ".join(_literal(mark, tokenizer) for mark in thoughts.opens)
    closes = [_literal(mark, tokenizer) for mark in thoughts.closes]
    has_text_mark = any(close.startswith('"') for close in closes)
    thought = f"(({opens}) thinking BLANKS)?" if opens else "thinking BLANKS"
    return "\n".join(
        (
            f"start: {thought} answer",
            "answer: @answer",
            f"thinking{'[lazy]' if has_text_mark else ''}: TEXT ({' | '.join(closes)})",
            r"TEXT: /(.|\n)*/",
            r"BLANKS: /[ \t\r\n]{0,4}/",
        )
    )


def _literal(text: str, tokenizer: llguidance.LLTokenizer) -> str:
    """Return the text in Lark, where special tokens like `<think>` are not text but tokens."""
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
