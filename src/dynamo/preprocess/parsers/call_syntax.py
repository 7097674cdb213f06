"""The syntax of tool calls.

Each way of writing a call has a function that parses its text; it returns None for text that is no call. Arguments are
passed on as the model wrote them wherever they are JSON already.
"""  # decider

import ast
import contextlib
import json
import keyword
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from dynamo.preprocess.parsers import parser

T = TypeVar("T")
ParsedCalls = list[parser.ToolCall] | None
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_KEY = re.compile(r'\s*[{,]\s*("(?:[^"\\]|\\.)*")\s*:\s*', re.DOTALL)
_find_end = json.JSONDecoder(parse_int=str, parse_float=str).raw_decode
_ERRORS = (ValueError, RecursionError)  # msgspec's and json's errors are ValueErrors
Members = list[tuple[str, str]]  # of an object: each key with the text of its value


def parse_json_calls(text: str, tools: parser.ToolSchemas) -> ParsedCalls:
    """Parse `{"name": ..., "arguments": {...}}`, or a list of such objects."""
    del tools
    try:
        return _all_or_none([_read_call(members) for members in _read_objects(text)])
    except _ERRORS:
        return None


def _read_call(members: Members) -> parser.ToolCall | None:
    """Return the call of an object; models use either of two names for its tool and for its arguments.

    Of arguments that stand twice the first object behind the name counts, which a stream has shown (`JsonPreview`).
    With an object of another name in their place it is no call, for they would be lost.
    """
    values: dict[str, str] = {}
    for key, value in members:
        name = values.get("name") or values.get("tool_name") or ""
        is_arguments = key in ("arguments", "parameters")
        if is_arguments and name and value.startswith("{"):
            return parse_call(name, value)
        if key in ("name", "tool_name"):
            value = _decode_text(value)
        values[key] = values.get(key, value) if key == "tool_name" else value
    arguments = values.get("arguments") or values.get("parameters") or ""
    if not arguments and any(value.startswith("{") for value in values.values()):
        return None
    return parse_call(values.get("name") or values.get("tool_name") or "", arguments)


def parse_calls_by_key(text: str, tools: parser.ToolSchemas) -> ParsedCalls:
    """Parse `[{"f": {...}}, {"g": {...}}]`: the name of the tool is the key of its arguments."""
    del tools
    try:
        objects = _read_objects(text) if text.lstrip().startswith("[") else []
    except _ERRORS:
        return None
    return _all_or_none([parse_call(*member) for members in objects for member in members])


def _read_objects(text: str) -> list[Members]:
    """Return the members of an object, or of each in a list; a key that comes twice does so. Raises ValueError."""
    text = _strict(text)
    if not text.lstrip().startswith("["):
        return [_read_members(text)]
    return [_read_members(bytes(item).decode()) for item in _decode_items(text)]


def _read_members(text: str) -> Members:
    _decode_members(text)  # which checks it
    members, at = [], 0
    while key := _KEY.match(text, at):
        _, at = _find_end(text, key.end())
        members.append((_decode_text(key[1]), text[key.end() : at]))
    return members


