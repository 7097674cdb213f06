"""The signs of formats in chat templates: texts that a template contains, and the name of the format that they show.

The names are those of `formats`.
"""  # decider

NONE = "none"
# The first match counts.
_TOOLS = (
    (("]<]minimax[>[",), "minimax_m3"),
    (("<|channel|>",), "harmony"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=", "preserved exactly as-is"), "mimo"),
    (("<function=",), "qwen3_coder"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<dots_function_call>",), "dots"),
    (("<steptml:invoke",), "step3"),
    (("｜DSML｜", "function_calls"), "deepseek_v3_2"),
    (("｜DSML｜ calls",), "deepseek_v41"),
    (("｜DSML｜",), "deepseek_v4"),
    (('<|"|>', "<|tool_call>"), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|function_call|>",), "gigachat3"),
    (("function call", "<|role_sep|>"), "gigachat3"),
    (("<tool_sep{}>",), "hy_v3"),  # its marks are put together in the template
    (("<|tool_call:begin|>",), "solar_open"),
    (("<|START_ACTION|>",), "cohere_command"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<function_calls>",), "olmo3"),
    (("<function name=", "<param name="), "minicpm5"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v3_1"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|open|>", "<|sep|>", "argument"), "kimi_k3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<TOOLCALL>",), "nemotron_deci"),
    (("<|python_start|>",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
    (("<|/tool_call|>",), "phi4"),
    (("<|tool_call|>",), "granite"),
    (("<tool_calls>",), "jamba"),
    (("<arg_key>",), "glm45"),
    (("<tool_call>",), "hermes"),
    (("List of tools: [",), "lfm2"),  # all that the template of LFM 2.5 shows
)
_REASONING = (
    (("<|channel|>",), "gpt_oss"),
    (("<|channel>thought",), "gemma4"),
    (("</seed:think>",), "seed_oss"),
    (("</mm:think>",), "minimax_m3"),
    (("</longcat_think>",), "longcat"),
    (("<think{}>",), "hy_v3"),
    (("<|START_THINKING|>", "<|START_TEXT|>"), "cohere_command4"),
    (("<|START_THINKING|>",), "cohere_command"),
    (("<|think|>", "<|content|>"), "solar_open"),
    (("[BEGIN FINAL RESPONSE]",), "apriel"),
    (("<|open|>", "<|sep|>", "think"), "kimi_k3"),
    (("<response>", "think_mode"), "ernie45"),
    (("</think>",), "basic"),
    (("◁think▷",), "kimi"),
    (("[THINK]",), "mistral"),
    (("Here is my thought process",), "granite"),
)


def find_tools(template: str) -> str:
    """Return the name of the format of tool calls that the template shows, or `none`."""
    return _find(_TOOLS, template)


def find_reasoning(template: str) -> str:
    """Return the name of the format of reasoning that the template shows, or `none`."""
    return _find(_REASONING, template)


def _find(signs: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str:
    return next((name for texts, name in signs if all(text in template for text in texts)), NONE)
