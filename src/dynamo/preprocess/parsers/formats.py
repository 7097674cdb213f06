"""The formats of answers by name, and the parsers of an answer.

The names are the original's and vLLM's, because users have them in their commands.
"""  # decider

import dataclasses
import functools
from collections.abc import Container, Mapping
from dataclasses import dataclass

from dynamo.base import errors
from dynamo.preprocess.parsers import (
    call_previews,
    call_scanners,
    call_syntax,
    harmony,
    parser,
    template_signs,
    tool_calls,
)
from dynamo.preprocess.parsers.reasoning import ReasoningFormat
from dynamo.preprocess.parsers.tool_calls import CallFrame, ToolCallFormat, ToolCallParser
from dynamo.protocols import generate

NONE = template_signs.NONE  # the name that asks for no parser
_QUOTED_NAME = r"\"(?P<name>[^\"<>]+)\">"
_INVOKED_NAME = r"[\"']?(?P<name>[^\"'<>]+)[\"']?>"


def _function_tags(section: str, close: str, *, trims: bool = True) -> ToolCallFormat:
    reader = call_syntax.TaggedCallReader(
        "</function>",
        r"(?P<name>[^<>]+)>",
        r"<parameter=(?P<key>[^<>]+)>",
        "</parameter>",
        ("<parameter=", close),
        trims=trims,
        is_closed=False,
    )
    return tool_calls.tagged_format(reader, section=section, opens="<function=", closes=(close,))


def _invoke_tags(section: str, close: str) -> ToolCallFormat:
    reader = call_syntax.TaggedCallReader(
        "</invoke>",
        _INVOKED_NAME,
        r"<parameter name=[\"']?(?P<key>[^\"'<>]+)[\"']?>",
        "</parameter>",
        ("<parameter name=", close),
        trims=True,
        is_closed=False,
    )
    return tool_calls.tagged_format(reader, section=section, opens="<invoke name=", closes=(close,))


def _dsml_tags(section: str, space: str = "") -> ToolCallFormat:
    """Return DeepSeek's markup language; the token that begins its tags may be a special one."""
    tag = f"｜DSML｜{space}"
    reader = call_syntax.TaggedCallReader(
        f"</{tag}invoke>",
        _QUOTED_NAME,
        rf"<{tag}parameter name=\"(?P<key>[^\"<>]+)\" string=\"(?P<is_text>true|false)\">",
        f"</{tag}parameter>",
        (f"<{tag}parameter", f"</{tag}{section}>"),
        trims=False,
    )
    return tool_calls.tagged_format(
        reader,
        section=f"<{tag}{section}>",
        opens=f"<{tag}invoke name=",
        closes=(f"</{tag}{section}>",),
        inner=("｜DSML｜",),
    )


def _python_list() -> call_scanners.BracketScanner:
    return call_scanners.BracketScanner(quotes="'\"", allowed=None)


def _preview_python(tools: parser.ToolSchemas) -> call_previews.CallPreview:
    del tools
    return call_previews.PythonPreview()


