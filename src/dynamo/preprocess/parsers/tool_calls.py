"""Tool calls in an answer: one state machine for every format.

    text ──opening mark──▶ call ──its last character──▶ between ──anything else──▶ text
     │                      ▲ │                          ▲  │
     ├──section mark────────┼─┼──────────────────────────┘  │ opening mark, or a call without one
     └──at the beginning────┘ └──cannot be a call──▶ text   └──▶ call

A format (`formats`) says which marks there are, how far a call reaches (`call_scanners`) and how to parse it
(`call_syntax`). Text that turns out to be no call is content, marks included. White space around calls is dropped, and
so is the beginning of a forced call that the token limit cut off.

For clients that receive a stream, calls come in parts (`call_previews`), and begin before it is certain that they can
be parsed. One that cannot ends without `CallEnd`, and its text is dropped, because most of it has been sent.
"""  # decider

import functools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from dynamo.preprocess import stop_strings
from dynamo.preprocess.parsers import call_previews, call_scanners, call_syntax, parser


def _preview_json(tools: parser.ToolSchemas) -> call_previews.CallPreview:
    del tools
    return call_previews.JsonPreview()


@dataclass(frozen=True, slots=True)
class CallFrame:
    """The text around calls of the form `{"name": ..., "arguments": ...}`."""

    begin: str
    between: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """How a family of models writes calls."""

    opens: tuple[str, ...] = ()  # directly before a call
    sections: tuple[str, ...] = ()  # before the first of several calls
    closes: tuple[str, ...] = ()  # may follow a call
    inner: tuple[str, ...] = ()  # marks within a call, which may be special tokens too
    ends_thought: tuple[str, ...] = ()  # begins a call, even within an open thought
    bare: str = ""  # first characters of a call without a mark, if no text stands before it
    follows: str = ""  # first characters of a call without a mark behind another call
    may_end_unmarked: bool = False  # its own syntax shows that it is complete
    make_scanner: Callable[[], call_scanners.CallScanner] = call_scanners.BracketScanner
    parse: Callable[[str, parser.ToolSchemas], call_syntax.ParsedCalls] = (
        call_syntax.parse_json_calls
    )
    preview: Callable[[parser.ToolSchemas], call_previews.CallPreview] = _preview_json
    frame: CallFrame | None = None  # around forced calls; None: as in `formats.JSON_ARRAY`
    is_harmony: bool = False  # has a parser of its own, for calls and reasoning

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all marks that must be visible in the text, special tokens or not."""
        return self.opens + self.sections + self.closes + self.inner


def named_format(
    head: str, *, opens: str, closes: tuple[str, ...], inner: tuple[str, ...], section: str = ""
) -> ToolCallFormat:
    """Return a format of calls with the name before the arguments; the pattern `head` finds it."""
    reader = call_syntax.NamedCallReader(head)
    return ToolCallFormat(
        sections=(section,) if section else (),
        opens=(opens,),
        closes=closes,
        inner=inner,
        make_scanner=lambda: call_scanners.BracketScanner(has_head=True),
        parse=reader,
        preview=lambda _: call_previews.NamedPreview(reader.head),
    )


def tagged_format(
    reader: call_syntax.TaggedCallReader, *, opens: str, section: str = "", closes: tuple[str, ...] = (),
    inner: tuple[str, ...] = (),
) -> ToolCallFormat:  # fmt: skip
    """Return a format of calls between tags; behind a section's mark a call is certain, even within a thought."""
    return ToolCallFormat(
        sections=(section,) if section else (),
        ends_thought=(f"{section}\n{opens}", f"{section}{opens}") if section else (),
        opens=(opens,),
        inner=inner,
        closes=closes,
        make_scanner=functools.partial(
            call_scanners.MarkerScanner, reader.end, *reader.value_marks
        ),
        parse=reader,
        preview=functools.partial(call_previews.TaggedPreview, reader),
    )


def bare_key_format(open_mark: str, end: str, quote: str) -> ToolCallFormat:
    """Return a format of calls with bare keys, whose strings stand between marks `quote`."""
    return ToolCallFormat(
        opens=(open_mark,),
        closes=(end,),
        inner=(quote,),
        ends_thought=(f"{open_mark}call:",),
        make_scanner=functools.partial(call_scanners.MarkerScanner, end),
        parse=call_syntax.BareKeyReader(end, quote),
        preview=lambda _: call_previews.BareKeyPreview(end, quote),
        may_end_unmarked=True,
    )


