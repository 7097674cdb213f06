"""Server-sent events, and the interface of the formatters that give an answer the form of its API.

The bytes of a chunk that carries only text are `head + JSON of the text + tail`: `make_template` finds head and tail by
encoding a chunk with a mark in the place of the text.

An answer's `Identity` has what its formatter repeats: id, creation time, model, fingerprint, and the names of tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import xxhash

from dynamo.base import clock as clocks
from dynamo.base import distribution, errors
from dynamo.frontend.delivery import choices
from dynamo.preprocess import detokenize
from dynamo.protocols import generate, model_card
from dynamo.runtime.http import json_body

CONTENT_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode
encode_inline = json_body.encode_inline
_TEXT_MARK = "\u0000"
_MIN_LOGPROB = -9999.0  # JSON has no minus infinity
_FINISH_REASONS = {
    generate.FinishReason.EOS: "stop",
    generate.FinishReason.STOP: "stop",
    generate.FinishReason.LENGTH: "length",
    generate.FinishReason.CONTENT_FILTER: "content_filter",
}


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the prompt's tokens were found in a cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the answer's tokens were reasoning."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a request and its answer, in OpenAI's form."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class PromptLogprob(msgspec.Struct, kw_only=True):
    """The log probability of a token at one place of a prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


# where requested; log probabilities by token id, null for the first token
TokenIds = list[int] | msgspec.UnsetType
PromptLogprobs = list[dict[str, PromptLogprob] | None] | msgspec.UnsetType


class ChoiceFields(msgspec.Struct, kw_only=True):
    """What `choice_fields` adds to a choice."""

    stop_reason: int | str | msgspec.UnsetType = msgspec.UNSET
    token_ids: TokenIds = msgspec.UNSET


class Template(NamedTuple):
    """The bytes around the text in each event of one choice."""

    head: bytes
    tail: bytes


class ChoicePart(msgspec.Struct, frozen=True):
    """What one chunk of a stream says of one choice."""

    index: int
    piece: choices.Piece | None = None
    reports: Sequence[choices.TokenReport] | None = None
    finish_reason: str | None = None
    is_first: bool = False
    token_ids: Sequence[int] | None = None  # None: not requested
    prompt_token_ids: Sequence[int] | None = None  # in a first part, where requested
    stop_token: int | str | None = None
    stop_string: str | None = None


class WholeChoice(msgspec.Struct, frozen=True):
    """A complete choice of an answer that is not streamed."""

    index: int
    pieces: Sequence[choices.Piece]
    finish_reason: str
    reports: Sequence[choices.TokenReport] | None
    stop_string: str | None  # that ended it
    token_ids: Sequence[int] | None = None  # None: not requested
    prompt_token_ids: Sequence[int] | None = None
    prompt_logprobs: Sequence[generate.TokenLogprobs] | None = None  # but of the first token
    stop_token: int | str | None = None


