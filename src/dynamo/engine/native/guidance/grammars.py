"""Grammars that answers follow: made, kept, and asked what may come next.

A grammar is made once per text, in a thread of its own (`Grammars`), and kept for the next request that asks the same;
each sequence then follows a copy (`Guide`). llguidance was chosen because it refuses what it cannot promise, and needs
neither torch nor a table of all states (docs/decisions/0006). It works without Python's lock, so that neither the event
loop nor the engine's thread waits while a grammar is made; the limits bound what a hostile one costs.
"""

import ctypes
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path

import llguidance

from dynamo.base import errors
from dynamo.engine.native.guidance import compose
from dynamo.protocols import generate

MAX_CHARS = 2**17  # of a schema, regex, grammar or all choices together
MAX_GRAMMAR_CHARS = 2**13  # of one in Lark or GBNF, and
MAX_RULES = 1000  # of it, and
MAX_REFERENCES = (
    500  # of a schema: the library recurses along both, and a stack that is full ends the process
)
STACK_BYTES = 2**26  # so that these stay far from it
MAX_KEPT = 32  # grammars, the longest unused goes first
MAX_WAITING = 64  # requests whose grammar is to be made
BACKENDS = (None, "auto", "guidance", "llguidance")
MAX_STEP_S = 0.25  # of CPU time, to say what may come next; an honest grammar takes a hundredth of it at most


# Fuel is time: at worst some 2 s to make a grammar, and 10 ms for one step of it. A state takes 1 to 2 kB.
def _limits(max_items_in_row: int) -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        max_items_in_row=max_items_in_row,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,  # they would tell the log what the answer says
    )


_LIMITS = _limits(2000)  # a schema may have hundreds of properties
_TEXT_LIMITS = _limits(500)  # of Lark and GBNF, where many items are a grammar that is ambiguous
_SILENT = 0
_SHAPES = ("json", "regex", "choice", "grammar")
_MAX_REASON = 300  # characters of the library's complaint

Made = Callable[["Grammar | errors.DynamoError"], None]


class Guide:
    """Follows one sequence through its grammar. Only the engine's thread uses it."""

    def __init__(self, matcher: llguidance.LLMatcher, eos: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos = eos
        self.error: errors.DynamoError | None = None

    def fill(self, bits: memoryview, *, may_end: bool) -> None:
        """Set the bit of each token that may come next; none, and `error`, if that cannot be said.

        An end token is among them where the grammar allows it, unless it may not end yet and something else can come.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(bits))
        began_at = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(address, len(bits))
        is_slow = time.thread_time() - began_at > MAX_STEP_S
        if is_slow or self._matcher.is_error():  # then the library allows to end
            bits[:] = bytes(len(bits))
            self.error = errors.InvalidRequest(
                "the answer was broken off, because its grammar became too complex to follow"
            )
        elif not may_end and self._matcher.is_accepting():
            self._postpone(bits)

    def advance(self, token_id: int) -> None:
        """This token came."""
        if token_id not in self._eos:
            self._matcher.consume_token(token_id)

    def _postpone(self, bits: memoryview) -> None:
        """Take the end out, if anything else is left."""
        with_end = bytes(bits)
        for token_id in self._eos:
            bits[token_id >> 3] &= ~(1 << (token_id & 7))
        if not any(bits):
            bits[:] = with_end


class Grammar:
    """One that answers may follow."""

    def __init__(self, matcher: llguidance.LLMatcher, eos: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos = eos

    def begin(self) -> Guide:
        """For one answer."""
        return Guide(self._matcher.deep_copy(), self._eos)


class Grammars:
    """Makes grammars, one after the other, and keeps them."""

    def __init__(self, tokenizer_path: Path, vocab_size: int) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._eos: tuple[
            int, ...
        ] = ()  # that the tokenizer was made for: all requests say the same
        self._kept: OrderedDict[generate.GuidedDecoding, Grammar] = OrderedDict()
        self._thread = _deep_thread()
        self._places = threading.BoundedSemaphore(MAX_WAITING)

    @property
    def is_possible(self) -> bool:
        """Is there a tokenizer to make them with?"""
        return self._tokenizer_path.is_file()

    def make(self, guided: generate.GuidedDecoding, eos: tuple[int, ...], made: Made) -> None:
        """For answers that one of the tokens `eos` ends; calls `made` in the thread.

        Raises InvalidRequest for what is wrong at first sight, or Overloaded.
        """
        check(guided)
        if not self._places.acquire(blocking=False):
            raise errors.Overloaded(f"{MAX_WAITING} requests wait for their grammar; try later")
        self._thread.submit(self._make, guided, eos, made)

    def stop(self) -> None:
        """Make no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, guided: generate.GuidedDecoding, eos: tuple[int, ...], made: Made) -> None:
        result: Grammar | errors.DynamoError
        try:
            result = self.find(guided, eos)
        except errors.DynamoError as error:
            result = error
        except Exception as error:  # noqa: BLE001 - whoever waits for the grammar is told
            result = errors.EngineFailed(f"no grammar could be made: {error}")
        finally:
            self._places.release()
        made(result)

    def find(self, guided: generate.GuidedDecoding, eos: tuple[int, ...]) -> Grammar:
        """One that is kept, or a new one. Raises InvalidRequest, or EngineFailed if the tokenizer cannot be used."""
        if self._tokenizer is None or self._eos != eos:
            self._kept.clear()
            self._tokenizer = _read_tokenizer(self._tokenizer_path, self._vocab_size, eos)
            self._eos = eos
        grammar = self._kept.pop(guided, None) or self._new(guided, self._tokenizer)
        self._kept[guided] = grammar
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return grammar

    def _new(self, guided: generate.GuidedDecoding, tokenizer: llguidance.LLTokenizer) -> Grammar:
        try:
            text = compose.grammar(guided, tokenizer)
        except (ValueError, RecursionError) as error:
            raise _refusal(guided, str(error)) from error
        limits = _LIMITS if guided.grammar is None else _TEXT_LIMITS
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=_SILENT, limits=limits)
        if not matcher.is_error():
            began_at = time.thread_time()
            matcher.compute_bitmask()  # the longest one: what makes the first step slow is done here
            if time.thread_time() - began_at > MAX_STEP_S:
                raise _refusal(guided, "it is too ambiguous or too complex")
        if matcher.is_error():
            raise _refusal(guided, matcher.get_error())
        return Grammar(matcher, self._eos)