def _strict(text: str) -> str:
    """Return the same JSON with escaped line breaks; a model may write them into strings as they are."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        json.loads(text, strict=False)
        return _QUOTED.sub(lambda match: escape_controls(match[0]), text)
    return text


_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def escape_controls(text: str) -> str:
    """Return a part of a JSON string with its control characters escaped."""
    return _CONTROL.sub(lambda match: dump(match[0])[1:-1], text)


class NamedCallReader:
    """Parses the name of a tool with marks, then its arguments as an object. `head`: a pattern that finds the name."""

    def __init__(self, head: str) -> None:
        self.head = re.compile(head, re.DOTALL)

    def __call__(self, text: str, tools: parser.ToolSchemas) -> ParsedCalls:
        head, brace, body = text.partition("{")
        if not head.strip() or head.lstrip().startswith("["):
            return parse_json_calls(text, tools)
        match = self.head.fullmatch(head.strip())
        return _all_or_none([parse_call(match["name"], brace + body)]) if match else None


def parse_call(name: str, arguments: str) -> parser.ToolCall | None:
    """Return a call with arguments that are an object, or an object inside a string; None if they are not."""
    try:
        if arguments.startswith('"'):
            arguments = msgspec.json.decode(arguments, type=str)
        arguments = _strict(arguments.strip() or "{}")
        arguments = "{}" if arguments == "null" else arguments
        _decode_object(arguments)
    except _ERRORS:
        return None
    return parser.ToolCall(name, arguments) if name else None


def _all_or_none(calls: list[parser.ToolCall | None]) -> ParsedCalls:
    valid = [call for call in calls if call is not None]
    return valid if valid and len(valid) == len(calls) else None


_NAME = re.compile(r"[\w.]+")


def parse_python_lines(text: str, tools: parser.ToolSchemas) -> ParsedCalls:
    """Parse the calls that stand in lines of their own before `</function_calls>`."""
    calls = _escape_line_ends(text.removesuffix("</function_calls>"))
    lines = [line for line in calls.split("\n") if line.strip()]
    return parse_python_calls(f"[{', '.join(lines)}]", tools)


def parse_python_calls(text: str, tools: parser.ToolSchemas) -> ParsedCalls:
    """Parse `[f(x=1), g(y="a")]`: a list of calls with literal arguments by name."""
    del tools
    return _read_python(text.strip(), _python_calls)


def read_literal(text: str) -> str | None:
    """Return a Python literal as JSON; None if it is none."""
    return _read_python(text, lambda node: dump(ast.literal_eval(node)))


def _read_python(text: str, read: Callable[[ast.expr], T | None]) -> T | None:
    """Return what `read` makes of an expression; None if neither it nor the respelled one can be read."""
    for respell in (str, _respell_python):
        with contextlib.suppress(*_ERRORS, SyntaxError, TypeError, MemoryError):
            return read(_parse_python(respell(text)))
    return None


def _parse_python(text: str) -> ast.expr:
    """Return the syntax of an expression, whose strings may have line breaks as a model may write them."""
    with warnings.catch_warnings(action="ignore"):  # a string may hold what is no valid escape
        try:
            return ast.parse(text, mode="eval").body
        except SyntaxError:
            return ast.parse(_escape_line_ends(text), mode="eval").body


# Possessive, and without a need for its end: of many quotes none is looked at twice.
_PYTHON_STRING = re.compile(r"""'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?""", re.DOTALL)


def _escape_line_ends(text: str) -> str:
    """Return the same Python with escaped line ends in its strings."""
    return _PYTHON_STRING.sub(
        lambda match: match[0].replace("\r", "\\r").replace("\n", "\\n"), text
    )


# Outside of strings: JSON's words, arguments with the name of a keyword, and the zeros before a number.
_NO_PYTHON = re.compile(
    rf"({_PYTHON_STRING.pattern})|(?<![\w.])(?:(?:true|false|null)(?![\w(]|\s*=)"
    rf"|(?:{'|'.join(keyword.kwlist)})(?=\s*=[^=])|0++(?=\d))",
    re.DOTALL,
)
_KEY_END = "__as_argument"
_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"} | {
    word: word + _KEY_END for word in keyword.kwlist
}


def _respell_python(text: str) -> str:
    """Return the same as valid Python, where a model has written what only resembles it."""
    return _NO_PYTHON.sub(lambda match: match[1] or _PYTHON_WORDS.get(match[0], ""), text)


def _python_calls(tree: ast.expr) -> ParsedCalls:
    calls = map(_python_call, tree.elts) if isinstance(tree, ast.List) else ()
    return [*calls] or None


