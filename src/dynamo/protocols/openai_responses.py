"""`POST /v1/responses` and `/v1/responses/input_tokens`: the requests, as they came."""

from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.protocols import (
    openai_chat,
    openai_decode,
    openai_fields,
    openai_guided,
    openai_messages,
)


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the answer: a chat's response format, its parts side by side."""

    type: Literal["text", "json_object", "json_schema"]
    name: openai_guided.FormatName | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    @property
    def as_in_chat(self) -> openai_guided.ResponseFormat:
        """The same, as a chat has it. Raises InvalidRequest."""
        if self.type != "json_schema":
            return openai_guided.ResponseFormat(type=self.type)
        for param in ("name", "schema"):
            if getattr(self, param) is None:
                where = f"text.format.{param}"
                raise errors.InvalidRequest(
                    f"{where}: required with json_schema, but missing", param=where
                )
        schema = openai_guided.JsonSchema(name=self.name or "", schema=self.schema)
        return openai_guided.ResponseFormat(type=self.type, json_schema=schema)


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the text shall be."""

    format: TextFormat | None = None
    verbosity: None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How hard the model shall think."""

    effort: openai_chat.ReasoningEffort | None = None
    # refused, unless they ask for nothing
    summary: None = None
    generate_summary: None = None
    context: None = None
    mode: None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a streamed answer."""

    include_obfuscation: bool | None = None


class Prompted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes the prompt; all of a request to count tokens. Items are looked at one by one (`openai_items`)."""

    model: str
    input: str | openai_messages.Messages
    instructions: str | None = None
    previous_response_id: str | None = None
    text: TextOptions | None = None
    tools: (
        Annotated[list[dict[str, Any]], msgspec.Meta(max_length=openai_chat.MAX_TOOLS)] | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: Reasoning | None = None
    # refused, unless they ask for nothing
    conversation: None = None

    @property
    def effort(self) -> openai_chat.ReasoningEffort | None:
        """How hard the model shall think."""
        return self.reasoning.effort if self.reasoning is not None else None

    @property
    def chat_format(self) -> openai_guided.ResponseFormat | None:
        """`text.format`, as a chat has it. Raises InvalidRequest."""
        asked = self.text.format if self.text is not None else None
        return asked.as_in_chat if asked is not None else None

    @property
    def chat_tool_choice(
        self,
    ) -> Literal["none", "auto", "required"] | openai_guided.NamedTool | None:
        """`tool_choice`, as a chat has it."""
        if not isinstance(self.tool_choice, NamedTool):
            return self.tool_choice
        function = openai_guided.Function(name=self.tool_choice.name)
        return openai_guided.NamedTool(type="function", function=function)

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        if self.input == []:
            raise errors.InvalidRequest(
                "input: expected a string or at least one item, got an empty list", param="input"
            )


class ResponsesRequest(Prompted, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for an answer."""

    max_output_tokens: openai_fields.Length | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: openai_fields.Probability | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    metadata: openai_fields.Metadata | None = None
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
    def is_kept(self) -> bool:
        """May the answer be asked for, and gone on with, later? As with OpenAI, unless they say no."""
        return self.store is not False

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        super().check()
        self._refuse("background", "include")
        if self.stream_options is None:
            return
        if not self.stream:
            raise errors.InvalidRequest(
                "stream_options: only allowed when stream is true", param="stream_options"
            )
        if self.stream_options.include_obfuscation:
            raise errors.InvalidRequest(
                "stream_options.include_obfuscation: not supported; expected false or nothing, got true",
                param="stream_options.include_obfuscation",
            )

    def _refuse(self, *names: str) -> None:
        """These may be there, but ask for nothing."""
        for name in names:
            if getattr(self, name):
                raise errors.InvalidRequest(f"{name}: not supported; leave it out", param=name)


_requests = openai_decode.RequestDecoder(ResponsesRequest)
_prompts = openai_decode.RequestDecoder(Prompted)


def decode(body: bytes) -> ResponsesRequest:
    """The request in this body. Raises InvalidRequest, which names the field."""
    request = _requests.decode(body)
    request.check()
    return request


def decode_count(body: bytes) -> Prompted:
    """The request to count tokens in this body. Raises InvalidRequest, which names the field."""
    prompted = _prompts.decode(body)
    prompted.check()
    return prompted
