"""What a chat and a completion request have in common.

Every documented parameter of OpenAI's API is either honoured or refused by name, never ignored. Limits stand in the
types, so that the JSON decoder checks them in C. A parameter that this version cannot honour has the type of the
values that ask for nothing: `None`, or a `Literal`. Only a request that is wrong pays for a sentence that says so
(`openai_decode`).
"""

from typing import Annotated, Literal

import msgspec

from dynamo.base import errors
from dynamo.protocols import openai_guided, openai_nvext

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
UInt32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Length = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
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


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # beyond OpenAI


class NvExt(openai_guided.GuidedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Extensions that the original keeps in a field of their own. What also stands at the root is taken from there."""

    ignore_eos: bool | None = None
    top_k: TopK | None = None
    repetition_penalty: RepetitionPenalty | None = None
    greed_sampling: bool | None = None
    annotations: Annotated[list[openai_nvext.Annotation], msgspec.Meta(max_length=16)] | None = None
    extra_fields: Annotated[list[openai_nvext.ExtraField], msgspec.Meta(max_length=16)] | None = (
        None
    )
    use_raw_prompt: bool | None = None
    token_data: openai_nvext.TokenData | None = None
    backend_instance_id: openai_nvext.InstanceId | None = None
    decode_worker_id: openai_nvext.InstanceId | None = None
    agent_hints: openai_nvext.AgentHints | None = None
    agent_context: openai_nvext.AgentContext | None = None
    session_control: openai_nvext.SessionControl | None = None
    max_thinking_tokens: UInt32 | None = None
    # refused, unless they ask for nothing
    prefill_worker_id: None = None


_NO_NVEXT = NvExt()


class GenerationFields(
    openai_guided.GuidedFields, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """What chat and completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    max_tokens: Length | None = None
    stop: Stop | StopList | None = None
    seed: Int64 | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
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
    priority: openai_nvext.Priority | None = None  # as vLLM has it: the lower is served first
    return_tokens_as_token_ids: bool | None = None
    nvext: NvExt | None = None

    @property
    def extensions(self) -> NvExt:
        """`nvext`, or an empty one."""
        return self.nvext or _NO_NVEXT

    @property
    def include_usage(self) -> bool:
        """Does a stream end with a chunk that tells usage?"""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """Does every chunk of a stream tell usage so far?"""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        """How many answers to a prompt."""
        return self.n or 1

    @property
    def num_drawn(self) -> int:
        """How many answers the engine shall give, of which `num_choices` are told."""
        return self.n or 1

    @property
    def is_chosen(self) -> bool:
        """Does the engine give more answers than are told?"""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each token; None: no log probabilities at all."""
        return None

    @property
    def is_echoed(self) -> bool:
        """Does the answer begin with the prompt?"""
        return False

    @property
    def is_scored(self) -> bool:
        """Is nothing to be written: is the prompt itself the answer?"""
        return False

    @property
    def instance_id(self) -> int | None:
        """The worker to ask."""
        extensions = self.extensions
        named = extensions.decode_worker_id
        return extensions.backend_instance_id if named is None else named

    @property
    def urgency(self) -> int:
        """Requests of a higher one are served first."""
        if self.priority is not None:
            return -self.priority
        hints = self.extensions.agent_hints
        return (hints and hints.priority) or 0

    @property
    def session_id(self) -> str | None:
        """The conversation that this belongs to."""
        if self.nvext is None:
            return None
        control, context = self.nvext.session_control, self.nvext.agent_context
        if control is not None:
            return control.session_id
        return context.session_id if context is not None else None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if not self.stop:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        if self.stop is not None and not all(self.stops or ("-",)):
            raise errors.InvalidRequest(
                "stop: expected strings of at least one character, got an empty one", param="stop"
            )
        for place, top_k in (("top_k", self.top_k), ("nvext.top_k", self.extensions.top_k)):
            if top_k == 0:
                raise errors.InvalidRequest(
                    f"{place}: expected -1 (all tokens) or at least 1, got 0", param=place
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
        one, other = extensions.backend_instance_id, extensions.decode_worker_id
        if None not in (one, other) and one != other:
            raise errors.InvalidRequest(
                f"nvext.decode_worker_id: expected the same as nvext.backend_instance_id, {one}, got {other}",
                param="nvext.decode_worker_id",
            )

    def _check_stream_options(self, options: StreamOptions) -> None:
        if not self.stream:
            raise errors.InvalidRequest(
                "stream_options: only allowed when stream is true", param="stream_options"
            )
        if options.include_obfuscation:
            raise errors.InvalidRequest(
                "stream_options.include_obfuscation: not supported; expected false or nothing, got true",
                param="stream_options.include_obfuscation",
            )
        if options.continuous_usage_stats and not options.include_usage:
            raise errors.InvalidRequest(
                "stream_options.continuous_usage_stats: only allowed when include_usage is true",
                param="stream_options.continuous_usage_stats",
            )
