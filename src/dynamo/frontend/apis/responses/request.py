"""The requests of `POST /v1/responses` and `/v1/responses/input_tokens`."""

from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.preprocess import conversation as preprocess_conversation
from dynamo.preprocess import inputs
from dynamo.runtime.http import json_body


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
                raise errors.InvalidRequest(
                    f"{param}: required with json_schema, but missing", param=param
                )
        schema = inputs.JsonSchema(name=self.name or "", schema=self.schema)
        return inputs.ResponseFormat(type=self.type, json_schema=schema)


class FunctionChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `tool_choice` that forces one tool."""

    type: Literal["function"]
    name: str


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the model's reasoning."""

    effort: inputs.ReasoningEffort | None = None
    # refused, unless they ask for nothing
    summary: None = None
    generate_summary: None = None
    context: None = None
    mode: None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_obfuscation: bool | None = None


class ResponseCountRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that make the prompt: the whole of a request to count tokens.

    Items of `input` are decoded later, one by one (`input_items`).
    """

    model: str
    input: str | preprocess_conversation.Messages
    instructions: str | None = None
    previous_response_id: str | None = None
    text: TextOptions | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=inputs.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: ReasoningOptions | None = None
    # refused, unless they ask for nothing
    conversation: None = None

    @property
    def effort(self) -> inputs.ReasoningEffort | None:
        """The reasoning effort."""
        return self.reasoning.effort if self.reasoning is not None else None

    @property
    def response_format(self) -> inputs.ResponseFormat | None:
        """`text.format` in the form of chat completions. Raises InvalidRequest."""
        text_format = self.text.format if self.text is not None else None
        return text_format.to_response_format() if text_format is not None else None

    @property
    def chat_tool_choice(self) -> inputs.ToolChoice | None:
        """`tool_choice` in the form of chat completions."""
        if not isinstance(self.tool_choice, FunctionChoice):
            return self.tool_choice
        function = inputs.NamedFunction(name=self.tool_choice.name)
        return inputs.NamedTool(type="function", function=function)

    def check(self) -> None:
        """Raise InvalidRequest for what the types allow and the API does not."""
        if self.input == []:
            raise errors.InvalidRequest(
                "input: expected a string or at least one item, got an empty list", param="input"
            )


class ResponsesRequest(ResponseCountRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for an answer."""

    max_output_tokens: inputs.Length | None = None
    temperature: inputs.Temperature | None = None
    top_p: inputs.Probability | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    metadata: inputs.Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    background: bool | None = None
    include: list[Any] | None = None
    top_logprobs: Literal[0] | None = None
    # refused, unless they ask for nothing
    access_programs: None = None
    context_management: None = None
    image: None = None
    max_tool_calls: None = None
    moderation: None = None
    prompt: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None

    @property
    def is_stored(self) -> bool:
        """True if the answer can be fetched and continued later; as with OpenAI, the default."""
        return self.store is not False

    def check(self) -> None:
        super().check()
        for name in ("background", "include"):
            if getattr(self, name):
                raise errors.InvalidRequest(f"{name}: not supported; leave it out", param=name)
        if self.stream_options is not None:
            inputs.check_stream_options(
                is_stream=bool(self.stream),
                has_obfuscation=bool(self.stream_options.include_obfuscation),
            )


_request_decoder = json_body.RequestDecoder(ResponsesRequest)
_count_decoder = json_body.RequestDecoder(ResponseCountRequest)


def decode(body: bytes) -> ResponsesRequest:
    """Return the request in this JSON body. Raises InvalidRequest, which names the field."""
    request = _request_decoder.decode(body)
    request.check()
    return request


def decode_count(body: bytes) -> ResponseCountRequest:
    """Return the request to count tokens in this JSON body. Raises InvalidRequest, which names the field."""
    request = _count_decoder.decode(body)
    request.check()
    return request
