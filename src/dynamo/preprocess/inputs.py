"""Requests as the preprocessor reads them: sampling, stopping, guided answers, extensions, a conversation.

The types know no API. Field names and limits are those of OpenAI and vLLM, so the API folders of the frontend decode
JSON straight into subclasses of them (`frontend.apis.chat`, `completions`), or construct one from their own request
(`messages`, `responses`); nothing is copied in between.

Every documented parameter of an API is either honoured or refused by name, never ignored. Limits are part of the
types, so the JSON decoder checks them in C. A parameter that this version cannot honour has a type whose values ask
for nothing: `None`, or a `Literal`. `runtime.http.json_body` turns a violation into a sentence that names the field.
"""

from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.preprocess import conversation
from dynamo.protocols import limits

MAX_TOOLS = 128
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Prompt = str | list[int]  # text, or token ids

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
UInt32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Length = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, msgspec.Meta(gt=0, le=2)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
Stop = Annotated[str, msgspec.Meta(max_length=1024)]
StopList = Annotated[list[Stop], msgspec.Meta(max_length=4)]
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
GuideText = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.MAX_CHARS)]
FormatName = Annotated[str, msgspec.Meta(max_length=64, pattern="^[a-zA-Z0-9_-]+$")]
InstanceId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
SessionId = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Annotation = Literal[
    "request_id", "formatted_prompt", "token_ids", "llm_metrics", "query_instance_id"
]


class GuidedFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's guided decoding fields, at the root of a request and in its `nvext`; at most one of the first four is set.

    Schemas, regular expressions and grammars are passed on unread: the engine has the library that follows them.
    """

    guided_json: dict[str, Any] | GuideText | None = None
    guided_regex: GuideText | None = None
    guided_choice: (
        Annotated[list[GuideText], msgspec.Meta(max_length=limits.MAX_CHOICES)] | None
    ) = None
    guided_grammar: GuideText | None = None
    guided_decoding_backend: Annotated[str, msgspec.Meta(max_length=64)] | None = None


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema for the answer; it is enforced whatever `strict` says."""

    name: FormatName
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`: the shape of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def check(self) -> None:
        """Raise InvalidRequest unless the schema is present exactly when the type is json_schema."""
        if (self.type == "json_schema") == (self.json_schema is None):
            problem = (
                "but it is missing" if self.json_schema is None else f"but type is {self.type}"
            )
            raise errors.InvalidRequest(
                f"response_format.json_schema: expected with type json_schema, {problem}",
                param="response_format.json_schema",
            )


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of a tool that must be called."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `tool_choice` that forces one tool."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # beyond OpenAI


class AgentHints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent can predict about its request."""

    priority: Priority | None = None  # a higher value is served first
    osl: Length | None = None  # expected number of output tokens
    # refused, unless they ask for nothing
    strict_priority: None = None
    speculative_prefill: None = None


class AgentContext(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent run that a request belongs to."""

    session_type_id: str | None = None
    session_id: SessionId | None = None
    trajectory_id: str | None = None
    parent_trajectory_id: str | None = None
    trajectory_final: bool | None = None


class SessionControl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The session that a request belongs to."""

    session_id: SessionId
    action: Literal["bind"] | None = None
    timeout: Length | None = None  # seconds


class NvExt(GuidedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dynamo's extensions to a request. A field that also exists at the root of the request is read there first."""

    ignore_eos: bool | None = None
    top_k: TopK | None = None
    repetition_penalty: RepetitionPenalty | None = None
    greed_sampling: bool | None = None
    annotations: Annotated[list[Annotation], msgspec.Meta(max_length=16)] | None = None
    extra_fields: (
        Annotated[list[Literal["worker_id", "timing", "explanation"]], msgspec.Meta(max_length=16)]
        | None
    ) = None
    use_raw_prompt: bool | None = None
    token_data: Annotated[list[UInt32], msgspec.Meta(min_length=1)] | None = None
    backend_instance_id: InstanceId | None = None
    decode_worker_id: InstanceId | None = None
    agent_hints: AgentHints | None = None
    agent_context: AgentContext | None = None
    session_control: SessionControl | None = None
    max_thinking_tokens: UInt32 | None = None
    # refused, unless they ask for nothing
    prefill_worker_id: None = None


_NO_EXTENSIONS = NvExt()


class GenerationInput(GuidedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that every request for generated text has."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    max_tokens: Length | None = None
    stop: Stop | StopList | None = None
    seed: Int64 | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    # beyond OpenAI
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    min_tokens: UInt32 | None = None
    stop_token_ids: Annotated[list[UInt32], msgspec.Meta(max_length=128)] | None = None
    priority: Priority | None = None  # as in vLLM: a lower value is served first
    return_tokens_as_token_ids: bool | None = None
    cache_salt: CacheSalt | None = None  # only requests with the same salt share cached prefixes
    nvext: NvExt | None = None

    @property
    def extensions(self) -> NvExt:
        """The `nvext` object, or an empty one."""
        return self.nvext or _NO_EXTENSIONS

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with a chunk that reports usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """True if every chunk of a stream reports the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        """Number of answers to each prompt that the client receives."""
        return self.n or 1

    @property
    def num_drawn(self) -> int:
        """Number of answers to each prompt that the engine generates; `num_choices` of them are returned."""
        return self.n or 1

    @property
    def is_best_of(self) -> bool:
        """True if the engine generates more answers than the client receives."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report for each token; None disables log probabilities."""
        return None

    @property
    def is_echoed(self) -> bool:
        """True if the answer begins with the prompt."""
        return False

    @property
    def is_scored(self) -> bool:
        """True if nothing is generated and the echoed prompt is the whole answer."""
        return False

    @property
    def instance_id(self) -> int | None:
        """The worker instance that the request names, if any."""
        extensions = self.extensions
        decode_worker_id = extensions.decode_worker_id
        return extensions.backend_instance_id if decode_worker_id is None else decode_worker_id

    @property
    def scheduling_priority(self) -> int:
        """The priority of the request; a higher value is served first."""
        if self.priority is not None:
            return -self.priority
        hints = self.extensions.agent_hints
        return (hints and hints.priority) or 0

    @property
    def session_id(self) -> str | None:
        """The session that the request belongs to, if it names one."""
        if self.nvext is None:
            return None
        control, context = self.nvext.session_control, self.nvext.agent_context
        if control is not None:
            return control.session_id
        return context.session_id if context is not None else None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        if not self.stop:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self) -> None:
        """Raise InvalidRequest for a combination of fields that the types allow and the API does not."""
        if self.stop is not None and not all(self.stop_strings or ("-",)):
            raise errors.InvalidRequest(
                "stop: expected strings of at least one character, got an empty one", param="stop"
            )
        for param, top_k in (("top_k", self.top_k), ("nvext.top_k", self.extensions.top_k)):
            if top_k == 0:
                raise errors.InvalidRequest(
                    f"{param}: expected -1 (all tokens) or at least 1, got 0", param=param
                )
        if self.stream_options is not None:
            self._check_stream_options(self.stream_options)
        if self.return_tokens_as_token_ids and self.num_logprobs is None:
            raise errors.InvalidRequest(
                "return_tokens_as_token_ids: only allowed with logprobs",
                param="return_tokens_as_token_ids",
            )
        if self.nvext is not None:
            self._check_extensions(self.nvext)

    def _check_extensions(self, extensions: NvExt) -> None:
        if "query_instance_id" in (extensions.annotations or ()) and not self.stream:
            raise errors.InvalidRequest(
                "nvext.annotations: the answer to query_instance_id is a stream; expected stream to be true",
                param="nvext.annotations",
            )
        backend_id, decode_id = extensions.backend_instance_id, extensions.decode_worker_id
        if None not in (backend_id, decode_id) and backend_id != decode_id:
            raise errors.InvalidRequest(
                "nvext.decode_worker_id: expected the same as nvext.backend_instance_id, "
                f"{backend_id}, got {decode_id}",
                param="nvext.decode_worker_id",
            )

    def _check_stream_options(self, options: StreamOptions) -> None:
        check_stream_options(
            is_stream=bool(self.stream), has_obfuscation=bool(options.include_obfuscation)
        )
        if options.continuous_usage_stats and not options.include_usage:
            raise errors.InvalidRequest(
                "stream_options.continuous_usage_stats: only allowed when include_usage is true",
                param="stream_options.continuous_usage_stats",
            )


def check_stream_options(*, is_stream: bool, has_obfuscation: bool) -> None:
    """Raise InvalidRequest unless the request is a stream and asks for no obfuscation."""
    if not is_stream:
        raise errors.InvalidRequest(
            "stream_options: only allowed when stream is true", param="stream_options"
        )
    if has_obfuscation:
        raise errors.InvalidRequest(
            "stream_options.include_obfuscation: not supported; expected false or nothing, got true",
            param="stream_options.include_obfuscation",
        )


class Conversation(GenerationInput, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation whose next message is to be generated.

    Messages and tools stay dictionaries, because a chat template walks through them. An API that names a field
    differently overrides the `*_param` properties, which error messages use.
    """

    messages: conversation.Messages
    max_completion_tokens: Length | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    # beyond OpenAI
    chat_template_args: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    @property
    def effort_param(self) -> str:
        """The name of the field that holds the reasoning effort."""
        return "reasoning_effort"

    @property
    def format_param(self) -> str:
        """The name of the field that holds the shape of the answer."""
        return "response_format"

    @property
    def must_limit_thinking(self) -> bool:
        """True if a limit to thinking that the model cannot keep is an error."""
        return True

    @property
    def allows_calls(self) -> bool:
        """True if the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """True if the answer must call a tool."""
        return self.tool_choice == "required" or self.forced_tool is not None

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool that must be called, if one is named."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, NamedTool) else None

    @property
    def template_args(self) -> dict[str, Any]:
        """Variables for the chat template, from either field; `chat_template_args` wins."""
        return {**(self.chat_template_kwargs or {}), **(self.chat_template_args or {})}

    def check(self) -> None:
        """Raise InvalidRequest for messages, tools or combinations of fields that the API does not allow."""
        super().check()
        conversation.check_messages(self.messages)
        if self.tools:
            conversation.check_tools(self.tools)
        if self.response_format is not None:
            self.response_format.check()
