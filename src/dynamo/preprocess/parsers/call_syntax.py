"""How far a call reaches, found as its text comes.

A call that is JSON ends with its last bracket, wherever a mark may stand in its strings; so brackets are counted, and
a character that cannot stand there breaks it off at once instead of swallowing the answer. Other calls end at a mark.
"""

import ast
import enum
import json
import re
import warnings
from typing import Any, NamedTuple, Protocol

import msgspec

from dynamo.preprocess.parsers import parser

MAX_CALL_CHARS = 2**18
MAX_HEAD_CHARS = 256
_MAX_DEPTH = 200
_CLOSER = {"{": "}", "[": "]", "(": ")"}
_JSON_CHARS = frozenset("{}[]:,+-.0123456789eE" + "true" + "false" + "null" + ' \t\r\n"')


class CallState(enum.Enum):
    """What is known of a call."""

    OPEN = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


class CallExtent(NamedTuple):
    """How much of the text belongs to the call, and whether that was all."""

    num_chars: int
    state: CallState


class CallScanner(Protocol):
    """Measures one call."""

    def push(self, text: str) -> CallExtent:
        """More text; not asked again after the call has ended."""
        ...


class BracketScanner:
    """A value in brackets.

    `has_head`: a text such as the tool's name may stand before the opening `{`.
    """

    def __init__(
        self,
        *,
        quotes: str = '"',
        allowed: frozenset[str] | None = _JSON_CHARS,
        has_head: bool = False,
    ) -> None:
        self._quotes = quotes
        self._allowed = allowed
        self._has_head = has_head
        self._num_head = 0  # characters before the value, white space at the beginning not counted
        self._num_chars = 0
        self._closers: list[str] = []
        self._quote = ""
        self._is_escaped = False

    def push(self, text: str) -> CallExtent:
        for at, char in enumerate(text):
            state = self._take(char)
            if state is not CallState.OPEN:
                return CallExtent(at + (state is CallState.DONE), state)
        return CallExtent(len(text), CallState.OPEN)

    def _take(self, char: str) -> CallState:
        self._num_chars += 1
        if self._num_chars > MAX_CALL_CHARS:
            return CallState.BROKEN
        if not self._closers:
            return self._take_before(char)
        if self._quote:
            return self._take_quoted(char)
        return self._take_bare(char)

    def _take_before(self, char: str) -> CallState:
        if char == "{" or (char == "[" and not self._num_head):
            self._closers.append(_CLOSER[char])
            return CallState.OPEN
        if char.isspace() and not self._num_head:
            return CallState.OPEN
        self._num_head += 1
        is_head = self._has_head and self._num_head <= MAX_HEAD_CHARS
        return CallState.OPEN if is_head else CallState.BROKEN

    def _take_quoted(self, char: str) -> CallState:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == self._quote:
            self._quote = ""
        return CallState.OPEN

    def _take_bare(self, char: str) -> CallState:
        if char in self._quotes:
            self._quote = char
        elif char in _CLOSER:
            self._closers.append(_CLOSER[char])
        elif char in ")]}":
            if self._closers.pop() != char:
                return CallState.BROKEN
            return CallState.OPEN if self._closers else CallState.DONE
        if self._allowed is not None and char not in self._allowed:
            return CallState.BROKEN
        return CallState.OPEN if len(self._closers) <= _MAX_DEPTH else CallState.BROKEN


class MarkerScanner:
    """Everything up to a mark, the mark included."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._tail = ""
        self._num_chars = 0

    def push(self, text: str) -> CallExtent:
        window = self._tail + text
        at = window.find(self._mark)
        num_used = at + len(self._mark) - len(self._tail) if at >= 0 else len(text)
        left = MAX_CALL_CHARS - self._num_chars
        if num_used > left:
            return CallExtent(left, CallState.BROKEN)
        self._num_chars += num_used
        self._tail = window[-(len(self._mark) - 1) :]
        return CallExtent(num_used, CallState.DONE if at >= 0 else CallState.OPEN)


ParsedCalls = list[parser.ToolCall] | None


class _Call(msgspec.Struct, frozen=True):
    """A call as an object; models name its arguments either way."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_decode_calls = msgspec.json.Decoder(_Call | list[_Call]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_ERRORS = (ValueError, RecursionError)  # msgspec's and json's errors are ValueErrors


