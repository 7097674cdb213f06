"""The requests of the Responses API, and their input items as the messages of a conversation.

Reasoning, text and tool calls of one turn of the assistant are an item each; a conversation has one message for them.
"""  # decider

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.preprocess import conversation, images, inputs
from dynamo.runtime.http import json_body

_Messages = conversation.Messages  # the requests have a field of the module's name
# the types of parameters of chat completions that this API has under other names
_Format = Annotated[None, msgspec.Meta(extra={json_body.INSTEAD: "text.format"})]
_Input = Annotated[None, msgspec.Meta(extra={json_body.INSTEAD: "input"})]
_Length = Annotated[None, msgspec.Meta(extra={json_body.INSTEAD: "max_output_tokens"})]


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the answer: the fields of OpenAI's `response_format` in one object."""

    type: Literal["text", "json_object", "json_schema"]
    name: inputs.FormatName | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def to_response_format(self) -> inputs.ResponseFormat:
        """Return it in the form of chat completions. Raises InvalidRequest."""
        if self.type != "json_schema":
            return inputs.ResponseFormat(type=self.type)
        for name in ("name", "schema"):
            if getattr(self, name) is None:
                param = f"text.format.{name}"
                raise errors.InvalidRequest.of_param(
                    param, "required with json_schema, but missing"
                )
        schema = inputs.JsonSchema(name=self.name or "", schema=self.schema)
        return inputs.ResponseFormat(type=self.type, json_schema=schema)


