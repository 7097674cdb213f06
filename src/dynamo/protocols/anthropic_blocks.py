"""From Anthropic's turns, which are lists of blocks, to the messages of a chat request.

What differs: the system prompt stands apart; turns of one role that follow each other are one; the results of tools are
blocks of the user's turn, where a chat has a message for each; and thoughts are blocks of the assistant's.
"""

from typing import Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.protocols import anthropic, anthropic_tools, openai_chat, openai_decode, openai_fields


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all have."""

    cache_control: anthropic.CacheControl | None = None


class Text(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something said."""

    type: Literal["text"]
    text: str
    citations: None = None


class ToolUse(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The assistant called a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tool said."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class Thinking(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the assistant thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinking(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What it thought, as no one can read it; no model of ours wrote it."""

    type: Literal["redacted_thinking"]
    data: str


class MessageChat(openai_chat.ChatRequest, frozen=True, kw_only=True):
    """The chat request that asks the same. Its budget for thinking is a wish, as with Anthropic."""

    @property
    def effort_param(self) -> str:
        return "output_config.effort"

    @property
    def format_param(self) -> str:
        return "output_config.format"

    @property
    def must_limit_thinking(self) -> bool:
        return False


THINKING = "enable_thinking"  # what templates call it
_DECODERS: dict[str, openai_decode.RequestDecoder[Any]] = {
    "text": openai_decode.RequestDecoder(Text),
    "tool_use": openai_decode.RequestDecoder(ToolUse),
    "tool_result": openai_decode.RequestDecoder(ToolResult),
    "thinking": openai_decode.RequestDecoder(Thinking),
    "redacted_thinking": openai_decode.RequestDecoder(RedactedThinking),
}
_KINDS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}


def chat(conversation: anthropic.Conversation, **fields: Any) -> openai_chat.ChatRequest:
    """The chat request that asks the same; `fields` are more of its own. Raises InvalidRequest."""
    turns = _Turns()
    if conversation.system is not None:
        turns.say("system", _join(_read(conversation.system, "system", ("text",))))
    for number, message in enumerate(conversation.messages):
        turns.add(message, f"messages[{number}].content")
    choice = conversation.tool_choice
    return MessageChat(
        model=conversation.model,
        response_format=conversation.chat_format,
        messages=turns.messages,
        tools=anthropic_tools.chat(conversation.tools or []),
        tool_choice=anthropic_tools.choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        chat_template_kwargs={THINKING: conversation.is_thinking},
        reasoning_effort=conversation.output_config.effort if conversation.output_config else None,
        **fields,
    )


def chat_of(request: anthropic.MessageRequest) -> openai_chat.ChatRequest:
    """The chat request that asks the same. Raises InvalidRequest."""
    return chat(
        request,
        max_tokens=request.max_tokens,
        stream=request.stream,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        nvext=_extensions(request.thinking),
    )


def _extensions(thinking: anthropic.Thinking | None) -> openai_fields.NvExt | None:
    if thinking is None or thinking.type != "enabled":
        return None
    return openai_fields.NvExt(max_thinking_tokens=thinking.budget_tokens)


class _Turns:
    """The messages so far."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._tool_by_call: dict[str, str] = {}

    def add(self, message: anthropic.Message, place: str) -> None:
        blocks = _read(message.content, place, _KINDS[message.role])
        if message.role == "assistant":
            self._add_assistant(blocks)
            return
        for number, block in enumerate(blocks):
            if isinstance(block, ToolResult):
                self._add_result(block, f"{place}[{number}]")
        if any(isinstance(block, Text) for block in blocks):
            self.say(message.role, _join(blocks))

    def say(self, role: str, text: str) -> None:
        """A message, or more of the last one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == role:
            last["content"] = _append(last["content"], text)
        else:
            self.messages.append({"role": role, "content": text})

    def _add_assistant(self, blocks: list[Block]) -> None:
        self.say("assistant", _join(blocks))
        message = self.messages[-1]
        if thoughts := [block.thinking for block in blocks if isinstance(block, Thinking)]:
            known = message.get("reasoning_content", "")
            message["reasoning_content"] = _append(known, "\n".join(thoughts))
        for block in blocks:
            if isinstance(block, ToolUse):
                self._tool_by_call[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)

    def _add_result(self, block: ToolResult, place: str) -> None:
        name = self._tool_by_call.get(block.tool_use_id)
        if name is None:
            where = f"{place}.tool_use_id"
            raise errors.InvalidRequest(
                f"{where}: expected the id of a tool_use block before it, got "
                + openai_decode.describe(block.tool_use_id),
                param=where,
            )
        text = _join(_read(block.content or "", f"{place}.content", ("text",)))
        message = {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text}
        failed = {"is_error": True} if block.is_error else {}  # for templates that tell it
        self.messages.append({**message, **failed})


def _read(content: str | list[dict[str, Any]], place: str, kinds: tuple[str, ...]) -> list[Block]:
    """All blocks; a text is one block."""
    if isinstance(content, str):
        return [Text(type="text", text=content)]
    found = []
    for number, block in enumerate(content):
        here = f"{place}[{number}]"
        kind = block.get("type")
        if kind not in kinds:
            wanted = ", ".join(map(repr, kinds))
            got = f"got {kind!r:.60}" if "type" in block else "but it is missing"
            raise errors.InvalidRequest(
                f"{here}.type: expected one of {wanted} (models read text only), {got}",
                param=f"{here}.type",
            )
        found.append(_DECODERS[kind].convert(block, here))
    return found


def _join(blocks: list[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, Text))


def _append(text: str, more: str) -> str:
    return f"{text}\n{more}" if text and more else text or more