def _python_call(node: ast.expr) -> parser.ToolCall:
    """Return the call of a syntax node. Raises ValueError if it is none, or has arguments without names."""
    if not isinstance(node, ast.Call) or node.args or None in [word.arg for word in node.keywords]:
        raise ValueError("no call by name")
    name = ast.unparse(node.func)
    if not _NAME.fullmatch(name):
        raise ValueError("no name of a tool")
    members = [
        f"{dump(str(word.arg).removesuffix(_KEY_END))}: {dump(ast.literal_eval(word.value))}"
        for word in node.keywords
    ]
    return parser.ToolCall(name, "{" + ", ".join(members) + "}")  # one that comes twice stays so


class TaggedCallReader:
    """Parses the name of a tool and its arguments between tags, up to the mark `end`.

    `head` is a pattern that finds the `name`, `opening` one that finds the `key` before each value, which ends at the
    mark `closing` if one of the marks `follows` or the end of the call stands behind it: a value may hold that mark,
    and `end`. With `is_closed` false a value also ends before the first of `follows`, or at the end. With `trims` a
    line break at either end of a value does not belong to it. A value is a text that the schema of the tool converts,
    unless `opening` finds an `is_text` of "true" or "false", or a `kind` as JSON schema names them; a text may stand
    between the marks of XML for unparsed text (CDATA). Instead of the arguments one JSON object may stand there, as the
    functions of Llama 3.1 have it.
    """

    def __init__(
        self,
        end: str,
        head: str,
        opening: str,
        closing: str,
        follows: Sequence[str],
        *,
        trims: bool,
        is_closed: bool = True,
    ) -> None:
        self.end = end
        self.head = re.compile(head)
        self.opening = re.compile(opening, re.DOTALL)
        self.closing = closing
        self.follows = (*follows, end)
        self.value_marks = (follows[0], closing) if is_closed else ()
        self.value_ends = (closing,) if is_closed else (closing, follows[0], end)
        self.trims = trims
        self._next = re.compile(r"\s*" + opening, re.DOTALL)
        value_end = rf"{re.escape(closing)}(?=\s*(?:{'|'.join(map(re.escape, follows))}|\Z))"
        if not is_closed:
            value_end += rf"|(?={re.escape(follows[0])})|\Z"
        self._value_end = re.compile(value_end)

    def __call__(self, text: str, tools: parser.ToolSchemas) -> ParsedCalls:
        body = text.removesuffix(self.end).strip()
        head = self.head.match(body)
        arguments = body[head.end() :] if head else ""
        if head is None:
            return None
        name = head["name"].strip()
        if arguments.startswith("{"):
            return _all_or_none([parse_call(name, arguments)])
        split = self._split(arguments)
        if split is None:
            return None
        types = self.types_of(name, tools)
        try:
            members = [
                f"{dump(opening['key'].strip())}: {dump(self._value_of(opening, value, types))}"
                for opening, value in split
            ]
        except RecursionError:  # a value could just be read
            return None
        return [parser.ToolCall(name, "{" + ", ".join(members) + "}")]

    def _split(self, arguments: str) -> list[tuple[re.Match[str], str]] | None:
        """Return the opening and the text of each argument; None if anything else stands there.

        One by one, because a model may repeat an opening thousands of times, and a pattern for all would try them all.
        """
        split, at = [], 0
        while opening := self._next.match(arguments, at):
            end = self._value_end.search(arguments, opening.end())
            if end is None:
                return None
            value, at = arguments[opening.end() : end.start()], end.end()
            split.append(
                (opening, value.removeprefix("\n").removesuffix("\n") if self.trims else value)
            )
        return None if arguments[at:].strip() else split

    def types_of(self, name: str, tools: parser.ToolSchemas) -> Mapping[str, Any]:
        schema = tools.get(name, {}).get("properties")
        return schema if isinstance(schema, dict) else {}

    def schema_of(self, argument: re.Match[str], types: Mapping[str, Any]) -> Any:
        """Return the schema of the argument that a match of `opening` begins."""
        groups = argument.groupdict()
        if (is_text := groups.get("is_text")) is not None:
            return {"type": "string" if is_text == "true" else "any"}
        if (kind := groups.get("kind")) is not None:
            return {"type": kind}
        return types.get(argument["key"].strip())

    def _value_of(self, argument: re.Match[str], value: str, types: Mapping[str, Any]) -> Any:
        if value.startswith(UNPARSED_TEXT):
            return value.removeprefix(UNPARSED_TEXT).removesuffix("]]>")
        return convert_text(value, self.schema_of(argument, types))


