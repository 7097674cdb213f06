"""The internal request for text, and the outputs of an engine, step by step.

The frontend turns the request of every API (chat, completions, ...) into a `Request`: token ids, no text. Every engine
accepts it and answers with `Output`s, each the tokens of one engine step for one choice. Templates and text are the
frontend's matter.

`Request` travels as a map with defaults left out, once; `Output` travels as a short array, once per step.
"""

from enum import StrEnum
from typing import Literal

import msgspec

from dynamo.protocols import blocks, kv_transfer


class FinishReason(StrEnum):
    """The reason why a choice is complete; one that its engine gave up, or that failed, ends by an error."""

    EOS = "eos"  # an end token of the model
    STOP = "stop"  # a stop token or stop string of the request
    LENGTH = "length"  # max_tokens reached, or the context is full
    CONTENT_FILTER = "content_filter"


class StopConditions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The conditions that end a choice. Stop *strings* are found by the frontend, where there is text."""

    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0  # no end token or stop token ends the choice earlier
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class GuidedReasoning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Free text that a model may write before a guided answer; it ends with one of `closes`.

    The text begins with one of `opens` and may be absent. Without any `opens` the prompt has already begun the text.
    """

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...]


class ToolSchema(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool that may be called. `parameters` is the JSON schema of its arguments, a JSON object."""

    name: str
    parameters: str


class GuidedToolCalls(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of tool calls: `begin`, one or more `{"name": ..., "arguments": ...}` separated by `between`, `end`."""

    tools: tuple[ToolSchema, ...]
    begin: str
    between: str
    end: str
    max_calls: int = 1


class GuidedDecoding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form that an answer must have. With `calls` and another form, the answer has one of the two."""

    json: str | None = None  # a JSON schema
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # Lark, or GBNF
    calls: GuidedToolCalls | None = None
    backend: str | None = None  # the library that the client asks for
    thoughts: GuidedReasoning | None = None
    param: str = "guided_decoding"  # the client's parameter, for error messages


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling of a token. Temperature 0 is greedy; then top_k, top_p and min_p have no effect."""

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output; 1: none
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # no other token comes; empty: all may come
    guided_decoding: GuidedDecoding | None = None


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The log probabilities to report with the tokens."""

    logprobs: int | None = None  # alternatives reported with the chosen token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for the prompt, which is computed whole


class ThinkingLimit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limit of a choice's reasoning tokens. Reasoning begins and ends with one of these tokens."""

    max_tokens: int
    close_ids: tuple[int, ...]  # the first one is written at the limit
    open_ids: tuple[int, ...] = ()
    is_open: bool = False  # the prompt has begun the reasoning


class CacheHint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The client's wish for the blocks of a request in the cache tiers below the engine's memory."""

    ttl_s: int = 0  # seconds after their last use during which others are evicted first
    is_pinned: bool = False  # for these seconds they are not evicted at all
    is_memory_only: bool = False  # they are not written to a disk or an object store


class KvCacheControl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's words for a `CacheHint`."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h", "24h"] = "5m"
    pin: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request to an engine. `token_ids` is packed (`blocks.pack`).

    A *resumed* request continues an answer that another worker began: the last `num_resumed` tokens of `token_ids` are
    output, for penalties, grammars, reasoning and seeds. max_tokens, min_tokens and logprobs apply to new tokens only.
    """

    id: str
    model: str
    token_ids: bytes
    stop_conditions: StopConditions = StopConditions()
    sampling_options: SamplingOptions = SamplingOptions()
    output_options: OutputOptions = OutputOptions()
    eos_token_ids: tuple[int, ...] = ()
    annotations: tuple[str, ...] = ()
    priority: int = 0
    lora_name: str | None = None
    cache_salt: str | None = None  # only requests with the same salt share cached blocks
    cache_hint: CacheHint | None = None
    data_parallel_rank: int | None = None
    thinking: ThinkingLimit | None = None
    session_id: str | None = None  # the conversation that the request belongs to
    expected_output_tokens: int | None = None  # the client's estimate, for routers and planners
    kv_transfer_params: kv_transfer.KvTransferParams | None = None
    prefix_source: kv_transfer.PrefixSource | None = None  # a worker that has more of it cached
    num_resumed: int = 0  # tokens at the end of `token_ids` that are part of the answer
    first_choice: int = 0  # the client's index of choice 0; a choice's seed depends on it
    # files (PNG, JPEG ...), in the order of their places in the prompt
    images: tuple[bytes, ...] = ()
    text_len: int = 0  # with images: the tokens before the first one

    @property
    def hash_seed(self) -> int:
        """The seed of the local hashes of its blocks."""
        return blocks.seed_of(self.lora_name, self.cache_salt)

    @property
    def hashed_ids(self) -> bytes:
        """The tokens that decide by themselves what is cached: with images only those before the first one."""
        return (
            self.token_ids[: self.text_len * blocks.TOKEN_BYTES] if self.images else self.token_ids
        )

    @property
    def prompt_len(self) -> int:
        """The number of tokens in the prompt. An image has one or a few; the engine puts its own number in there."""
        return blocks.count(self.token_ids)


TopLogprob = kv_transfer.TopLogprob
TokenLogprobs = kv_transfer.TokenLogprobs


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of one engine step for one choice of one request.

    `token_ids` holds the new tokens in order, including the one that ended the choice (end token or stop token).
    Only the first output of a request carries `cached_tokens`, the number of prompt tokens that were in the cache,
    and, where requested, `prompt_logprobs`, those of each token of the prompt but the first, in order. With images it
    has the `prompt_len` that the engine computed.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int | None = None
    stop_reason: int | str | None = None  # the stop token id that ended the choice
    kv_transfer_params: kv_transfer.KvTransferParams | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    tier_tokens: tuple[tuple[str, int], ...] | None = None  # of `cached_tokens`, in slower tiers
    prompt_len: int | None = None
