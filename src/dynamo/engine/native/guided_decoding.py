"""Guided decoding with llguidance: grammars are composed, compiled, cached, and asked which tokens may come next.

A request's constraint becomes a list of grammars that refer to each other by name: thoughts before an answer, the
answer, the arguments of a tool call. So each JSON schema stays whole, and a reference in it means what its author
meant.

A grammar is compiled once per text, in a thread of its own (`GrammarCompiler`), and cached for the next request with
the same constraint; each sequence then follows a copy (`GrammarGuide`). llguidance was chosen because it refuses what
it cannot promise, and needs neither torch nor a table of all states (docs/decisions/0006). It releases Python's lock,
so that neither the event loop nor the engine's thread waits during compilation; limits bound what a hostile grammar
costs.
"""

import ctypes
import itertools
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import llguidance

from dynamo.base import errors
from dynamo.protocols import generate

MAX_CHARS = 2**17  # of a schema, regex, grammar or all choices together
# llguidance recurses along the rules of a grammar and the references of a schema, and a stack overflow ends the
# process: these limits, with a large stack, stay far from it.
MAX_GRAMMAR_CHARS = 2**13  # of one in Lark or GBNF
MAX_RULES = 1000
MAX_REFERENCES = 500
STACK_BYTES = 2**26
MAX_CACHED = 32  # grammars; the least recently used goes first
MAX_WAITING = 64  # requests that wait for their grammar
BACKENDS = (None, "auto", "guidance", "llguidance")
MAX_STEP_S = 0.25  # CPU time to compute a mask; an ordinary grammar takes a hundredth of it


# Fuel is time: at worst some 2 s to compile a grammar, and 10 ms for one step of it. A state takes 1 to 2 kB.
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
_CONSTRAINTS = ("json", "regex", "choice", "grammar")
_MAX_REASON_CHARS = 300  # of an error of llguidance

OnCompiled = Callable[["CompiledGrammar | errors.DynamoError"], None]


