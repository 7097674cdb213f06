"""The requests of Anthropic's Messages API, and their content blocks and tools as a conversation.

As with OpenAI's, a parameter is honoured, or refused by name, or documented as without effect (docs/api.md). Content
blocks and tools are decoded one by one, so that an error names the one that is wrong.
The differences from a conversation: the system prompt is a field of its own; turns of one role in a row are one
message; the results of tools are blocks of the user's turn, where a conversation has a message for each; and thoughts
are blocks of the assistant's turn.
"""  # decider

import re
from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.frontend.apis import error_dialects
from dynamo.frontend.apis.messages import content_blocks
from dynamo.preprocess import conversation, inputs, options
from dynamo.protocols import generate
from dynamo.runtime.http import json_body

MAX_STOP_SEQUENCES = 64
# Claude Code's, another one in each request: behind it no prompt would have a prefix that is cached.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
StopSequence = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CallerMetadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about the caller."""

    user_id: str | None = None


class ThinkingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1024, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The schema of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Effort and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ToolSelection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the model may call a tool, and whether more than one."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageCountRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that make the prompt: the whole of a request to count tokens."""

    model: str
    messages: Annotated[list[Turn], msgspec.Meta(max_length=conversation.MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    thinking: ThinkingConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolSelection | None = None
    cache_control: content_blocks.CacheControl | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # of older clients: that of `output_config`
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    # without effect
    billing_policy: inputs.Hint = None
    compaction: inputs.Hint = None
    context_management: inputs.Hint = None
    fallback_credit_token: inputs.Hint = None
    fallbacks: inputs.Hint = None
    speed: inputs.Hint = None
    user_profile_id: inputs.Hint = None
    workspace_id: inputs.Hint = None
    # refused, unless they ask for nothing
    mcp_servers: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None

    @property
    def is_thinking(self) -> bool:
        """True if the model thinks; as with Anthropic, only on request."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def check(self) -> None:
        """Raise InvalidRequest for what the types allow and the API does not."""
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise errors.InvalidRequest.of_param(
                "tool_choice.name", "expected with type tool, and with no other"
            )
        if not self.messages:
            raise errors.InvalidRequest.of_param(
                "messages", "expected at least one, got an empty list"
            )


class MessageRequest(MessageCountRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for an answer."""

    max_tokens: inputs.Length
    stream: bool | None = None
    stop_sequences: (
        Annotated[list[StopSequence], msgspec.Meta(max_length=MAX_STOP_SEQUENCES)] | None
    ) = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: inputs.Probability | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: CallerMetadata | None = None
    # without effect
    service_tier: inputs.ServiceTier | None = None
    inference_geo: inputs.Hint = None
    diagnostics: inputs.Hint = None
    # refused, unless they ask for nothing
    compaction: None = None
    container: None = None
    thread: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.thread is not None:
            raise error_dialects.ThreadUnsupported(
                "thread: not supported, as no conversation is kept here; leave it out and send all messages",
                param="thread",
            )
        thinking = self.thinking
        if thinking is None or thinking.type != "enabled":
            return
        if thinking.budget_tokens is None:
            raise errors.InvalidRequest.of_param("thinking.budget_tokens", "required, but missing")
        if thinking.budget_tokens >= self.max_tokens:
            raise errors.InvalidRequest.of_param(
                "thinking.budget_tokens",
                f"expected less than max_tokens, which is {self.max_tokens}, "
                f"got {thinking.budget_tokens}",
            )


_decode_request = json_body.RequestDecoder(MessageRequest).decode
_decode_count = json_body.RequestDecoder(MessageCountRequest).decode


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: content_blocks.CacheControl | None = None
    # without effect
    eager_input_streaming: inputs.Hint = None
    strict: inputs.Hint = None
    defer_loading: inputs.Hint = None
    input_examples: inputs.Hint = None
    allowed_callers: inputs.Hint = None


class MessageConversation(inputs.Conversation, frozen=True, kw_only=True):
    """The conversation of a messages request. As with Anthropic, its thinking budget need not be kept."""

    omits_thinking: bool = False  # thoughts are counted, and not told

    @property
    def effort_param(self) -> str:
        return "output_config.effort"

    @property
    def format_param(self) -> str:
        return "output_config.format"

    @property
    def must_limit_thinking(self) -> bool:
        return False

    @property
    def fits_context(self) -> bool:
        return True

    @property
    def stops_in_thoughts(self) -> bool:
        return False

    @property
    def shows_thinking(self) -> bool:
        """True if the answer includes the model's thoughts."""
        is_thinking = any(self.template_args[name] for name in options.SWITCHES)
        return is_thinking and not self.omits_thinking


BLOCKS_BY_ROLE = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
_tool_decoder = json_body.RequestDecoder(Tool)


def decode(body: bytes) -> MessageConversation:
    """Return the conversation of the messages request in this JSON body. Raises InvalidRequest."""
    request = _decode_request(body)
    budget = None
    if request.thinking is not None and request.thinking.type == "enabled":
        budget = request.thinking.budget_tokens
    extensions = None
    ttl = _longest_ttl(request)
    if budget is not None or ttl is not None:
        control = generate.KvCacheControl(ttl=ttl) if ttl is not None else None
        extensions = inputs.NvExt(max_thinking_tokens=budget, cache_control=control)
    return convert(
        request,
        max_tokens=request.max_tokens,
        stream=request.stream,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        nvext=extensions,
    )


def decode_count(body: bytes) -> MessageConversation:
    """Return the conversation of the request to count tokens in this JSON body. Raises InvalidRequest."""
    return convert(_decode_count(body))


def _longest_ttl(request: MessageRequest) -> Literal["5m", "1h"] | None:
    """Return the longest time to live that any part of a request asks for; None if none does."""
    parts = [*(request.tools or ()), *(request.system if isinstance(request.system, list) else ())]
    for turn in request.messages:
        parts += turn.content if isinstance(turn.content, list) else ()
    controls = [part.get("cache_control") for part in parts]
    ttls = [control.get("ttl") for control in controls if isinstance(control, dict)]
    if request.cache_control is not None:
        ttls.append(request.cache_control.ttl)
    if not ttls:
        return None
    return "1h" if "1h" in ttls else "5m"


def convert(request: MessageCountRequest, **fields: Any) -> MessageConversation:
    """Return the conversation with the prompt of this request and further `fields`. Raises InvalidRequest."""
    builder = _MessageBuilder()
    if request.system is not None:
        blocks = content_blocks.decode(request.system, "system", ("text",))
        builder.append("system", _BILLING_LINE.sub("", content_blocks.join_texts(blocks)))
    for number, turn in enumerate(request.messages):
        builder.append_turn(turn, f"messages[{number}].content")
    messages, choice, config = builder.finish(), request.tool_choice, request.output_config
    response_format = None
    output_format = (config and config.format) or request.output_format
    if output_format is not None:
        schema = inputs.JsonSchema(name="output", schema=output_format.schema)
        response_format = inputs.ResponseFormat(type="json_schema", json_schema=schema)
    return MessageConversation(
        model=request.model,
        response_format=response_format,
        messages=messages,
        tools=convert_tools(request.tools or []),
        tool_choice=convert_tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        chat_template_kwargs={
            **dict.fromkeys(options.SWITCHES, request.is_thinking),
            **(request.chat_template_kwargs or {}),
        },
        omits_thinking=request.thinking is not None and request.thinking.display == "omitted",
        continue_final_message=messages[-1]["role"] == "assistant"
        and bool(messages[-1]["content"]),
        reasoning_effort=config.effort if config else None,
        **fields,
    )


def convert_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools in OpenAI's form. Raises InvalidRequest."""
    if len(tools) > inputs.MAX_TOOLS:
        raise errors.InvalidRequest.of_param(
            "tools", f"expected at most {inputs.MAX_TOOLS}, got {len(tools)}"
        )
    return [_convert_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def convert_tool_choice(choice: ToolSelection | None) -> inputs.ToolChoice | None:
    """Return the tool choice in OpenAI's form."""
    match choice:
        case None:
            return None
        case ToolSelection(type="any"):
            return "required"
        case ToolSelection(type="tool", name=str(name)):
            return inputs.ChosenTools(type="function", function=inputs.NamedFunction(name=name))
        case ToolSelection(type="none"):
            return "none"
        case _:
            return "auto"


def _convert_tool(value: dict[str, Any], place: str) -> dict[str, Any]:
    kind = value.get("type", "custom")
    if kind not in ("custom", None):
        raise errors.InvalidRequest.of_param(
            f"{place}.type",
            "tools that Anthropic defines are not supported; expected 'custom', got "
            + json_body.describe(kind),
        )
    tool = _tool_decoder.convert(value, place)
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


class _MessageBuilder:
    """Builds the messages of a conversation turn by turn.

    Until the end a message holds the contents of its turns as a list: joined turn by turn, a long message would be
    copied as often as it has turns.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._tool_by_call: dict[str, str] = {}

    def finish(self) -> list[dict[str, Any]]:
        for message in self._messages:
            message["content"] = content_blocks.join_contents(message["content"])
            if "reasoning_content" in message:
                message["reasoning_content"] = content_blocks.join_lines(
                    message["reasoning_content"]
                )
        return self._messages

    def append_turn(self, turn: Turn, place: str) -> None:
        blocks = content_blocks.decode(turn.content, place, BLOCKS_BY_ROLE[turn.role])
        if turn.role == "assistant":
            self._append_assistant(blocks)
            return
        if not blocks:
            raise errors.InvalidRequest.of_param(place, "expected at least one block, got none")
        for number, block in enumerate(blocks):
            if isinstance(block, content_blocks.ToolResultBlock):
                self._append_result(block, f"{place}[{number}]")
        if any(
            isinstance(block, content_blocks.TextBlock | content_blocks.ImageBlock)
            for block in blocks
        ):
            self.append(turn.role, content_blocks.convert(blocks, place))

    def append(self, role: str, content: content_blocks.Content) -> None:
        """Append a message; content of the role that wrote last joins its message."""
        if self._messages and self._messages[-1]["role"] == role:
            self._messages[-1]["content"].append(content)
        else:
            self._messages.append({"role": role, "content": [content]})

    def _append_assistant(self, blocks: list[content_blocks.Block]) -> None:
        self.append("assistant", content_blocks.join_texts(blocks))
        message = self._messages[-1]
        if thoughts := [
            block.thinking for block in blocks if isinstance(block, content_blocks.ThinkingBlock)
        ]:
            message.setdefault("reasoning_content", []).append("\n".join(thoughts))
        for block in blocks:
            if isinstance(block, content_blocks.ToolUseBlock):
                self._tool_by_call[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)

    def _append_result(self, block: content_blocks.ToolResultBlock, place: str) -> None:
        name = self._tool_by_call.get(block.tool_use_id)
        if name is None:
            param = f"{place}.tool_use_id"
            raise errors.InvalidRequest.of_param(
                param,
                "expected the id of a tool_use block before it, got "
                + json_body.describe(block.tool_use_id),
            )
        content_place = f"{place}.content"
        blocks = content_blocks.decode(
            block.content or "", content_place, ("text", "image", "tool_reference")
        )
        message: dict[str, Any] = {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "name": name,
            "content": [content_blocks.convert(blocks, content_place)],
        }
        if block.is_error:  # for templates that show it
            message["is_error"] = True
        self._messages.append(message)