class NestedTagReader(TaggedCallReader):
    """Parses the name of a tool, and arguments in tags with the names of their keys, up to the mark `end`.

    Each tag stands behind the mark `lead`. A value is a text, which the schema converts; an object of which each member
    has a tag; or a list with a tag `item` for each. A member of an object that comes twice has a list, too.
    """

    def __init__(self, end: str, head: str, lead: str) -> None:
        opening = re.escape(lead) + r"<(?P<key>[^<>/\s]+)>"
        super().__init__(end, head, opening, f"{lead}</", (lead,), trims=False, is_closed=False)
        self.lead = lead
        self._tags = re.compile(re.escape(lead) + r"<(/?)([^<>/\s]+)>")

    def __call__(self, text: str, tools: parser.ToolSchemas) -> ParsedCalls:
        body = text.removesuffix(self.end).strip()
        head = self.head.match(body)
        if head is None:
            return None
        name = head["name"].strip()
        root = _Tag("", {"properties": self.types_of(name, tools)}, "")
        before, *parts = self._tags.split(body[head.end() :])
        try:
            _nest(root, zip(parts[::3], parts[1::3], parts[2::3], strict=True))
            members = [f"{dump(key)}: {dump(tag.read())}" for key, tag in root.members]
        except _ERRORS:
            return None
        if before.strip():
            return None
        return [parser.ToolCall(name, "{" + ", ".join(members) + "}")]


@dataclass(slots=True)
class _Tag:
    """The value between a tag and the one that closes it."""

    key: str
    schema: Any
    text: str
    members: list[tuple[str, "_Tag"]] = field(default_factory=list)

    def read(self) -> Any:
        """Return the value. Raises ValueError if text stands between members."""
        if not self.members:
            return self._read_text()
        if self.text.strip():
            raise ValueError("text between tags")
        members = [(key, tag.read()) for key, tag in self.members]
        if all(key == "item" for key, _ in members):
            return [value for _, value in members]
        values: dict[str, list[Any]] = {}
        for key, value in members:
            values.setdefault(key, []).append(value)
        return {key: each if len(each) > 1 else each[0] for key, each in values.items()}

    def _read_text(self) -> Any:
        if not self.text.strip() and not is_text(self.schema):
            for kind, empty in (("array", []), ("object", {})):
                if _has_type(self.schema, kind):
                    return empty
        return convert_text(self.text, self.schema)

    def schema_of(self, key: str) -> Any:
        """Return the schema of the value of a tag within this one."""
        schema = self.schema if isinstance(self.schema, dict) else {}
        options = schema.get("anyOf", schema.get("oneOf"))
        for each in (schema, *(options if isinstance(options, list) else ())):
            properties = each.get("properties") if isinstance(each, dict) else None
            if isinstance(properties, dict) and key in properties:
                return properties[key]
            if key == "item" and isinstance(each, dict) and "items" in each:
                return each["items"]
        return None


def _nest(root: _Tag, tags: Iterable[tuple[str, str, str]]) -> None:
    """Put each tag into the one that is open: a slash if it closes that, its key, and the text behind it."""
    open_tags = [root]
    for slash, key, text in tags:
        tag = open_tags[-1]
        if not slash:
            open_tags.append(_Tag(key, tag.schema_of(key), text))
            tag.members.append((key, open_tags[-1]))
        elif tag.key != key or text.strip():
            raise ValueError("no tag that this one closes")
        else:
            open_tags.pop()
    if len(open_tags) > 1:
        raise ValueError("an open tag")