class AnswerFormatter(Protocol):
    """Formats the answers of one API."""

    def whole(self, answers: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
        """Return the complete answer."""
        ...


class ChunkFormatter(AnswerFormatter, Protocol):
    """Formats the streams of an API as chunks of choices."""

    def chunk(self, part: ChoicePart) -> dict[str, Any]:
        """Return the chunk for a part of one choice."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the last chunk of a stream that reports usage."""
        ...


class EventFormatter(AnswerFormatter, Protocol):
    """Formats the streams of an API as typed events in an order; each method returns the events to send."""

    def begin(self, usage: Usage) -> bytes:
        """Return the events before any piece."""
        ...

    def piece(self, piece: choices.Piece) -> bytes:
        """Return the events for a piece of the answer."""
        ...

    def end(self, finish_reason: str, stop_string: str | None, usage: Usage) -> bytes:
        """Return the events after all pieces; `stop_string` is the one that ended the answer."""
        ...

    def error(self, error: errors.DynamoError) -> bytes:
        """Return the last event of a failed stream."""
        ...


def encode_line(data: Any) -> bytes:
    """Return a line of JSON; line breaks between the arguments of a call, as its model wrote them, become blanks."""
    return encode_inline(data).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"


def event(data: Any) -> bytes:
    return b"data: " + encode_inline(data) + b"\n\n"


def typed_event(data: dict[str, Any]) -> bytes:
    """Return an event with the `type` in its data as its name."""
    return f"event: {data['type']}\ndata: ".encode() + encode_inline(data) + b"\n\n"


def annotation(name: str, value: str) -> bytes:
    """Return an event with an annotation of the request: a comment, which clients of the API skip."""
    return b"event: " + name.encode() + b"\n: " + encode_inline(value) + b"\n\n"


def make_template(
    formatter: ChunkFormatter, index: int, extra: dict[str, Any], piece: choices.Piece = ""
) -> Template | None:
    """Return head and tail of the events for pieces like this one of a choice; None if they do not show the text.

    `extra` are further fields of each chunk.
    """
    marked: choices.Piece = _TEXT_MARK
    if isinstance(piece, choices.Call):
        marked = dataclasses.replace(piece, arguments=_TEXT_MARK)
    elif not isinstance(piece, str):
        marked = dataclasses.replace(piece, text=_TEXT_MARK)
    chunk = event({**formatter.chunk(ChoicePart(index, marked)), **extra})
    head, mark, tail = chunk.rpartition(encode(_TEXT_MARK))
    return Template(head, tail) if mark else None


def finish_reason(choice: choices.Choice) -> str:
    """Return why a choice ended, in OpenAI's words."""
    assert choice.finish_reason is not None
    reason = _FINISH_REASONS[choice.finish_reason]
    return "tool_calls" if choice.num_calls and reason == "stop" else reason


def choice_fields(part: ChoicePart | WholeChoice) -> dict[str, Any]:
    """Return what vLLM adds to a choice: the stop string or token that ended it, and the tokens' ids if requested.

    Unlike vLLM's, a choice that ended otherwise has no `stop_reason`: OpenAI's schema does not know it.
    """
    stop = part.stop_token if part.stop_string is None else part.stop_string
    fields: dict[str, Any] = {} if stop is None else {"stop_reason": stop}
    if part.token_ids is not None:
        fields["token_ids"] = part.token_ids
    return fields


def prompt_fields(
    part: ChoicePart | WholeChoice, token_text: Callable[[int], str]
) -> dict[str, Any]:
    """Return the prompt's token ids and log probabilities as vLLM returns them, where requested.

    The rank of a token is known if it is one of the likeliest that were asked for.
    """
    fields: dict[str, Any] = {}
    if part.prompt_token_ids is not None and part.token_ids is not None:
        fields["prompt_token_ids"] = part.prompt_token_ids
    if isinstance(part, WholeChoice) and part.prompt_logprobs is not None:
        rows: list[dict[str, Any] | None] = [None]
        for token_id, token in zip(
            (part.prompt_token_ids or ())[1:], part.prompt_logprobs, strict=False
        ):
            ranks = {top.token_id: rank for rank, top in enumerate(token.top, 1)}
            by_id = {token_id: token.logprob} | {top.token_id: top.logprob for top in token.top}
            rows.append(
                {
                    str(key): {
                        "logprob": finite(logprob),
                        "rank": ranks.get(key),
                        "decoded_token": token_text(key),
                    }
                    for key, logprob in by_id.items()
                }
            )
        fields["prompt_logprobs"] = rows
    return fields


def finite(logprob: float) -> float:
    """Return the log probability as a number that JSON can hold."""
    return max(logprob, _MIN_LOGPROB)


_VERSION = distribution.version()
_encode = msgspec.json.Encoder(order="sorted").encode


class TokenNames(Protocol):
    """Names of tokens in log probabilities."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of a token."""
        ...


class IdTokenNames:
    """Names tokens by id, `token_id:7`, as vLLM does: texts are not unique, and part of a character has none."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the name as bytes."""
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        """Return the name."""
        return f"token_id:{token_id}"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of one answer."""

    request_id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str
    text: detokenize.TextDecoder  # the model's tokens
    sampling: generate.SamplingOptions  # with the defaults of the model
    context_length: int
    clock: clocks.Clock

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """Return the fields that OpenAI's objects of this kind begin with."""
        return {
            "id": prefix + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def token_names(self, *, by_id: bool | None) -> TokenNames:
        return IdTokenNames() if by_id else self.text


def fingerprint(card: model_card.ModelCard, *adapter: str) -> str:
    """Return an id of model files, engine settings and release: with equal ids and seeds, answers are equal."""
    facts = (
        _VERSION,
        card.checksums,
        card.context_length,
        card.kv_cache_block_size,
        card.runtime_config,
        *adapter,
    )
    return f"fp_{xxhash.xxh3_64_hexdigest(_encode(facts))[:10]}"