class ResponseToolChoice(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A `tool_choice` that is an object: it forces one tool, or limits the tools. Answers repeat it as it was sent."""

    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=inputs.MAX_TOOLS)] | None = None

    def convert(self) -> inputs.ChosenTools:
        """Return it in the form of chat completions. Raises InvalidRequest."""
        if self.type != "allowed_tools" and self.name is not None:
            named = inputs.NamedFunction(name=self.name)
            return inputs.ChosenTools(type="function", function=named)
        if self.mode is None or self.tools is None:
            param = "tool_choice." + ("mode" if self.type == "allowed_tools" else "name")
            raise errors.InvalidRequest.of_param(param, "required, but missing")
        tools = [
            {"type": "function", "function": {"name": tool.get("name")}} for tool in self.tools
        ]
        allowed = inputs.AllowedTools(mode=self.mode, tools=tools)
        return inputs.ChosenTools(type="allowed_tools", allowed_tools=allowed)


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the model's reasoning."""

    effort: inputs.ReasoningEffort | None = None
    # without effect
    summary: inputs.Hint = None
    generate_summary: inputs.Hint = None
    context: inputs.Hint = None
    mode: inputs.Hint = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_obfuscation: inputs.Hint = None


class ResponseCountRequest(
    inputs.EngineFields, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The fields that make the prompt: the whole of a request to count tokens.

    Items of `input` are decoded later, one by one (`convert_items`).
    """

    model: str
    input: str | _Messages
    instructions: str | None = None
    previous_response_id: str | None = None
    text: TextOptions | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=inputs.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: ReasoningOptions | None = None
    # without effect
    personality: inputs.Hint = None
    # refused, unless they ask for nothing
    conversation: None = None

    @property
    def effort(self) -> inputs.ReasoningEffort | None:
        return self.reasoning.effort if self.reasoning is not None else None

    @property
    def summary(self) -> str | None:
        """The form of the reasoning's summary that was requested, which is repeated in the answer."""
        summary = self.reasoning.summary if self.reasoning is not None else None
        return summary if summary in ("auto", "concise", "detailed") else None

    @property
    def response_format(self) -> inputs.ResponseFormat | None:
        """`text.format` in the form of chat completions. Raises InvalidRequest."""
        text_format = self.text.format if self.text is not None else None
        return text_format.to_response_format() if text_format is not None else None

    @property
    def chat_tool_choice(self) -> inputs.ToolChoice | None:
        """`tool_choice` in the form of chat completions."""
        if isinstance(self.tool_choice, ResponseToolChoice):
            return self.tool_choice.convert()
        return self.tool_choice

    def check(self) -> None:
        """Raise InvalidRequest for what the types allow and the API does not."""
        super().check()
        if self.input == []:
            raise errors.InvalidRequest.of_param(
                "input", "expected a string or at least one item, got an empty list"
            )
        if self.prompt_logprobs is not None:
            raise errors.InvalidRequest.of_param("prompt_logprobs", "not supported; leave it out")


class ResponsesRequest(ResponseCountRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for an answer."""

    max_output_tokens: inputs.Length | None = None
    temperature: inputs.Temperature | None = None
    top_p: inputs.Probability | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    metadata: inputs.Metadata | None = None
    background: bool | None = None
    prompt_cache_retention: inputs.CacheRetention | None = None
    # without effect
    background_options: inputs.Hint = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    include: list[str] | None = None
    client_metadata: inputs.Hint = None
    context_management: inputs.Hint = None
    max_tool_calls: inputs.Length | None = None
    prompt_cache_options: inputs.Hint = None
    # refused, unless they ask for nothing
    top_logprobs: Literal[0] | None = None
    access_programs: None = None
    chat_format: _Format = msgspec.field(name="response_format", default=None)
    max_completion_tokens: _Length = None
    max_tokens: _Length = None
    messages: _Input = None
    image: None = None
    moderation: None = None
    prompt: None = None

    @property
    def is_stored(self) -> bool:
        """True if the answer can be fetched and continued later; as with OpenAI, the default."""
        return self.store is not False

    def check(self) -> None:
        super().check()
        if self.background:
            raise errors.InvalidRequest.of_param(
                "background", "not supported; expected false or nothing, got true"
            )
        if "message.output_text.logprobs" in (self.include or ()):
            raise errors.InvalidRequest.of_param(
                "include", "message.output_text.logprobs is not supported; leave it out"
            )


decode = json_body.RequestDecoder(ResponsesRequest).decode
decode_count = json_body.RequestDecoder(ResponseCountRequest).decode


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of an item that came from an answer."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Item, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call of the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: inputs.Hint = None


class CustomCallItem(Item, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of a custom tool by the assistant."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: inputs.Hint = None


class FunctionOutputItem(Item, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]


class ReasoningItem(Item, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reasoning of the assistant; its summary is not given to the model."""

    type: Literal["reasoning"]
    summary: list[dict[str, Any]]
    content: list[dict[str, Any]] | None = None
    encrypted_content: inputs.Hint = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part with text."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part in which the assistant refuses."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImagePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part with an image."""

    type: Literal["input_image"]
    image_url: str
    detail: inputs.Hint = None
    # refused, unless it asks for nothing
    file_id: None = None


_Decoders = dict[str, json_body.RequestDecoder[Any]]
_ITEM_DECODERS: _Decoders = {
    "message": json_body.RequestDecoder(MessageItem),
    "function_call": json_body.RequestDecoder(FunctionCallItem),
    "function_call_output": json_body.RequestDecoder(FunctionOutputItem),
    "custom_tool_call": json_body.RequestDecoder(CustomCallItem),
    "custom_tool_call_output": json_body.RequestDecoder(FunctionOutputItem),
    "reasoning": json_body.RequestDecoder(ReasoningItem),
}
_text_decoder = json_body.RequestDecoder(TextPart)
_TEXT_DECODERS: _Decoders = {
    **dict.fromkeys(("input_text", "output_text", "reasoning_text"), _text_decoder),
    "refusal": json_body.RequestDecoder(RefusalPart),
}
_PART_DECODERS = {**_TEXT_DECODERS, "input_image": json_body.RequestDecoder(ImagePart)}


def convert_items(
    items: str | list[dict[str, Any]], known_names: Mapping[tuple[str, str], str] | None = None
) -> list[dict[str, Any]]:
    """Return the messages of these items. Raises InvalidRequest.

    `known_names` are the names by which the model knows tools, by namespace and name, where they are others.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    builder = _MessageBuilder(known_names or {})
    for number, item in enumerate(items):
        place = f"input[{number}]"
        decoded = _decode(item, item.get("type", "message"), _ITEM_DECODERS, place)
        builder.append(decoded, place)
    return builder.finish()


def list_input(items: str | list[dict[str, Any]], digits: str) -> list[dict[str, Any]]:
    """Return the input as items with an id, in which the content of a message is a list of parts.

    `digits` are of the response's id, so that ids are different for each request.
    """
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [_with_id(item, f"{digits}{number:02x}in") for number, item in enumerate(items)]


def _with_id(item: dict[str, Any], digits: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    listed = {**item, "type": kind, "id": item.get("id") or f"{_ID_PREFIXES[kind]}_{digits}"}
    if kind == "message":
        listed["status"] = item.get("status") or "completed"
        if isinstance(item["content"], str):
            text_type = "output_text" if item["role"] == "assistant" else "input_text"
            listed["content"] = [{"type": text_type, "text": item["content"]}]
    return listed


_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


class _MessageBuilder:
    """Builds the messages of a conversation item by item."""

    def __init__(self, known_names: Mapping[tuple[str, str], str]) -> None:
        self._messages: list[dict[str, Any]] = []
        self._known_names = known_names

    def finish(self) -> list[dict[str, Any]]:
        for message in self._messages:
            if (
                "reasoning_content" in message
            ):  # thoughts, joined here: else each would be copied by all that follow
                message["reasoning_content"] = "\n".join(filter(None, message["reasoning_content"]))
        return self._messages

    def append(self, item: Item, place: str) -> None:
        match item:
            case MessageItem(role="assistant"):
                self._append_answer(_join_parts(item.content, f"{place}.content"))
            case MessageItem():
                content = _convert_parts(item.content, f"{place}.content")
                self._messages.append({"role": item.role, "content": content})
            case FunctionCallItem():
                # kept as text, which nests no deeper each time the conversation is stored
                name = self._known_name(item.namespace, item.name)
                function = {"name": name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._open_assistant().setdefault("tool_calls", []).append(call)
            case CustomCallItem():
                name = self._known_name(item.namespace, item.name)
                custom = {"name": name, "input": item.input}
                call = {"id": item.call_id, "type": "custom", "custom": custom}
                self._open_assistant().setdefault("tool_calls", []).append(call)
            case FunctionOutputItem():
                content = _convert_parts(item.output, f"{place}.output")
                message = {"role": "tool", "tool_call_id": item.call_id, "content": content}
                self._messages.append(message)
            case ReasoningItem(content=[*parts]):
                answer, text = self._open_assistant(), _join_parts(parts, f"{place}.content")
                answer.setdefault("reasoning_content", []).append(text)

    def _known_name(self, namespace: Any, name: str) -> str:
        is_named = isinstance(namespace, str)
        return self._known_names.get((namespace, name), name) if is_named else name

    def _append_answer(self, text: str) -> None:
        if (message := self._open_assistant())["content"]:
            self._messages.append({"role": "assistant", "content": text})
        else:
            message["content"] = text

    def _open_assistant(self) -> dict[str, Any]:
        """Return the assistant's last message if its turn continues, or a new one."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]


def _join_parts(content: str | list[dict[str, Any]], place: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in _decode_parts(content, _TEXT_DECODERS, place))


def _convert_parts(content: str | list[dict[str, Any]], place: str) -> str | list[dict[str, Any]]:
    """Return the text of these parts, or, with images, the parts in the form of chat completions."""
    if isinstance(content, str):
        return content
    parts = _decode_parts(content, _PART_DECODERS, place)
    if not any(isinstance(part, ImagePart) for part in parts):
        return "\n".join(part.text for part in parts)
    return [
        images.make_part(part.image_url, f"{place}[{number}].image_url")
        if isinstance(part, ImagePart)
        else {"type": "text", "text": part.text}
        for number, part in enumerate(parts)
    ]


def _decode_parts(content: list[dict[str, Any]], decoders: _Decoders, place: str) -> list[Any]:
    return [
        _decode(part, part.get("type"), decoders, f"{place}[{number}]")
        for number, part in enumerate(content)
    ]


def _decode(value: dict[str, Any], kind: Any, decoders: _Decoders, place: str) -> Any:
    if not isinstance(kind, str) or kind not in decoders:
        expected = ", ".join(map(repr, decoders))
        raise errors.InvalidRequest.of_param(
            f"{place}.type", f"expected one of {expected}, got {json_body.describe(kind)}"
        )
    return decoders[kind].convert(value, place)
