"""Harmony, the format of gpt-oss: an answer is messages, each in a channel.

    <|channel|>analysis<|message|>I should look.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>

`analysis` is reasoning, a message to a function is a call, all else is content. The prompt ends with the first
`<|start|>assistant`, after which the recipient may stand before the channel: ` to=functions.weather<|channel|>`.
"""  # decider

import re
from collections.abc import Container

from dynamo.preprocess import stop_strings
from dynamo.preprocess.parsers import call_previews, call_scanners, call_syntax, parser

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (_START, _MESSAGE, "<|channel|>", "<|constrain|>", *_ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([\w.-]+)")
_CUT_HEADER = re.compile(  # with every part of a header that the end of the answer may have cut off
    r"(<\|start\|>\w*)?(\s*to=[\w.-]*)?(<\|channel\|>\s*\w*)?(\s*to=[\w.-]*)?(\s*<\|constrain\|>)?\s*\w*"
)
_HEADER_STARTS = stop_strings.MarkerSet(("<|channel|>", _START, " to=functions.", "to=functions."))
_HEADER_END = stop_strings.MarkerSet((_MESSAGE,))
_BODY_END = stop_strings.MarkerSet((*_ENDS, _START, "<|channel|>"))


class HarmonyParser(parser.StateMachineParser):
    """Reads the messages of one answer. Without tools, a call is content in its original form.

    Calls come in parts, except those of `whole_tools`; None: all come whole.
    """

    def __init__(
        self, tools: parser.ToolSchemas | None, whole_tools: Container[str] | None = None
    ) -> None:
        super().__init__(HarmonyParser._begin)
        self._tools = tools
        self._whole_tools = whole_tools
        self._preview: call_previews.CallPreview | None = None
        self._shown: list[str] = []  # of the call that has begun
        self._header = ""
        self._body: list[str] = []  # of a call
        self._num_body = 0

    @property
    def is_reasoning(self) -> bool:
        return self._step is HarmonyParser._read_reasoning

    @property
    def is_plain(self) -> bool:
        return False

    def _end(self) -> None:
        if self._step is HarmonyParser._read_call:
            self._body.append(self._text)
            self._end_call("")
        elif self._step is HarmonyParser._read_reasoning:
            self._emit(parser.Reasoning, self._text)
        elif self._step is not HarmonyParser._read_header or not _CUT_HEADER.fullmatch(self._text):
            self._emit(parser.Content, self._text)

    def _begin(self) -> bool:
        """Read the beginning of an answer or message: a header, or text if the header stands in the prompt."""
        if _HEADER_STARTS.leading(self._text):
            self._step = HarmonyParser._read_header
        elif _HEADER_STARTS.begins(self._text):
            return False
        else:
            self._step = HarmonyParser._read_content
        return True

    def _read_header(self) -> bool:
        header, end, following = _HEADER_END.partition(self._text)
        if len(header) > call_scanners.MAX_HEAD_CHARS:  # it is no header
            self._emit(parser.Content, self._text[: call_scanners.MAX_HEAD_CHARS])
            self._text = self._text[call_scanners.MAX_HEAD_CHARS :]
            self._step = HarmonyParser._read_content
            return True
        if not end:
            return False
        self._header, self._text = header, following
        channel = _CHANNEL.search(self._header)
        function = _FUNCTION.search(self._header)
        if function:
            self._step = HarmonyParser._read_call
            is_whole = not self._tools or function[1] in (self._whole_tools or ())
            if self._whole_tools is not None and not is_whole:
                self._preview = call_previews.JsonBodyPreview(function[1])
        elif channel and channel[1] == "analysis":
            self._step = HarmonyParser._read_reasoning
        else:
            self._step = HarmonyParser._read_content
        return True

    def _read_reasoning(self) -> bool:
        text, end = self._take_body()
        self._emit(parser.Reasoning, text)
        return end is not None

    def _read_content(self) -> bool:
        text, end = self._take_body()
        self._emit(parser.Content, text)
        return end is not None

    def _read_call(self) -> bool:
        text, end = self._take_body()
        self._body.append(text)
        self._num_body += len(text)
        for event in self._preview.push(text) if self._preview is not None else ():
            self._shown.append("" if isinstance(event, parser.CallBegin) else event.text)
            self._events.append(event)
        if end is not None or self._num_body > call_scanners.MAX_CALL_CHARS:
            self._end_call(end or "")
        return end is not None

    def _take_body(self) -> tuple[str, str | None]:
        """Consume the certain text of a message; return it and the mark that ended the message, None if it goes on."""
        text, mark, self._text = _BODY_END.partition(self._text)
        if not mark:
            return text, None
        self._step = HarmonyParser._begin
        if mark in _ENDS:
            return text, mark
        self._text = mark + self._text  # it begins the next message
        return text, ""

    def _end_call(self, end: str) -> None:
        body, self._body, self._num_body = "".join(self._body), [], 0
        function = _FUNCTION.search(self._header)
        assert function is not None
        is_too_long = len(body) > call_scanners.MAX_CALL_CHARS
        call = (
            None
            if is_too_long or self._tools is None
            else call_syntax.parse_call(function[1], body)
        )
        if call is not None and self._shown:
            unshown = call.arguments.removeprefix("".join(self._shown))
            self._events += [parser.CallArguments(unshown)] if unshown else []
            self._events.append(parser.CallEnd())
        elif call is not None:
            self._events.append(call)
        elif not self._shown:
            text = self._header + _MESSAGE + body
            self._emit(parser.Content, text if is_too_long else text + end)
        self._preview, self._shown = None, []
        if self._step is HarmonyParser._read_call:
            self._step = HarmonyParser._read_content