class GrammarGuide:
    """The state of one sequence in its grammar; used by the engine's thread only."""

    def __init__(self, matcher: llguidance.LLMatcher, eos: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos = eos
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
        """Follow the grammar by the token that was drawn."""
        if token_id not in self._eos:
            self._matcher.consume_token(token_id)


class CompiledGrammar:
    """A grammar that any number of sequences can follow."""

    def __init__(self, matcher: llguidance.LLMatcher, eos: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos = eos

    def begin(self) -> GrammarGuide:
        """Return a guide for one answer."""
        return GrammarGuide(self._matcher.deep_copy(), self._eos)


class GrammarCompiler:
    """Compiles grammars one after the other in a thread of its own, and caches them."""

    def __init__(self, tokenizer_path: Path, vocab_size: int) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._eos: tuple[int, ...] = ()  # of the tokenizer; the same for all requests of a model
        self._cached: OrderedDict[generate.GuidedDecoding, CompiledGrammar] = OrderedDict()
        self._thread = _deep_thread()
        self._slots = threading.BoundedSemaphore(MAX_WAITING)

    @property
    def is_possible(self) -> bool:
        """Return whether the model has the tokenizer that compilation needs."""
        return self._tokenizer_path.is_file()

    def submit(
        self, guided: generate.GuidedDecoding, eos: tuple[int, ...], on_compiled: OnCompiled
    ) -> None:
        """Compile the grammar of answers that one of the tokens `eos` ends, then call `on_compiled` in the thread.

        Raises InvalidRequest for a constraint that exceeds a limit, or Overloaded.
        """
        check(guided)
        if not self._slots.acquire(blocking=False):
            raise errors.Overloaded(f"{MAX_WAITING} requests wait for their grammar; try later")
        self._thread.submit(self._run, guided, eos, on_compiled)

    def stop(self) -> None:
        """Compile no further grammars."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(
        self, guided: generate.GuidedDecoding, eos: tuple[int, ...], on_compiled: OnCompiled
    ) -> None:
        result: CompiledGrammar | errors.DynamoError
        try:
            result = self.compile(guided, eos)
        except errors.DynamoError as error:
            result = error
        except Exception as error:  # noqa: BLE001 - the waiting request gets the error
            result = errors.EngineFailed(f"no grammar could be made: {error}")
        finally:
            self._slots.release()
        on_compiled(result)

    def compile(self, guided: generate.GuidedDecoding, eos: tuple[int, ...]) -> CompiledGrammar:
        """Return a cached grammar or compile it. Raises InvalidRequest, or EngineFailed for an unusable tokenizer."""
        if self._tokenizer is None or self._eos != eos:
            self._cached.clear()
            self._tokenizer = _read_tokenizer(self._tokenizer_path, self._vocab_size, eos)
            self._eos = eos
        grammar = self._cached.pop(guided, None) or self._compile_new(guided, self._tokenizer)
        self._cached[guided] = grammar
        if len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)
        return grammar

    def _compile_new(
        self, guided: generate.GuidedDecoding, tokenizer: llguidance.LLTokenizer
    ) -> CompiledGrammar:
        try:
            text = compose(guided, tokenizer)
        except (ValueError, RecursionError) as error:
            raise _refusal(guided, str(error)) from error
        limits = _LIMITS if guided.grammar is None else _TEXT_LIMITS
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=_SILENT, limits=limits)
        if not matcher.is_error():
            began_at = time.thread_time()
            matcher.compute_bitmask()  # the slowest one: so the first step need not compute it
            if time.thread_time() - began_at > MAX_STEP_S:
                raise _refusal(guided, "it is too ambiguous or too complex")
        if matcher.is_error():
            raise _refusal(guided, matcher.get_error())
        return CompiledGrammar(matcher, self._eos)


def check(guided: generate.GuidedDecoding) -> None:
    """Check number, size and backend of constraints. Raises InvalidRequest."""
    constraints = [name for name in _CONSTRAINTS if getattr(guided, name)]
    if len(constraints) != 1 and not (guided.calls is not None and not constraints):
        raise errors.InvalidRequest(
            f"{guided.param}: expected one of {', '.join(_CONSTRAINTS)}, got {len(constraints)}",
            param=guided.param,
        )
    for unit, size, limit in _sizes(guided):
        if size > limit:
            raise errors.InvalidRequest(
                f"{guided.param}: expected at most {limit} {unit}, got {size}", param=guided.param
            )
    if guided.backend not in BACKENDS:
        raise errors.InvalidRequest(
            "guided_decoding_backend: expected auto or llguidance, which is what this engine has, "
            f"got {guided.backend!r}",
            param="guided_decoding_backend",
        )


def _sizes(guided: generate.GuidedDecoding) -> Iterator[tuple[str, int, int]]:
    """Yield unit, size and limit of everything that is limited."""
    tools = guided.calls.tools if guided.calls is not None else ()
    schemas = [guided.json or "", *(tool.parameters for tool in tools)]
    names = (tool.name for tool in tools)
    texts = [*schemas, *names, guided.regex or "", *(guided.choice or ())]
    yield "characters", sum(map(len, texts)), MAX_CHARS
    yield "references", max(schema.count("$ref") for schema in schemas), MAX_REFERENCES
    yield "characters", len(guided.grammar or ""), MAX_GRAMMAR_CHARS
    yield "rules", (guided.grammar or "").replace("::", ":").count(":"), MAX_RULES


def _deep_thread() -> futures.ThreadPoolExecutor:
    """Start one thread with a stack for deep recursion; a stack takes memory only as far as it is used."""
    former_size = threading.stack_size(STACK_BYTES)
    try:
        executor = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        executor.submit(int).result()  # the thread starts with its first task
    finally:
        threading.stack_size(former_size)
    return executor


def _read_tokenizer(path: Path, vocab_size: int, eos: tuple[int, ...]) -> llguidance.LLTokenizer:
    """Read the model's tokenizer, which takes some tenths of a second. Raises EngineFailed."""
    try:
        return llguidance.LLTokenizer(
            path.read_text("utf-8"), n_vocab=vocab_size, eos_token=list(eos)
        )
    except (OSError, ValueError) as error:
        raise errors.EngineFailed(
            f"answers cannot be guided: the tokenizer at {path} is of a kind that llguidance does not read: {error}"
        ) from error


def _refusal(guided: generate.GuidedDecoding, reason: str) -> errors.InvalidRequest:
    reason = " ".join(reason.split())
    if len(reason) > _MAX_REASON_CHARS:
        reason = reason[:_MAX_REASON_CHARS] + "…"
    return errors.InvalidRequest(
        f"{guided.param}: this grammar cannot be followed: {reason}", param=guided.param
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

    White space is a blank, or a line break and an indentation: without a limit, a small model that is held to JSON
    tends to write nothing else.
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
