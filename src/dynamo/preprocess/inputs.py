"""Requests as the preprocessor reads them: sampling, stopping, guided answers, extensions, a conversation.

The types know no API. Field names and limits are those of OpenAI and vLLM, so the API folders of the frontend decode
JSON straight into subclasses of them (`frontend.apis.chat`, `completions`), or construct one from their own request
(`messages`, `responses`); nothing is copied in between.

A parameter is honoured; or it is a hint (`Hint`), which cannot change what the answer means; or it is refused by name.
Limits are part of the types, so the JSON decoder checks them in C. A parameter that is refused has a type with values
that ask for nothing: `None`, or the documented default. `runtime.http.json_body` turns a violation into a sentence that
names the field, and takes what no type has as a hint.
"""  # decider

from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.preprocess import conversation
from dynamo.protocols import generate, limits

MAX_TOOLS = 1024
MAX_TEMPLATE_CHARS = 2**16  # of one that a request brings
MAX_BAD_WORDS = 256
Hint = Any  # of a parameter without effect here
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
StopList = Annotated[list[Stop], msgspec.Meta(max_length=64)]
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
GuideText = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.MAX_CHARS)]
FormatName = Annotated[str, msgspec.Meta(max_length=64, pattern="^[a-zA-Z0-9_-]+$")]
TokenIds = Annotated[list[UInt32], msgspec.Meta(min_length=1, max_length=limits.MAX_ALLOWED_IDS)]
TemplateText = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEMPLATE_CHARS)]
BadWord = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
CacheRetention = Literal["in_memory", "in-memory", "24h"]  # the second in OpenAI's older clients
ServiceTier = Literal["auto", "default", "flex", "priority", "scale", "standard_only"]
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


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's later form of the guided decoding fields; at most one of the first five is set."""

    json: dict[str, Any] | GuideText | None = None
    regex: GuideText | None = None
    choice: Annotated[list[GuideText], msgspec.Meta(max_length=limits.MAX_CHOICES)] | None = None
    grammar: GuideText | None = None
    json_object: bool | None = None
    # how the library works
    disable_fallback: Hint = None
    disable_any_whitespace: Hint = None
    disable_additional_properties: Hint = None
    # refused, unless they ask for nothing
    structural_tag: None = None
    whitespace_pattern: None = None


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
            raise errors.InvalidRequest.of_param(
                "response_format.json_schema", f"expected with type json_schema, {problem}"
            )


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of a tool that must be called."""

    name: str


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tools that may be called, or one of which must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)]


class ChosenTools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `tool_choice` that is an object: it forces one tool, or limits the tools."""

    type: Literal["function", "custom", "allowed_tools"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    def check(self) -> None:
        """Raise InvalidRequest unless the object has the key that its type names."""
        if getattr(self, self.type) is None:
            param = f"tool_choice.{self.type}"
            raise errors.InvalidRequest.of_param(param, "required, but missing")


ToolChoice = Literal["none", "auto", "required"] | ChosenTools


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: Hint = None
    continuous_usage_stats: bool | None = None  # beyond OpenAI


class AgentHints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent can predict about its request."""

    priority: Priority | None = None  # a higher value is served first
    osl: Length | None = None  # expected number of output tokens
    # without effect
    strict_priority: Hint = None
    speculative_prefill: Hint = None


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
    cache_control: generate.KvCacheControl | None = None
    max_thinking_tokens: UInt32 | None = None
    # refused, unless they ask for nothing
    prefill_worker_id: None = None


_NO_EXTENSIONS = NvExt()


class EngineFields(GuidedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What vLLM takes beyond OpenAI in each request for generated text, and OpenAI's own options of sampling."""

    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    min_tokens: UInt32 | None = None
    stop: Stop | StopList | None = None
    stop_token_ids: Annotated[list[UInt32], msgspec.Meta(max_length=128)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[BadWord], msgspec.Meta(max_length=MAX_BAD_WORDS)] | None = None
    priority: Priority | None = None  # as in vLLM: a lower value is served first
    cache_salt: CacheSalt | None = None  # only requests with the same salt share cached prefixes
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None  # where tokens are left out
    # without effect
    request_id: Hint = None
    spaces_between_special_tokens: Hint = None
    mm_processor_kwargs: Hint = None
    service_tier: ServiceTier | None = None
    user: str | None = None
    # refused, unless they ask for nothing
    use_beam_search: Literal[False] | None = None
    watermarking: Literal[False] | None = None
    length_penalty: Annotated[float, msgspec.Meta(ge=1, le=1)] | None = None
    logits_processors: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    logprob_token_ids: None = None
    repetition_detection: None = None
    vllm_xargs: None = None
    regex: None = None
    ebnf: None = None
    lora_path: None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        stop = self.stop or ()
        return (stop,) if isinstance(stop, str) else tuple(stop)

    def check(self) -> None:
        """Raise InvalidRequest for what the types allow and no API does."""
        if self.stop is not None and not all(self.stop_strings or ("-",)):
            raise errors.InvalidRequest.of_param(
                "stop", "expected strings of at least one character, got an empty one"
            )


class GenerationInput(EngineFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that every request for generated text has."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    max_tokens: Length | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    response_format: ResponseFormat | None = None  # OpenAI has it in chats only, vLLM everywhere
    # beyond OpenAI
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    nvext: NvExt | None = None

    @property
    def format_param(self) -> str:
        """The name of the field that holds the shape of the answer."""
        return "response_format"

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
    def stops_in_thoughts(self) -> bool:
        """True if a stop string ends the answer also where it stands in a thought, as with OpenAI and vLLM."""
        return True

    @property
    def instance_id(self) -> int | None:
        """The worker instance that the request names, if any."""
        extensions = self.nvext or _NO_EXTENSIONS
        decode_worker_id = extensions.decode_worker_id
        return extensions.backend_instance_id if decode_worker_id is None else decode_worker_id

    @property
    def scheduling_priority(self) -> int:
        """The priority of the request; a higher value is served first."""
        if self.priority is not None:
            return -self.priority
        hints = (self.nvext or _NO_EXTENSIONS).agent_hints
        return (hints and hints.priority) or 0

    @property
    def session_id(self) -> str | None:
        """The session that the request belongs to, if it names one."""
        extensions = self.extensions
        if extensions.session_control is not None:
            return extensions.session_control.session_id
        return extensions.agent_context.session_id if extensions.agent_context else None

    def check(self) -> None:
        """Raise InvalidRequest for a combination of fields that the types allow and the API does not."""
        super().check()
        if self.prompt_logprobs is not None and self.stream:
            raise errors.InvalidRequest.of_param(
                "prompt_logprobs",
                "they come with a whole answer; leave it out, or set stream to false",
            )
        if self.response_format is not None:
            self.response_format.check()
        if self.nvext is not None:
            self._check_extensions(self.nvext)

    def _check_extensions(self, extensions: NvExt) -> None:
        if "query_instance_id" in (extensions.annotations or ()) and not self.stream:
            raise errors.InvalidRequest.of_param(
                "nvext.annotations",
                "the answer to query_instance_id is a stream; expected stream to be true",
            )
        backend_id, decode_id = extensions.backend_instance_id, extensions.decode_worker_id
        if None not in (backend_id, decode_id) and backend_id != decode_id:
            raise errors.InvalidRequest.of_param(
                "nvext.decode_worker_id",
                f"expected the same as nvext.backend_instance_id, {backend_id}, got {decode_id}",
            )


class Conversation(GenerationInput, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation of which the next message is to be generated.

    Messages and tools stay dictionaries, because a chat template walks through them. An API that names a field
    differently overrides the `*_param` properties, which error messages use.
    """

    messages: conversation.Messages
    max_completion_tokens: Length | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_retention: CacheRetention | None = None
    reasoning_effort: ReasoningEffort | None = None
    # beyond OpenAI
    chat_template_args: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: TemplateText | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: UInt32 | None = None

    @property
    def effort_param(self) -> str:
        """The name of the field that holds the reasoning effort."""
        return "reasoning_effort"

    @property
    def max_thinking_tokens(self) -> int | None:
        """The most tokens of a thought, by either name."""
        budget = self.thinking_token_budget
        return (self.nvext or _NO_EXTENSIONS).max_thinking_tokens if budget is None else budget

    @property
    def fits_context(self) -> bool:
        """True if an answer that may be longer than the context allows is shortened, and not an error."""
        return False

    @property
    def must_limit_thinking(self) -> bool:
        """True if a limit to thinking that the model cannot keep is an error."""
        return True

    @property
    def allowed_tools(self) -> list[dict[str, Any]]:
        """The tools that the answer may call, as functions; `tool_choice` may exclude some, or all."""
        choice, tools = self.tool_choice, self.tools or []
        if choice == "none":
            return []
        if isinstance(choice, ChosenTools) and choice.allowed_tools is not None:
            names = {str(conversation.name_of(tool)) for tool in choice.allowed_tools.tools}
            tools = [tool for tool in tools if conversation.name_of(tool) in names]
        return [conversation.to_function(tool) for tool in tools]

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of the tools that take a text as their input."""
        tools = self.tools or ()
        return frozenset(conversation.name_of(tool) for tool in tools if tool["type"] == "custom")

    @property
    def whole_tools(self) -> frozenset[str] | None:
        """The names of the tools with calls that come in one piece; None: all."""
        return self.custom_tools if self.stream else None

    @property
    def allows_calls(self) -> bool:
        """True if the answer may call tools."""
        return bool(self.tools) and bool(self.allowed_tools)

    @property
    def must_call(self) -> bool:
        """True if the answer must call a tool."""
        choice = self.tool_choice
        if not isinstance(choice, ChosenTools):
            return choice == "required"
        subset = choice.allowed_tools
        return self.forced_tool is not None if subset is None else subset.mode == "required"

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool that must be called, if one is named."""
        choice = self.tool_choice
        if not isinstance(choice, ChosenTools):
            return None
        named = choice.function or choice.custom
        return named.name if named is not None else None

    @property
    def template_args(self) -> dict[str, Any]:
        """Variables for the chat template, from either field; `chat_template_args` wins."""
        documents = {} if self.documents is None else {"documents": self.documents}
        return {**documents, **(self.chat_template_kwargs or {}), **(self.chat_template_args or {})}

    def check(self) -> None:
        """Raise InvalidRequest for messages, tools or combinations of fields that the API does not allow."""
        super().check()
        conversation.check_messages(self.messages)
        if self.tools:
            conversation.check_tools(self.tools)
        if isinstance(self.tool_choice, ChosenTools):
            self.tool_choice.check()
        if self.continue_final_message and self.add_generation_prompt:
            raise errors.InvalidRequest.of_param(
                "continue_final_message", "expected add_generation_prompt to be false or left out"
            )
