"""Previews of tool calls: the arguments of a call while the model writes them, for clients that receive a stream.

A preview reads the text of a call in pieces cut anywhere, and returns the name as soon as it is certain, and then the
arguments as the parser of the whole text (`call_syntax`) will return them: what a preview returned is always the
beginning of that. The parser has the last word, and adds what is missing at the end. So a preview may stop wherever a
text is unusual, and does not have to check what it reads.

A preview is made of steps like a parser (`parser.StateMachineParser`): a step consumes some text or changes the state.
"""  # decider

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo.preprocess import stop_strings
from dynamo.preprocess.parsers import call_syntax, parser

_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"\s*', re.DOTALL)
_SCALAR = re.compile(r"[^,\]}]*(?=[,\]}])")
_BETWEEN = re.compile(r"[\s,\[]*")
_BRACKET_PART = re.compile(r'[^"{}\[\]]+|["{}\[\]]')
_QUOTED_PART = re.compile(r'[^"\\]+|\\.|"', re.DOTALL)
_PYTHON_PART = re.compile(r"[^'\"()\[\]{},]+|.", re.DOTALL)
_PYTHON_STRINGS = {quote: re.compile(rf"[^\\{quote}]+|\\.|{quote}", re.DOTALL) for quote in "'\""}
_PYTHON_CALL = re.compile(r"([A-Za-z_][\w.]*)\(", re.ASCII)
_PYTHON_KEY = re.compile(r"([A-Za-z_]\w*)\s*=\s*(?=[^\s=])", re.ASCII)
_BARE_HEAD = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_BARE_TAIL = re.compile(r'[{,][^"{}\[\],:]*(?::\s*)?\Z|\s+\Z')

_MAX_HELD = 1024  # characters that wait for more; each piece looks at them again

Step = Callable[[Any], bool]