class ToolCallParser(parser.StateMachineParser):
    """Finds the tool calls in one answer."""

    def __init__(
        self,
        form: ToolCallFormat,
        tools: parser.ToolSchemas,
        *,
        is_forced: bool = False,
        whole_tools: Container[str] | None = None,
    ) -> None:
        """With `is_forced` a grammar holds the answer to calls: what ends within one is no content.

        Calls come in parts, except those of `whole_tools`; None: all come whole.
        """
        super().__init__(ToolCallParser._begin if form.bare else ToolCallParser._read_text)
        self._is_forced = is_forced
        self._form = form
        self._tools = tools
        self._starters = stop_strings.cached_markers(*form.opens, *form.sections)
        self._followers = stop_strings.cached_markers(*form.opens, *form.sections, *form.closes)
        self._blanks = parser.TrailingBlanks()  # content if no call follows
        self._lead = ""  # the text before a call, which is content if the call is none
        self._body: list[str] = []
        self._scanner = form.make_scanner()
        self._whole_tools = whole_tools
        self._preview: call_previews.CallPreview | None = None
        self._begun: list[tuple[str, list[str]]] = []  # calls of the body, with their arguments

    @property
    def is_reasoning(self) -> bool:
        return False

    @property
    def is_plain(self) -> bool:
        return False

    def _end(self) -> None:
        if self._is_forced:
            return
        if self._form.may_end_unmarked and self._step is ToolCallParser._read_call:
            calls = self._form.parse("".join(self._body), self._tools)
            if calls is not None:
                self._complete(calls)
                return
        if self._begun:
            self._blanks.take()
            return
        is_after_call = self._step is ToolCallParser._read_between and not self._lead
        tail = self._text.lstrip() if is_after_call else self._text
        self._emit(parser.Content, self._blanks.take() + self._lead + "".join(self._body) + tail)

    def _begin(self) -> bool:
        """Read the beginning of an answer, where a call may begin without a mark."""
        num_blanks = parser.count_leading_blanks(self._text)
        if num_blanks == len(self._text) <= parser.MAX_HELD_BLANKS:
            return False
        if self._is_bare(num_blanks, self._form.bare):
            self._enter(self._text[:num_blanks], self._text[num_blanks:])
        else:
            self._step = ToolCallParser._read_text
        return True

    def _is_bare(self, num_blanks: int, starts: str) -> bool:
        """Return whether a call without a mark, which has one of these first characters, begins after these blanks."""
        if num_blanks > parser.MAX_HELD_BLANKS:
            return False
        return self._text[num_blanks : num_blanks + 1] in tuple(starts)

    def _read_text(self) -> bool:
        text, mark, self._text = self._starters.partition(self._text)
        self._emit(parser.Content, self._blanks.push(text))
        if mark:
            self._follow(self._blanks.take() + mark, mark, self._text)
        return bool(mark)

    def _follow(self, lead: str, mark: str, following: str) -> None:
        """Continue after a mark: with a call, or with the text between calls."""
        if mark in self._form.opens:
            self._enter(lead, following)
        else:
            self._lead, self._text = lead, following
            self._step = ToolCallParser._read_between

    def _enter(self, lead: str, following: str) -> None:
        self._lead, self._text, self._body = lead, following, []
        self._scanner = self._form.make_scanner()
        self._preview = None if self._whole_tools is None else self._form.preview(self._tools)
        self._step = ToolCallParser._read_call

    def _read_call(self) -> bool:
        num_used, state = self._scanner.push(self._text)
        self._body.append(self._text[:num_used])
        if self._preview is not None:
            self._show(self._preview.push(self._text[:num_used]))
        self._text = self._text[num_used:]
        if state is call_scanners.CallState.OPEN:
            return False
        body = "".join(self._body)
        calls = (
            self._form.parse(body, self._tools)
            if state is call_scanners.CallState.COMPLETE
            else None
        )
        # An answer may be JSON: without a mark, only calls of known tools are meant as calls.
        if calls is not None and not self._lead.strip():
            calls = calls if all(call.name in self._tools for call in calls) else None
        if calls is not None:
            self._complete(calls)
        if calls is None and not self._begun:
            self._leave(self._lead + body)
        else:
            self._lead, self._body, self._begun = "", [], []
            self._step = ToolCallParser._read_between
        return True

    def _show(self, events: Sequence[parser.CallBegin | parser.CallArguments]) -> None:
        """Emit the parts of calls; nothing more from a call on that has to come whole, or follows one that is none."""
        for event in events:
            if isinstance(event, parser.CallArguments):
                self._begun[-1][1].append(event.text)
            elif (
                event.name in (self._whole_tools or ())
                or not (self._lead.strip() or event.name in self._tools)
                or not self._has_valid_call()
            ):
                self._preview = None
                return
            else:
                if self._begun:
                    self._events.append(parser.CallEnd())
                self._begun.append((event.name, []))
            self._events.append(event)

    def _has_valid_call(self) -> bool:
        """Return whether the arguments that were shown last are JSON, if any were: a preview does not check them."""
        if not self._begun:
            return True
        name, arguments = self._begun[-1]
        return call_syntax.parse_call(name, "".join(arguments)) is not None

    def _complete(self, calls: Sequence[parser.ToolCall]) -> None:
        """Emit what is missing of the calls of a body."""
        if self._begun:
            shown = "".join(self._begun[-1][1])
            arguments = next((call.arguments for call in calls[len(self._begun) - 1 :]), shown)
            if arguments.startswith(shown) and arguments != shown:
                self._events.append(parser.CallArguments(arguments[len(shown) :]))
            self._events.append(parser.CallEnd())
        self._events += calls[len(self._begun) :]

    def _read_between(self) -> bool:
        """Read the text after a section mark, which is then the lead, or after a call, without a lead."""
        if not self._lead:
            self._text = self._text.lstrip()
        num_blanks = parser.count_leading_blanks(self._text)
        text = self._text[num_blanks:]
        can_wait = num_blanks <= parser.MAX_HELD_BLANKS
        mark = self._followers.leading(text) if can_wait else ""
        if mark in self._form.opens:
            self._enter(self._lead + self._text[:num_blanks] + mark, text[len(mark) :])
        elif mark and not self._lead:
            self._follow("" if mark in self._form.closes else mark, mark, text[len(mark) :])
        elif not mark and can_wait and self._followers.begins(text):
            return False
        elif not self._lead and self._is_bare(num_blanks, self._form.bare + self._form.follows):
            self._enter("", text)
        else:
            self._leave(self._lead)
        return True

    def _leave(self, text: str) -> None:
        """Emit text that turned out to be no call as content."""
        self._lead, self._body = "", []
        self._emit(parser.Content, self._blanks.push(text))
        self._step = ToolCallParser._read_text