def check(guided: generate.GuidedDecoding) -> None:
    """Raises InvalidRequest for what needs no library to see that it cannot be followed."""
    given = [name for name in _SHAPES if getattr(guided, name)]
    if len(given) != 1 and not (guided.calls is not None and not given):
        raise errors.InvalidRequest(
            f"{guided.param}: expected one of {', '.join(_SHAPES)}, got {len(given)}",
            param=guided.param,
        )
    for what, found, limit in _sizes(guided):
        if found > limit:
            raise errors.InvalidRequest(
                f"{guided.param}: expected at most {limit} {what}, got {found}", param=guided.param
            )
    if guided.backend not in BACKENDS:
        raise errors.InvalidRequest(
            "guided_decoding_backend: expected auto or llguidance, which is what this engine has, "
            f"got {guided.backend!r}",
            param="guided_decoding_backend",
        )


def _sizes(guided: generate.GuidedDecoding) -> Iterator[tuple[str, int, int]]:
    """What there is of something, and how much of it may be."""
    tools = guided.calls.tools if guided.calls is not None else ()
    schemas = [guided.json or "", *(tool.parameters for tool in tools)]
    names = (tool.name for tool in tools)
    texts = [*schemas, *names, guided.regex or "", *(guided.choice or ())]
    yield "characters", sum(map(len, texts)), MAX_CHARS
    yield "references", max(schema.count("$ref") for schema in schemas), MAX_REFERENCES
    yield "characters", len(guided.grammar or ""), MAX_GRAMMAR_CHARS
    yield "rules", (guided.grammar or "").replace("::", ":").count(":"), MAX_RULES


def _deep_thread() -> futures.ThreadPoolExecutor:
    """One thread with room for deep recursion; a stack takes memory only as far as it is used."""
    usual = threading.stack_size(STACK_BYTES)
    try:
        executor = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        executor.submit(int).result()  # that is when it starts
    finally:
        threading.stack_size(usual)
    return executor


def _read_tokenizer(path: Path, vocab_size: int, eos: tuple[int, ...]) -> llguidance.LLTokenizer:
    """Takes some tenths of a second. Raises EngineFailed."""
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
    shown = reason if len(reason) <= _MAX_REASON else reason[:_MAX_REASON] + "…"
    return errors.InvalidRequest(
        f"{guided.param}: this grammar cannot be followed: {shown}", param=guided.param
    )