class CallPreview:
    """The preview of the calls in one text."""

    def __init__(self, first: Step | None) -> None:
        self._step = first  # None: nothing more is returned
        self._text = ""
        self._held = ""  # blanks that the end of a value may drop
        self._events: list[parser.CallBegin | parser.CallArguments] = []

    def push(self, text: str) -> Sequence[parser.CallBegin | parser.CallArguments]:
        """Add text of the call; return what is certain now."""
        self._text += text
        try:
            while self._text and self._step is not None and self._step(self):
                pass
        except (ValueError, RecursionError):  # no name or value that JSON can hold
            self._step = None
        if len(self._text) + len(self._held) > _MAX_HELD:
            self._step = None
        events, self._events = self._events, []
        return events

    def _begin(self, name: str) -> None:
        self._events.append(parser.CallBegin(name))

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(parser.CallArguments(text))

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Consume what the pattern matches at the beginning of the text."""
        match = pattern.match(self._text)
        if match is not None:
            self._text = self._text[match.end() :]
        return match


class JsonPreview(CallPreview):
    """Previews `{"name": ..., "arguments": {...}}` or a list of them; with `is_by_key` `[{"f": {...}}]`."""

    def __init__(self, *, is_by_key: bool = False) -> None:
        super().__init__(JsonPreview._read_key)
        self._is_by_key = is_by_key
        self._key = ""
        self._name = ""
        self._depth = 0
        self._is_quoted = False
        self._is_shown = False  # a call of this object
        self._shows = False  # the nested value, which is arguments
        self._after: Step | None = JsonPreview._read_key  # the nested value

    def _read_key(self) -> bool:
        self._take(_BETWEEN)
        if self._text[:1] in ("{", "}"):
            if self._text[0] == "}" and not self._is_shown:  # a call that was not returned
                self._step = None
            self._text, self._name, self._is_shown = self._text[1:], "", False
            return True
        key = _STRING.match(self._text)
        if key is None or not self._text[key.end() :].startswith(":"):
            return False
        self._key, self._text = msgspec.json.decode(key[0], type=str), self._text[key.end() + 1 :]
        self._step = JsonPreview._read_value
        return True

    def _read_value(self) -> bool:
        self._text = self._text.lstrip()
        is_arguments = self._is_by_key or self._key in ("arguments", "parameters")
        if self._text[:1] in ("{", "["):
            name = self._key if self._is_by_key else self._name
            self._step = JsonPreview._read_nested
            self._shows = is_arguments and bool(name) and self._text[0] == "{"
            if self._shows and self._is_shown and not self._is_by_key:  # arguments twice
                self._step = None
            elif self._shows:
                self._begin(name)
                self._is_shown = True
            return True
        value = self._take(_STRING if self._text[:1] == '"' else _SCALAR)
        if value is None:
            return False
        is_name = self._key == "name" or (self._key == "tool_name" and not self._name)
        if is_name and value[0].startswith('"'):
            self._name = msgspec.json.decode(value[0], type=str)
        self._step = JsonPreview._read_key
        return True

    def _read_nested(self) -> bool:
        """Read an object or a list up to its last bracket, and show it if it is arguments."""
        part = self._take(_QUOTED_PART if self._is_quoted else _BRACKET_PART)
        if part is None:
            return False
        if part[0] == '"':
            self._is_quoted = not self._is_quoted
        elif not self._is_quoted:
            self._depth += (part[0] in "{[") - (part[0] in "}]")
        if self._shows:
            self._emit(call_syntax.escape_controls(part[0]) if self._is_quoted else part[0])
        if not self._depth:
            self._step = self._after
        return True


class NamedPreview(JsonPreview):
    """Previews the name of a tool with marks, then its arguments as an object; `head` finds the name."""

    def __init__(self, head: re.Pattern[str]) -> None:
        super().__init__()
        self._step = NamedPreview._read_head
        self._head = head

    def _read_head(self) -> bool:
        head, brace, _ = self._text.partition("{")
        if not brace and not head.lstrip().startswith("["):
            return False
        match = self._head.fullmatch(head.strip())
        if not head.strip() or head.lstrip().startswith("["):
            self._step = JsonPreview._read_key
        elif match is None:
            self._step = None
        else:
            self._begin(match["name"])
            self._text, self._shows = self._text[len(head) :], True
            self._step = JsonPreview._read_nested
        return True


class JsonBodyPreview(JsonPreview):
    """Previews arguments of a tool that is known already."""

    def __init__(self, name: str) -> None:
        super().__init__(is_by_key=True)
        self._key = name
        self._step = JsonPreview._read_value
        self._after = None  # another object would be no call of another tool


class TaggedPreview(CallPreview):
    """Previews arguments between tags: texts as they come, other values when they are complete."""

    def __init__(self, reader: call_syntax.TaggedCallReader, tools: parser.ToolSchemas) -> None:
        super().__init__(TaggedPreview._read_head)
        self._reader = reader
        self._tools = tools
        self._types: Any = {}
        self._schema: Any = None
        self._is_text = False  # the value is a text, which is returned as it comes
        self._num_arguments = 0
        self._closers = stop_strings.cached_markers(*reader.value_ends)
        self._value: list[str] = []  # that is no text

    def _read_head(self) -> bool:
        self._text = self._text.lstrip()
        head = self._reader.head.match(self._text)
        if head is None or head.end() == len(self._text):
            return False
        name = head["name"].strip()
        self._types = self._reader.types_of(name, self._tools)
        self._begin(name)
        self._text = self._text[head.end() :]
        self._step = TaggedPreview._read_key
        return True

    def _read_key(self) -> bool:
        self._text = self._text.lstrip()
        opening = self._take(self._reader.opening)
        if opening is None:
            return False
        key = opening["key"].strip()
        self._schema = self._reader.schema_of(opening, self._types)
        self._emit((", " if self._num_arguments else "{") + call_syntax.dump(key) + ": ")
        self._num_arguments += 1
        self._value, self._held = [], ""
        self._step = type(self)._read_start
        return True

    def _read_start(self) -> bool:
        text = self._text.removeprefix("\n") if self._reader.trims else self._text
        if text.startswith(call_syntax.UNPARSED_TEXT):  # its end is part of no value
            self._step = None
            return False
        nulls = call_syntax.NULLS if call_syntax.may_be_null(self._schema) else ()
        if any(word.startswith(text) for word in (call_syntax.UNPARSED_TEXT, *nulls)):
            return False
        self._is_text = call_syntax.is_text(self._schema) and not text.startswith(nulls)
        self._emit('"' if self._is_text else "")
        self._text = text
        self._step = type(self)._read_value
        return True

    def _read_value(self) -> bool:
        text, mark, following = self._closers.partition(self._text)
        text, self._text = self._held + text, mark + following
        num_certain = len(text.rstrip()) if self._reader.trims else len(text)
        self._held = text[num_certain:]
        behind = following.lstrip()
        is_inside = mark == self._reader.closing and not behind.startswith(self._reader.follows)
        if not mark or is_inside:
            self._add(text[:num_certain])
            if is_inside and not any(each.startswith(behind) for each in self._reader.follows):
                self._held, self._text = self._held + mark, following
                return True
            return False
        is_over = mark == self._reader.end
        if is_over:
            self._held = ""
        self._add(text[:num_certain] + self._held.removesuffix("\n" * self._reader.trims))
        self._end_value()
        if is_over:
            self._step = None
        if mark == self._reader.closing:
            self._text = following
        return True

    def _end_value(self) -> None:
        if self._is_text:
            self._emit('"')
        else:
            value = call_syntax.convert_text("".join(self._value), self._schema)
            self._emit(call_syntax.dump(value))
        self._step = TaggedPreview._read_key

    def _add(self, text: str) -> None:
        if self._is_text:
            self._emit(call_syntax.dump(text)[1:-1])
        else:
            self._value.append(text)


class NestedTagPreview(TaggedPreview):
    """Previews arguments in tags: texts as they come, other values when they are complete; no nested ones."""

    def __init__(self, reader: call_syntax.NestedTagReader, tools: parser.ToolSchemas) -> None:
        super().__init__(reader, tools)
        self._lead = stop_strings.cached_markers(reader.lead)
        self._tag_end = re.compile(re.escape(reader.lead) + "</[^<>]*>")

    def _read_start(self) -> bool:
        text = self._text.lstrip()
        if self._lead.begins(text):
            return False
        if self._lead.leading(text):  # an empty value, or tags
            self._step = None
            return False
        return super()._read_start()

    def _read_value(self) -> bool:
        text, mark, following = self._lead.partition(self._text)
        self._text = mark + following
        self._add(text)
        if self._take(self._tag_end) is None:
            return False
        self._end_value()
        return True


class PythonPreview(CallPreview):
    """Previews `f(x=1, y="a")`, any number of them: plain strings as they come, other values when they are complete."""

    def __init__(self) -> None:
        super().__init__(PythonPreview._read_name)
        self._num_arguments = 0
        self._value: list[str] = []
        self._shown = ""  # of the value's JSON
        self._depth = 0
        self._quote = ""  # of the string that is open
        self._is_plain = True  # the value is strings that have no rare escapes

    def _read_name(self) -> bool:
        self._take(_BETWEEN)
        name = self._take(_PYTHON_CALL)
        if name is None:
            return False
        self._begin(name[1])
        self._num_arguments = 0
        self._step = PythonPreview._read_key
        return True

    def _read_key(self) -> bool:
        self._take(_BETWEEN)
        if self._text.startswith(")"):
            self._emit("}" if self._num_arguments else "{}")
            self._text = self._text[1:]
            self._step = PythonPreview._read_name
            return True
        key = self._take(_PYTHON_KEY)
        if key is None:
            return False
        self._emit((", " if self._num_arguments else "{") + call_syntax.dump(key[1]) + ": ")
        self._num_arguments += 1
        self._value, self._shown, self._is_plain = [], "", True
        self._step = PythonPreview._read_value
        return True

    def _read_value(self) -> bool:
        part = self._take(_PYTHON_STRINGS[self._quote] if self._quote else _PYTHON_PART)
        if part is None:
            return False
        if not (self._quote or self._depth) and part[0] in (",", ")"):
            self._text = part[0] + self._text
            self._end_value()
            return True
        self._value.append(part[0])
        if self._quote:
            self._read_quoted(part[0])
        elif part[0] in ("'", '"'):
            self._quote = part[0]
            self._show("" if self._shown else '"')
        else:
            self._is_plain = self._is_plain and part[0].isspace()
            self._depth += (part[0] in "([{") - (part[0] in ")]}")
        return True

    def _read_quoted(self, part: str) -> None:
        if part == self._quote:
            self._quote = ""
        elif part[0] == "\\":
            self._is_plain = self._is_plain and part[1] in _ESCAPED
            self._show(call_syntax.dump(_ESCAPED.get(part[1], ""))[1:-1])
        else:
            self._is_plain = self._is_plain and "\r" not in part
            self._show(call_syntax.dump(part)[1:-1])

    def _show(self, text: str) -> None:
        if self._is_plain:
            self._shown += text
            self._emit(text)

    def _end_value(self) -> None:
        complete = call_syntax.read_literal("".join(self._value).strip())
        if complete is None or not complete.startswith(self._shown):
            self._step = None
            return
        self._emit(complete[len(self._shown) :])
        self._step = PythonPreview._read_key


class BareKeyPreview(CallPreview):
    """Previews `call:name{key:<q>text<q>,other:[1,true]}`: JSON with bare keys, and strings between a mark `quote`."""

    def __init__(self, end: str, quote: str) -> None:
        super().__init__(BareKeyPreview._read_head)
        self._marks = stop_strings.cached_markers(end, quote)
        self._quote = quote
        self._is_quoted = False

    def _read_head(self) -> bool:
        head = self._take(_BARE_HEAD)
        if head is None:
            return False
        self._begin(head[1])
        self._step = BareKeyPreview._read_body
        return True

    def _read_body(self) -> bool:
        text, mark, following = self._marks.partition(self._text)
        plain_at = -1 if self._is_quoted else text.find('"')
        if plain_at >= 0:  # a string of JSON, in which a model may write a line break as it is
            self._emit(call_syntax.quote_keys(text[:plain_at]))
            self._step = None
            return False
        tail = None if mark or self._is_quoted else _BARE_TAIL.search(text)
        text = text[: tail.start()] if tail else text
        self._text = self._text[len(text) :]
        if self._is_quoted:
            self._emit(call_syntax.dump(text)[1:-1])
        else:
            is_last = mark not in ("", self._quote)
            self._emit(call_syntax.quote_keys(text.rstrip() if is_last else text))
        if mark == self._quote:
            self._emit('"')
            self._is_quoted = not self._is_quoted
            self._text = following
            return True
        if mark:
            self._step = None
        return False