UNPARSED_TEXT = "<![CDATA["
NULLS = ("null", "None")
_MAX_SCHEMAS = 16  # within each other
_TYPE_NAMES: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object",
}  # fmt: skip


def is_text(schema: Any) -> bool:
    """Return whether a value of the schema may be a text, or the schema does not say what it is."""
    return not isinstance(schema, dict) or _has_type(schema, "string")


def may_be_null(schema: Any) -> bool:
    """Return whether the schema says that a value may be null, as that of an optional argument does."""
    return isinstance(schema, dict) and _has_type(schema, "null")


def _has_type(schema: Mapping[str, Any], name: str) -> bool:
    return name in (_types_of(schema) or ("string",))


def _types_of(schema: Any, most_schemas: int = _MAX_SCHEMAS) -> set[str]:
    """Return the types that a value of the schema may have; `any`: a reference says which; none: it says nothing."""
    if not isinstance(schema, dict) or not most_schemas:
        return set()
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {each for each in types if isinstance(each, str)}
    if "$ref" in schema:
        return {"any"}
    for key, default in (("anyOf", {"string"}), ("oneOf", {"string"}), ("allOf", set())):
        if isinstance(schema.get(key), list):
            parts = (_types_of(each, most_schemas - 1) or default for each in schema[key])
            return set().union(*parts)
    values = schema.get("enum", [schema["const"]] if "const" in schema else ())
    return {_TYPE_NAMES[type(each)] for each in values} if isinstance(values, list) else set()


def convert_text(text: str, schema: Any) -> Any:
    """Return the value of a text; the text itself where the schema says so or says nothing, or it is no JSON.

    Some templates write lists and objects as Python does, and so do their models. Where the schema allows a text and
    null, the word is null.
    """
    if is_text(schema):
        return None if text in NULLS and may_be_null(schema) else text
    spelled = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        return msgspec.json.decode(spelled)
    except _ERRORS:
        is_nested = text.lstrip().startswith(("[", "{"))
        literal = read_literal(text.strip()) if is_nested else None
        return text if literal is None else msgspec.json.decode(literal)


class BareKeyReader:
    """Parses `call:name{key:<q>text<q>,other:[1,true]}`: JSON with bare keys, and strings between a mark `quote`."""

    def __init__(self, end: str, quote: str) -> None:
        self._end = end
        self._quote = quote

    def __call__(self, text: str, tools: parser.ToolSchemas) -> ParsedCalls:
        del tools
        head, brace, body = text.removesuffix(self._end).strip().partition("{")
        name = _BARE_NAME.fullmatch(head.strip())
        if name is None or not brace:
            return None
        parts = (brace + body).split(self._quote)  # outside, string, outside, string, outside
        parts[::2] = [quote_keys(part) for part in parts[::2]]
        parts[1::2] = [dump(part) for part in parts[1::2]]
        return _all_or_none([parse_call(name["name"], "".join(parts))])


_BARE_NAME = re.compile(r"call:(?P<name>[\w.-]+)")
_WORD = r'[^\s"{}[\],:\\]++'  # of a key
_BARE_KEY = re.compile(rf'("(?:[^"\\]|\\.)*")|([{{,]\s*+)({_WORD}(?:\s++{_WORD})*+)\s*+:\s*', re.S)


def quote_keys(text: str) -> str:
    """Return JSON without the strings between marks, with the bare keys quoted; strings of JSON stay as they are."""
    return _BARE_KEY.sub(lambda match: match[1] or f'{match[2]}"{match[3]}": ', text)


def dump(value: Any) -> str:
    """Encode a value as JSON. Raises ValueError for values that JSON cannot hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # which half a surrogate pair has not
    return text