def parse_json_calls(text: str, tools: parser.ToolSchemas) -> ParsedCalls:
    """`{"name": ..., "arguments": {...}}`, or a list of such."""
    del tools
    try:
        decoded = _decode_calls(_strict(text))
    except _ERRORS:
        return None
    found = decoded if isinstance(decoded, list) else [decoded]
    calls = [parse_call(one.name, bytes(one.arguments or one.parameters).decode()) for one in found]
    return _all(calls)


def _strict(text: str) -> str:
    """The same JSON; a model may write line breaks into strings as they are."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return json.dumps(json.loads(text, strict=False), ensure_ascii=False)
    return text


class NamedCallReader:
    """The tool's name and marks, then its arguments as an object: `head` finds the name in what stands before."""

    def __init__(self, head: str) -> None:
        self._head = re.compile(head, re.DOTALL)

    def __call__(self, text: str, tools: parser.ToolSchemas) -> ParsedCalls:
        head, brace, rest = text.partition("{")
        if not head.strip() or head.lstrip().startswith("["):
            return parse_json_calls(text, tools)
        match = self._head.fullmatch(head.strip())
        return _all([parse_call(match["name"], brace + rest)]) if match else None


def parse_call(name: str, arguments: str) -> parser.ToolCall | None:
    """With arguments that are an object, or an object written into a string."""
    try:
        if arguments.startswith('"'):
            arguments = msgspec.json.decode(arguments, type=str)
        arguments = _strict(arguments.strip() or "{}")
        arguments = "{}" if arguments == "null" else arguments
        _decode_object(arguments)
    except _ERRORS:
        return None
    return parser.ToolCall(name, arguments) if name else None


def _all(calls: list[parser.ToolCall | None]) -> ParsedCalls:
    found = [parse_call for parse_call in calls if parse_call is not None]
    return found if found and len(found) == len(calls) else None


_NAME = re.compile(r"[\w.]+")


def parse_python_calls(text: str, tools: parser.ToolSchemas) -> ParsedCalls:
    """`[f(x=1), g(y="a")]`: a list of calls with literal arguments by name."""
    del tools
    try:
        with warnings.catch_warnings(action="ignore"):  # a string may hold what is no valid escape
            tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        return [_python_call(node) for node in tree.elts] or None
    except (*_ERRORS, SyntaxError, TypeError, MemoryError):
        return None


def _python_call(node: ast.expr) -> parser.ToolCall:
    """Raises ValueError."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call by name")
    name = ast.unparse(node.func)
    if not _NAME.fullmatch(name):
        raise ValueError("no name of a tool")
    arguments = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
    if None in arguments:
        raise ValueError("no name for an argument")
    return parser.ToolCall(name, _dump(arguments))


_FUNCTION_END = "</function>"
_PARAMETER = re.compile(
    r"<parameter=(?P<name>[^<>]+)>\n?(?P<value>.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)",
    re.DOTALL,
)


def parse_tagged_calls(text: str, tools: parser.ToolSchemas) -> ParsedCalls:
    """`name><parameter=x>1</parameter></function>`: values are texts, read by the schema of the tool."""
    name, _, rest = text.removesuffix(_FUNCTION_END).partition(">")
    name = name.strip()
    if not name or "<" in name or _PARAMETER.sub("", rest).strip():
        return None
    schema = tools.get(name, {}).get("properties")
    types = schema if isinstance(schema, dict) else {}
    arguments = {
        one["name"].strip(): _typed(one["value"], types.get(one["name"].strip()))
        for one in _PARAMETER.finditer(rest)
    }
    return [parser.ToolCall(name, _dump(arguments))]


def _typed(text: str, schema: Any) -> Any:
    """The value that is meant; a text where the schema says so, or says nothing, or the value is no JSON."""
    kind = schema.get("type", "string") if isinstance(schema, dict) else "string"
    if kind == "string":
        return text
    spelled = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        return msgspec.json.decode(spelled)
    except _ERRORS:
        return text


def _dump(value: Any) -> str:
    """Raises ValueError for what JSON cannot hold."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
