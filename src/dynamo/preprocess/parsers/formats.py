"""The formats of answers by name, which one a model's chat template shows, and the parsers of an answer.

The names are the original's, because users have them in their commands.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo.base import errors
from dynamo.preprocess.parsers import call_syntax, harmony, parser
from dynamo.preprocess.parsers.reasoning import ReasoningFormat
from dynamo.preprocess.parsers.tool_calls import CallFrame, ToolCallFormat, ToolCallParser
from dynamo.protocols import generate

NONE = "none"  # the name that asks for no parser
_HARMONY = ToolCallFormat()  # has a parser of its own


def _named() -> call_syntax.BracketScanner:
    return call_syntax.BracketScanner(has_head=True)


def _function_tags() -> call_syntax.MarkerScanner:
    return call_syntax.MarkerScanner("</function>")


def _python_list() -> call_syntax.BracketScanner:
    return call_syntax.BracketScanner(quotes="'\"", allowed=None)


_HERMES = ToolCallFormat(
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    frame=CallFrame("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
)
# Forced calls of all others: most were taught arrays like this one, and it needs no mark that they might not have.
JSON_ARRAY = ToolCallFormat(opens=("[", ","), closes=("]",), frame=CallFrame("[", ", ", "]"))
TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    "hermes": _HERMES,
    "qwen25": _HERMES,
    "qwen3": _HERMES,
    "llama3_json": ToolCallFormat(opens=("<|python_tag|>",), closes=(";",), bare="{"),
    "pythonic": ToolCallFormat(
        opens=("<|python_start|>",),
        closes=("<|python_end|>",),
        bare="[",
        make_scanner=_python_list,
        parse=call_syntax.parse_python_calls,
    ),
    "mistral": ToolCallFormat(
        opens=("[TOOL_CALLS]",),
        closes=("[/TOOL_CALLS]",),
        inner=("[CALL_ID]", "[ARGS]"),
        make_scanner=_named,
        parse=call_syntax.NamedCallReader(r"(?P<name>[\w.-]+)(\[CALL_ID\]\w+)?(\[ARGS\])?"),
    ),
    "deepseek_v3": ToolCallFormat(
        sections=("<｜tool▁calls▁begin｜>",),
        opens=("<｜tool▁call▁begin｜>",),
        inner=("<｜tool▁sep｜>",),
        closes=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        make_scanner=_named,
        parse=call_syntax.NamedCallReader(r"function<｜tool▁sep｜>(?P<name>[\w.-]+)\s*```json"),
    ),
    "deepseek_v3_1": ToolCallFormat(
        sections=("<｜tool▁calls▁begin｜>",),
        opens=("<｜tool▁call▁begin｜>",),
        inner=("<｜tool▁sep｜>",),
        closes=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        make_scanner=_named,
        parse=call_syntax.NamedCallReader(r"(?P<name>[\w.-]+)<｜tool▁sep｜>"),
    ),
    "kimi_k2": ToolCallFormat(
        sections=("<|tool_calls_section_begin|>",),
        opens=("<|tool_call_begin|>",),
        inner=("<|tool_call_argument_begin|>",),
        closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        make_scanner=_named,
        parse=call_syntax.NamedCallReader(
            r"(functions\.)?(?P<name>[\w.-]+?)(:\d+)?\s*<\|tool_call_argument_begin\|>"
        ),
    ),
    "qwen3_coder": ToolCallFormat(
        sections=("<tool_call>",),
        opens=("<function=",),
        closes=("</tool_call>",),
        make_scanner=_function_tags,
        parse=call_syntax.parse_tagged_calls,
    ),
    "phi4": ToolCallFormat(opens=("functools", "<|tool_call|>"), closes=("<|/tool_call|>",)),
    "nemotron_deci": ToolCallFormat(opens=("<TOOLCALL>",), closes=("</TOOLCALL>",)),
    "granite": ToolCallFormat(
        opens=("<|tool_call|>", "<tool_call>"), closes=("</tool_call>",), bare="["
    ),
    "jamba": ToolCallFormat(opens=("<tool_calls>",), closes=("</tool_calls>",)),
    "harmony": _HARMONY,
    "default": ToolCallFormat(
        opens=("<TOOLCALL>", "<|python_tag|>"), closes=("</TOOLCALL>", ";"), bare="{["
    ),
}

_THINK = ReasoningFormat(opens=("<think>",), closes=("</think>",))
_FORCED_THINK = ReasoningFormat(opens=("<think>",), closes=("</think>",), is_forced=True)
_GPT_OSS = ReasoningFormat(opens=(), closes=())  # the harmony parser reads both
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "basic": _THINK,
    "qwen3": _THINK,
    "nemotron_deci": _THINK,
    "deepseek_r1": _FORCED_THINK,
    "step3": _FORCED_THINK,
    "nemotron_nano": _FORCED_THINK,
    "nemotron3": _FORCED_THINK,
    "nemotron_v3": _FORCED_THINK,
    "mistral": ReasoningFormat(opens=("[THINK]",), closes=("[/THINK]",), is_forced=True),
    "kimi": ReasoningFormat(opens=("◁think▷",), closes=("◁/think▷",)),
    "granite": ReasoningFormat(
        opens=("Here is my thought process:", "Here's my thought process:"),
        closes=("Here is my response:", "Here's my response:"),
    ),
    "gpt_oss": _GPT_OSS,
}

# Texts that a chat template contains, and the name of the format that its model then writes; the first match counts.
_TOOLS_BY_TEMPLATE = (
    (("<|channel|>",), "harmony"),
    (("<function=",), "qwen3_coder"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v3_1"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<TOOLCALL>",), "nemotron_deci"),
    (("<|python_start|>",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
    (("<|/tool_call|>",), "phi4"),
    (("<|tool_call|>",), "granite"),
    (("<tool_calls>",), "jamba"),
    (("<arg_key>",), NONE),  # a format without a parser here
    (("<tool_call>",), "hermes"),
)
_REASONING_BY_TEMPLATE = (
    (("<|channel|>",), "gpt_oss"),
    (("</think>",), "basic"),
    (("◁think▷",), "kimi"),
    (("[THINK]",), "mistral"),
    (("Here is my thought process",), "granite"),
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers; None: without tool calls, or without reasoning."""

    tools: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all marks that must be visible in the text, special tokens or not."""
        if self._is_harmony:
            return harmony.MARKS
        parts = (self.tools, self.reasoning)
        return tuple(mark for part in parts if part is not None for mark in part.marks)

    @property
    def can_choose_to_call(self) -> bool:
        """Return whether a call that follows a grammar is what the model writes by itself, and differs from content."""
        return self.tools is not None and self.tools.frame is not None

    @property
    def forced(self) -> ToolCallFormat:
        """Return the format of calls that a grammar forces."""
        return self.tools if self.tools is not None and self.tools.frame is not None else JSON_ARRAY

    @property
    def frame(self) -> CallFrame:
        """Return the text around forced calls."""
        assert self.forced.frame is not None
        return self.forced.frame

    def thoughts(self, prompt: str, *, may_think: bool) -> generate.GuidedReasoning | None:
        """Return the reasoning that may precede an answer held to a grammar. Raises InvalidRequest for harmony."""
        if self._is_harmony:
            raise errors.InvalidRequest(
                "a model that answers in harmony's channels cannot be guided"
            )
        form = self.reasoning
        if form is None or form.is_over_in(prompt):
            return None
        if form.begins_in(prompt):
            return generate.GuidedReasoning(closes=form.closes)
        return generate.GuidedReasoning(opens=form.opens, closes=form.closes) if may_think else None

    def parsers(self, prompt: str, tools: parser.ToolSchemas | None) -> parser.ParserFactory | None:
        """Return the parsers for answers to this prompt; None if all of it is content. `tools` None: no calls."""
        if self._is_harmony:
            return parser.ParserFactory(lambda: harmony.HarmonyParser(tools))
        thoughts = None if self.reasoning is None else self.reasoning.parsers(prompt)
        if self.tools is None or tools is None:
            return thoughts
        calls = functools.partial(ToolCallParser, self.tools, tools)
        if thoughts is None:
            return parser.ParserFactory(calls)
        return parser.ParserFactory(lambda: parser.ChainedParser(thoughts.new(), calls()))

    @property
    def thought_marks(self) -> ReasoningFormat | None:
        """Return the marks around a thought, if marks alone delimit it."""
        return None if self._is_harmony else self.reasoning

    @property
    def _is_harmony(self) -> bool:
        return self.tools is _HARMONY or self.reasoning is _GPT_OSS


def select_format(
    tool_parser: str | None, reasoning_parser: str | None, template: str
) -> AnswerFormat:
    """Return the format that the names say, or for a name that is None, the one that the chat template shows.

    Raises ConfigError for an unknown name.
    """
    check_names(tool_parser, reasoning_parser)
    reasoning = REASONING_FORMATS.get(reasoning_parser or "")
    if reasoning_parser is None:
        reasoning = REASONING_FORMATS.get(_guess(_REASONING_BY_TEMPLATE, template))
        if (
            reasoning is not None and reasoning.is_forced
        ):  # the prompt and the model decide whether it thinks
            reasoning = dataclasses.replace(reasoning, is_forced=False)
    return AnswerFormat(
        TOOL_CALL_FORMATS.get(tool_parser or _guess(_TOOLS_BY_TEMPLATE, template)), reasoning
    )


def _guess(table: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str:
    return next((name for parts, name in table if all(part in template for part in parts)), NONE)


def check_names(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ConfigError for the name of a parser that does not exist."""
    _check("--dyn-tool-call-parser", tool_parser, TOOL_CALL_FORMATS)
    _check("--dyn-reasoning-parser", reasoning_parser, REASONING_FORMATS)


def _check(flag: str, name: str | None, formats: Mapping[str, object]) -> None:
    if name is not None and name != NONE and name not in formats:
        raise errors.ConfigError(
            f"{flag}: expected one of {', '.join(sorted(formats))}, or {NONE}, got {name!r}"
        )