# Forced calls of all others: most were taught arrays like this one, and it needs no mark that they might not have.
JSON_ARRAY = ToolCallFormat(opens=("[", ","), closes=("]",), frame=CallFrame("[", ", ", "]"))
_GLM = dataclasses.replace(
    tool_calls.tagged_format(
        call_syntax.TaggedCallReader(
            "</tool_call>",
            r"(?P<name>[\w.-]+)",
            r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>",
            "</arg_value>",
            ("<arg_key>",),
            trims=False,
        ),
        opens="<tool_call>",
        closes=("</tool_call>",),
    ),
    ends_thought=("<tool_call>",),
)
_KIMI_SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_KIMI_K2 = dataclasses.replace(
    tool_calls.named_format(
        r"(functions\.)?(?P<name>[\w.-]+?)(:\d+)?\s*<\|tool_call_argument_begin\|>",
        opens="<|tool_call_begin|>",
        inner=("<|tool_call_argument_begin|>",),
        closes=("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    ),
    sections=_KIMI_SECTIONS,
    ends_thought=_KIMI_SECTIONS,
)
_KIMI_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
_KIMI_K3 = tool_calls.tagged_format(
    call_syntax.TaggedCallReader(
        "<|close|>call<|sep|>",
        r"\"(?P<name>[^\"]+)\"[^<]*<\|sep\|>",
        r"<\|open\|>argument key=\"(?P<key>[^\"]*)\" type=\"(?P<kind>\w+)\"<\|sep\|>",
        "<|close|>argument<|sep|>",
        ("<|open|>argument",),
        trims=False,
    ),
    section="<|open|>tools<|sep|>",
    opens="<|open|>call tool=",
    inner=_KIMI_TOKENS,
    closes=("<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
)
_NAMESPACE = "]<]minimax[>["  # a token
_NESTED = call_syntax.NestedTagReader(f"{_NAMESPACE}</invoke>", _INVOKED_NAME, _NAMESPACE)
_MINIMAX_M3_CALLS = dataclasses.replace(
    tool_calls.tagged_format(
        _NESTED,
        section=f"{_NAMESPACE}<tool_call>",
        opens=f"{_NAMESPACE}<invoke name=",
        closes=(f"{_NAMESPACE}</tool_call>",),
        inner=(_NAMESPACE,),
    ),
    preview=functools.partial(call_previews.NestedTagPreview, _NESTED),
    ends_thought=(f"{_NAMESPACE}<tool_call>",),
)
_TOOL_CALLS: Mapping[str, ToolCallFormat] = {
    "hermes": ToolCallFormat(
        opens=("<tool_call>",),
        closes=("</tool_call>",),
        frame=CallFrame("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    ),
    "llama3_json": ToolCallFormat(opens=("<|python_tag|>",), closes=(";",), bare="{"),
    "pythonic": ToolCallFormat(
        opens=("<|python_start|>",),
        closes=("<|python_end|>",),
        bare="[",
        make_scanner=_python_list,
        parse=call_syntax.parse_python_calls,
        preview=_preview_python,
    ),
    "lfm2": ToolCallFormat(
        opens=("<|tool_call_start|>",),
        closes=("<|tool_call_end|>",),
        make_scanner=_python_list,
        parse=call_syntax.parse_python_calls,
        preview=_preview_python,
    ),
    "olmo3": ToolCallFormat(
        opens=("<function_calls>",),
        make_scanner=functools.partial(call_scanners.MarkerScanner, "</function_calls>"),
        parse=call_syntax.parse_python_lines,
        preview=_preview_python,
        may_end_unmarked=True,
    ),
    "mistral": dataclasses.replace(
        tool_calls.named_format(
            r"(?P<name>[\w.-]+)(\[CALL_ID\]\w+)?(\[ARGS\])?",
            opens="[TOOL_CALLS]",
            closes=("[/TOOL_CALLS]",),
            inner=("[CALL_ID]", "[ARGS]"),
        ),
        ends_thought=("[TOOL_CALLS]",),
    ),
    "deepseek_v3": tool_calls.named_format(
        r"function<｜tool▁sep｜>(?P<name>[\w.-]+)\s*```json",
        section="<｜tool▁calls▁begin｜>",
        opens="<｜tool▁call▁begin｜>",
        inner=("<｜tool▁sep｜>",),
        closes=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v3_1": tool_calls.named_format(
        r"(?P<name>[\w.-]+)<｜tool▁sep｜>",
        section="<｜tool▁calls▁begin｜>",
        opens="<｜tool▁call▁begin｜>",
        inner=("<｜tool▁sep｜>",),
        closes=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v3_2": _dsml_tags("function_calls"),
    "deepseek_v4": _dsml_tags("tool_calls"),
    "deepseek_v41": _dsml_tags("calls", space=" "),
    "kimi_k2": _KIMI_K2,
    "kimi_k3": _KIMI_K3,
    "qwen3_coder": _function_tags("<tool_call>", "</tool_call>"),
    "mimo": _function_tags("<tool_call>", "</tool_call>", trims=False),
    "seed_oss": _function_tags("<seed:tool_call>", "</seed:tool_call>"),
    "glm45": _GLM,
    "minimax_m2": _invoke_tags("<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax_m3": _MINIMAX_M3_CALLS,
    "dots": _invoke_tags("<dots_function_call>", "</dots_function_call>"),
    "step3": tool_calls.tagged_format(
        call_syntax.TaggedCallReader(
            "</steptml:invoke>",
            r"function<｜tool_sep｜><steptml:invoke name=\"(?P<name>[^\"<>]+)\">",
            r"<steptml:parameter name=\"(?P<key>[^\"<>]+)\">",
            "</steptml:parameter>",
            ("<steptml:parameter",),
            trims=True,
        ),
        section="<｜tool_calls_begin｜>",
        opens="<｜tool_call_begin｜>",
        inner=("<｜tool_sep｜>",),
        closes=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
    ),
    "minicpm5": tool_calls.tagged_format(
        call_syntax.TaggedCallReader(
            "</function>",
            _QUOTED_NAME,
            r"<param name=\"(?P<key>[^\"<>]+)\">",
            "</param>",
            ("<param name=",),
            trims=True,
        ),
        opens="<function name=",
    ),
    "gemma4": tool_calls.bare_key_format("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": tool_calls.bare_key_format(
        "<start_function_call>", "<end_function_call>", "<escape>"
    ),
    "phi4": ToolCallFormat(opens=("functools", "<|tool_call|>"), closes=("<|/tool_call|>",)),
    "nemotron_deci": ToolCallFormat(opens=("<TOOLCALL>",), closes=("</TOOLCALL>",)),
    "granite": ToolCallFormat(
        opens=("<|tool_call|>", "<tool_call>"), closes=("</tool_call>",), bare="["
    ),
    "granite_20b_fc": ToolCallFormat(opens=("<function_call>",)),
    "jamba": ToolCallFormat(opens=("<tool_calls>",), closes=("</tool_calls>",), follows="{"),
    "hy_v3": tool_calls.tagged_format(
        call_syntax.TaggedCallReader(
            "</tool_call:opensource>",
            r"(?P<name>[\w.-]+)<tool_sep:opensource>",
            r"<arg_key:opensource>(?P<key>.*?)</arg_key:opensource>\s*<arg_value:opensource>",
            "</arg_value:opensource>",
            ("<arg_key:opensource>",),
            trims=False,
        ),
        section="<tool_calls:opensource>",
        opens="<tool_call:opensource>",
        inner=("<tool_sep:opensource>",),
        closes=("</tool_calls:opensource>",),
    ),
    "gigachat3": ToolCallFormat(
        opens=("<|function_call|>", "function call<|role_sep|>"), inner=("<|role_sep|>",)
    ),
    "longcat": ToolCallFormat(opens=("<longcat_tool_call>",), closes=("</longcat_tool_call>",)),
    "internlm": ToolCallFormat(
        sections=("<|action_start|>",), opens=("<|plugin|>",), closes=("<|action_end|>",)
    ),
    "cohere_command": ToolCallFormat(opens=("<|START_ACTION|>",), closes=("<|END_ACTION|>",)),
    "apertus": ToolCallFormat(
        opens=("<|tools_prefix|>",),
        closes=("<|tools_suffix|>",),
        parse=call_syntax.parse_calls_by_key,
        preview=lambda _: call_previews.JsonPreview(is_by_key=True),
    ),
    "solar_open": tool_calls.named_format(
        r"\w*<\|tool_call:name\|>(?P<name>[\w.-]+)<\|tool_call:args\|>",
        section="<|tool_calls|>",
        opens="<|tool_call:begin|>",
        inner=("<|tool_call:name|>", "<|tool_call:args|>"),
        closes=("<|tool_call:end|>", "<|calls|>"),
    ),
    "xlam": ToolCallFormat(opens=("<tool_call>",), closes=("</tool_call>",), bare="["),
    "harmony": ToolCallFormat(is_harmony=True),
    "default": ToolCallFormat(
        opens=("<TOOLCALL>", "<|python_tag|>"), closes=("</TOOLCALL>", ";"), bare="{["
    ),
}
_OTHER_NAMES = {
    "hermes": ("qwen25", "qwen3", "qwen3_json", "granite4", "ernie45"),
    "llama3_json": ("llama4_json",),
    "pythonic": ("llama4_pythonic",),
    "deepseek_v3_1": ("deepseek_v31",),
    "deepseek_v3_2": ("deepseek_v32",),
    "deepseek_v4": ("deepseek-v4", "deepseekv4"),
    "kimi_k2": ("kimi_k25",),
    "kimi_k3": ("kimi-k3",),
    "qwen3_coder": ("qwen3_xml", "nemotron_nano", "step3p5"),
    "glm45": ("glm47", "ling3", "poolside_v1"),
    "minimax_m3": ("minimax-m3",),
    "gemma4": ("gemma-4",),
    "phi4": ("phi4_mini_json",),
    "jamba": ("hunyuan_a13b", "minimax"),
    "granite_20b_fc": ("granite-20b-fc",),
    "cohere_command": ("cohere_command3", "cohere_command4"),
    "harmony": ("openai",),
}
TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    name: form
    for first, form in _TOOL_CALLS.items()
    for name in (first, *_OTHER_NAMES.get(first, ()))
}

_THINKING = (
    "basic", "qwen3", "qwen3_coder", "nemotron_deci", "glm45", "glm47", "kimi_k2", "exaone4", "deepseek_v3",
    "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4", "deepseek-v4", "deepseekv4", "deepseek_v41", "ling3", "mimo",
    "poolside_v1", "holo2",
)  # fmt: skip
_ALWAYS_THINKING = (
    "deepseek_r1", "step3", "nemotron_nano", "nemotron3", "nemotron_v3", "kimi_k25", "minimax_m2",
    "minimax_append_think", "minimax_m2_append_think", "olmo3", "step3p5", "granite_thinking_parser",
)  # fmt: skip
_THINK = ReasoningFormat(opens=("<think>",), closes=("</think>",))
_FORCED_THINK = ReasoningFormat(opens=("<think>",), closes=("</think>",), is_forced=True)
_GEMMA_CHANNEL = ReasoningFormat(
    opens=("<|channel>thought",), closes=("<channel|>",), tokens=("<|channel>",)
)
_HARMONY = ReasoningFormat(opens=(), closes=(), is_harmony=True)
_COHERE = ReasoningFormat(
    opens=("<|START_THINKING|>",),
    closes=("<|END_THINKING|>",),
    answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
_MINIMAX_M3 = ReasoningFormat(opens=("<mm:think>",), closes=("</mm:think>",))
_KIMI_CHANNELS = ReasoningFormat(
    opens=("<|open|>think<|sep|>",),
    closes=("<|close|>think<|sep|>",),
    answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    tokens=_KIMI_TOKENS,
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    **dict.fromkeys(_THINKING, _THINK),
    **dict.fromkeys(_ALWAYS_THINKING, _FORCED_THINK),
    "ernie45": dataclasses.replace(_FORCED_THINK, answer=("<response>", "</response>")),
    "hunyuan_a13b": dataclasses.replace(_THINK, answer=("<answer>", "</answer>")),
    "seed_oss": ReasoningFormat(opens=("<seed:think>",), closes=("</seed:think>",)),
    "minimax_m3": _MINIMAX_M3,
    "minimax-m3": _MINIMAX_M3,
    "hy_v3": ReasoningFormat(opens=("<think:opensource>",), closes=("</think:opensource>",)),
    "longcat": ReasoningFormat(opens=("<longcat_think>",), closes=("</longcat_think>",)),
    **dict.fromkeys(("cohere_command", "cohere_command3"), _COHERE),
    "cohere_command4": dataclasses.replace(_COHERE, answer=("<|START_TEXT|>", "<|END_TEXT|>")),
    "solar_open": ReasoningFormat(
        opens=("<|think|>",),
        closes=("<|end|>",),
        answer=("<|content|>", "<|end|>", "<|flush|>", "<|begin|>assistant"),
        tokens=("<|begin|>",),
    ),
    "apriel": ReasoningFormat(
        opens=("Here are my reasoning steps:",),
        closes=("[BEGIN FINAL RESPONSE]",),
        answer=("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    ),
    "gemma4": _GEMMA_CHANNEL,
    "gemma-4": _GEMMA_CHANNEL,
    "mistral": ReasoningFormat(opens=("[THINK]",), closes=("[/THINK]",), is_forced=True),
    "kimi_k3": _KIMI_CHANNELS,
    "kimi-k3": _KIMI_CHANNELS,
    "kimi": ReasoningFormat(opens=("◁think▷",), closes=("◁/think▷",)),
    "granite": ReasoningFormat(
        opens=("Here is my thought process:", "Here's my thought process:"),
        closes=("Here is my response:", "Here's my response:"),
    ),
    **dict.fromkeys(("gpt_oss", "openai_gptoss"), _HARMONY),
}


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
        return self.tools if self.tools is not None and self.tools.frame is not None else JSON_ARRAY

    @property
    def frame(self) -> CallFrame:
        """Return the text around forced calls."""
        assert self.forced.frame is not None
        return self.forced.frame

    def thoughts(self, prompt: str, *, may_think: bool) -> generate.GuidedReasoning | None:
        """Return the reasoning that may precede an answer held to a grammar: that which the prompt has begun, or any.

        Raises InvalidRequest for harmony.
        """
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

    def parsers(
        self,
        prompt: str,
        tools: parser.ToolSchemas | None,
        *,
        is_forced: bool = False,
        whole_tools: Container[str] | None = None,
    ) -> parser.ParserFactory | None:
        """Return the parsers for answers to this prompt; None if all of it is content.

        `tools` None: no calls; `is_forced`: nothing but calls; `whole_tools`: those with calls in one piece
        (None: all).
        """
        if self._is_harmony:
            return parser.ParserFactory(lambda: harmony.HarmonyParser(tools, whole_tools))
        if self.tools is None or tools is None:
            return None if self.reasoning is None else self.reasoning.parsers(prompt)
        calls = functools.partial(
            ToolCallParser, self.tools, tools, is_forced=is_forced, whole_tools=whole_tools
        )
        if self.reasoning is None:
            return parser.ParserFactory(calls)
        thoughts = self.reasoning.parsers(
            prompt, call_opens=self.tools.ends_thought, call_closes=self.tools.closes
        )
        return parser.ParserFactory(lambda: parser.ChainedParser(thoughts.new(), calls()))

    @property
    def thought_marks(self) -> ReasoningFormat | None:
        """Return the marks around a thought, if marks alone delimit it."""
        return None if self._is_harmony else self.reasoning

    @property
    def _is_harmony(self) -> bool:
        tools, reasoning = self.tools, self.reasoning
        return (tools is not None and tools.is_harmony) or (
            reasoning is not None and reasoning.is_harmony
        )


def select_format(
    tool_parser: str | None, reasoning_parser: str | None, template: str
) -> AnswerFormat:
    """Return the format that the names say, or for a name that is None, the one that the chat template shows.

    Raises ConfigError for an unknown name.
    """
    check_names(tool_parser, reasoning_parser)
    reasoning = REASONING_FORMATS.get(reasoning_parser or "")
    if reasoning_parser is None:
        reasoning = REASONING_FORMATS.get(template_signs.find_reasoning(template))
        # the prompt and the model decide whether it thinks
        if reasoning is not None and reasoning.is_forced:
            reasoning = dataclasses.replace(reasoning, is_forced=False)
    tools = TOOL_CALL_FORMATS.get(tool_parser or template_signs.find_tools(template))
    return AnswerFormat(tools, reasoning)


def check_names(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ConfigError for the name of a parser that does not exist."""
    _check("--dyn-tool-call-parser", tool_parser, TOOL_CALL_FORMATS)
    _check("--dyn-reasoning-parser", reasoning_parser, REASONING_FORMATS)


def _check(flag: str, name: str | None, formats: Mapping[str, object]) -> None:
    if name is not None and name != NONE and name not in formats:
        raise errors.ConfigError(
            f"{flag}: expected one of {', '.join(sorted(formats))}, or {NONE}, got {name!r}"
        )
