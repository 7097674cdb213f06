"""The one internal request, and what an engine answers, step by step.

The frontend turns every API (chat, completions, ...) into a `Request`: token ids, no text. Every engine takes it, and
answers with `Output`s: the tokens of one engine step for one choice. Neither knows of templates or text.

`Request` travels as a map with defaults left out, once; `Output` travels as a short array, once per step.
"""

from enum import StrEnum

import msgspec

from dynamo.protocols import blocks, kv_transfer, logprobs


class FinishReason(StrEnum):
    """Why a choice ended."""

    EOS = "eos"  # the model ended it
    STOP = "stop"  # a stop token or string of the request
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # the caller went away
    ERROR = "error"
    CONTENT_FILTER = "content_filter"


class StopConditions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When to end a choice. Stop *strings* are found by whoever makes text, not by the engine."""

    max_tokens: int | None = None  # None: as far as the context goes
    min_tokens: int = 0  # neither eos nor stop ids end it before
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Thoughts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What may stand before a guided answer: free text that ends with one of `closes`.

    It must begin with one of `opens`, and may be left out; without any `opens` the prompt has begun it already.
    """

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...]


class ToolSchema(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool that may be called, and the JSON schema of its arguments, which are an object."""

    name: str
    parameters: str


class Calls(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Calls of tools: `begin`, one or more `{"name": ..., "arguments": ...}` with `between` between them, `end`."""

    tools: tuple[ToolSchema, ...]
    begin: str
    between: str
    end: str
    max_calls: int = 1


class GuidedDecoding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer must look like: one of `json`, `regex`, `choice`, `grammar`, or `calls`, or either of two."""

    json: str | None = None  # a JSON schema
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # Lark, or GBNF
    calls: Calls | None = None
    backend: str | None = None  # the library that is wanted
    thoughts: Thoughts | None = None
    param: str = "guided_decoding"  # what the caller called it: a refusal names it


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a token is drawn. Temperature 0 is greedy: the rest of the shape does not matter then."""

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output; 1: none
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    guided_decoding: GuidedDecoding | None = None


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to report beside the tokens."""

    logprobs: int | None = (
        None  # how many alternatives beside the chosen token; None: no logprobs at all
    )
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, which are then computed


class ThinkingLimit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long a choice may think. A thought begins and ends with one of these tokens."""

    max_tokens: int
    close_ids: tuple[int, ...]  # the first is the one to write
    open_ids: tuple[int, ...] = ()
    is_open: bool = False  # the prompt has begun the thought


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as an engine sees it. `token_ids` is packed (`blocks.pack`).

    A *resumed* request goes on with an answer that is there in part: for penalties, grammars, thoughts and seeds its
    last `num_resumed` tokens are output. Limits (max_tokens, min_tokens) and logprobs are of what follows.
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
    data_parallel_rank: int | None = None
    thinking: ThinkingLimit | None = None
    session_id: str | None = None  # the conversation that it belongs to
    expected_output_tokens: int | None = None  # what the caller expects; a hint to who plans
    kv_transfer_params: kv_transfer.KvTransferParams | None = None
    # Of what another worker began, and did not live to end: `token_ids` ends with its tokens.
    num_resumed: int = 0  # how many of the last tokens are answer already
    first_choice: int = 0  # which choice our choice 0 is in the eyes of the caller: seeds go by it

    @property
    def prompt_len(self) -> int:
        """Tokens in the prompt."""
        return blocks.count(self.token_ids)


TopLogprob = logprobs.TopLogprob
TokenLogprobs = logprobs.TokenLogprobs


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step brought for one choice of one request.

    `token_ids` holds what is new, oldest first; the token that ended a choice (eos or stop id) is included.
    `cached_tokens` is told once, with the first output of a request: prompt tokens that were not computed again.
    So are `prompt_logprobs`, if asked for: of each token of the prompt but the first, in order.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int | None = None
    stop_reason: int | str | None = None  # the stop token id that ended it
    kv_transfer_params: kv_transfer.KvTransferParams | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
