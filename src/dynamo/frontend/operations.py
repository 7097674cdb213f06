"""What each route is, in one entry: from these `/openapi.json` and `/docs` are made.

A new route needs an entry here beside its handler in `app`; a test compares the two. The type of a request is the one
by which it is decoded, so its description cannot drift.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo.frontend import status_answers, token_counts
from dynamo.frontend.admission import load_thresholds
from dynamo.observability import metrics
from dynamo.protocols import (
    anthropic,
    anthropic_answers,
    anthropic_errors,
    kserve,
    kserve_errors,
    openai_answers,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_errors,
    openai_responses,
    tokenization,
)

ANY_ID = "*"  # ends a pattern whose last part is an id
_HTTP = (408, 413, 415)  # what the HTTP server says of a body
_KEYS = (401, 403, 429)  # what the door says, where keys are needed
READS = (400, *_KEYS, 404, *_HTTP, 503)  # errors of a route that works on what it is asked
GENERATES = (*READS, 500, 504)  # and of one that asks a worker
_HTML = "text/html; charset=utf-8"
_HI = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    summary: str
    tag: str
    answer: type | str  # the type of its JSON, or the media type of its text
    request: type | None = None
    events: type | None = None  # of the data, if the answer may be a stream
    ends_with_done: bool = False  # the stream's last event is [DONE]
    others: Mapping[int, type] = field(default_factory=dict)  # answers of other statuses
    errors: Sequence[int] = ()
    error_body: type = openai_errors.ErrorBody
    example: Mapping[str, Any] = field(default_factory=dict)  # a body; `model` is filled in


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        summary="Answer a conversation, as OpenAI's chat does",
        tag="OpenAI",
        request=openai_chat.ChatRequest,
        answer=openai_answers.ChatCompletion,
        events=openai_answers.ChatChunk,
        ends_with_done=True,
        errors=GENERATES,
        example={"messages": _HI, "max_tokens": 60},
    ),
    ("POST", "/v1/completions"): Operation(
        summary="Continue a text",
        tag="OpenAI",
        request=openai_completions.CompletionRequest,
        answer=openai_answers.Completion,
        events=openai_answers.Completion,
        ends_with_done=True,
        errors=GENERATES,
        example={"prompt": "Once upon a time", "max_tokens": 60},
    ),
    ("POST", "/v1/responses"): Operation(
        summary="Answer, and keep the answer to go on from",
        tag="OpenAI",
        request=openai_responses.ResponsesRequest,
        answer=openai_answers.Response,
        events=openai_answers.ResponseEvent,
        errors=GENERATES,
        example={"input": "Who are you?", "max_output_tokens": 60},
    ),
    ("GET", "/v1/responses/*"): Operation(
        summary="An answer that was kept",
        tag="OpenAI",
        answer=openai_answers.Response,
        errors=(400, *_KEYS, 404),
    ),
    ("DELETE", "/v1/responses/*"): Operation(
        summary="Forget it",
        tag="OpenAI",
        answer=openai_answers.DeletedResponse,
        errors=(*_KEYS, 404),
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        summary="Count the tokens of such a request",
        tag="OpenAI",
        request=openai_responses.Prompted,
        answer=token_counts.ResponseTokens,
        errors=READS,
        example={"input": "Who are you?"},
    ),
    ("GET", "/v1/models"): Operation(
        summary="The models that can be asked",
        tag="OpenAI",
        answer=openai_answers.ModelList,
        errors=_KEYS,
    ),
    ("GET", "/v1/models/*"): Operation(
        summary="One of them", tag="OpenAI", answer=openai_answers.Model, errors=(*_KEYS, 404)
    ),
    ("POST", "/v1/messages"): Operation(
        summary="Answer a conversation, as Anthropic's messages do",
        tag="Anthropic",
        request=anthropic.MessageRequest,
        answer=anthropic_answers.MessageAnswer,
        events=anthropic_answers.MessageEvent,
        errors=(*GENERATES, 529),
        error_body=anthropic_errors.ErrorBody,
        example={"messages": _HI, "max_tokens": 60},
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        summary="Count the tokens of such a request",
        tag="Anthropic",
        request=anthropic.Conversation,
        answer=token_counts.MessageTokens,
        errors=READS,
        error_body=anthropic_errors.ErrorBody,
        example={"messages": _HI},
    ),
    ("POST", "/v1/embeddings"): Operation(
        summary="Vectors of texts",
        tag="OpenAI",
        request=openai_embeddings.EmbeddingRequest,
        answer=openai_embeddings.EmbeddingList,
        errors=GENERATES,
        example={"input": ["A cat sat on a mat.", "Where was the cat?"]},
    ),
    ("POST", "/v2/models/*"): Operation(
        summary="Answer, where /infer or /infer_stream stands behind the model's name; "
        "/generate and /generate_stream take a text_input instead of tensors",
        tag="KServe",
        request=kserve.InferBody,
        answer=dict[str, Any],
        errors=(*GENERATES, 405),
        error_body=kserve_errors.ErrorBody,
    ),
    ("GET", "/v2/models/*"): Operation(
        summary="A model's tensors; behind its name may stand /config or /ready",
        tag="KServe",
        answer=dict[str, Any],
        errors=(400, *_KEYS, 404, 405, 503),
        error_body=kserve_errors.ErrorBody,
    ),
    ("GET", "/v2"): Operation(
        summary="What this server is",
        tag="KServe",
        answer=dict[str, Any],
        errors=_KEYS,
        error_body=kserve_errors.ErrorBody,
    ),
    ("GET", "/v2/health/live"): Operation(
        summary="200 as long as the process lives", tag="KServe", answer=dict[str, Any]
    ),
    ("GET", "/v2/health/ready"): Operation(
        summary="200 if somebody can answer, else 503",
        tag="KServe",
        answer=dict[str, Any],
        others={503: dict[str, Any]},
    ),
    ("POST", "/tokenize"): Operation(
        summary="From text, or a conversation, to token ids",
        tag="Tokens",
        request=tokenization.TokenizeRequest,
        answer=tokenization.Tokenized,
        errors=READS,
        example={"prompt": "Once upon a time"},
    ),
    ("POST", "/detokenize"): Operation(
        summary="From token ids to text",
        tag="Tokens",
        request=tokenization.DetokenizeRequest,
        answer=tokenization.Detokenized,
        errors=READS,
        example={"tokens": [1, 2, 3]},
    ),
    ("POST", "/clear_kv_blocks"): Operation(
        summary="All workers forget what they have cached",
        tag="Operation",
        answer=status_answers.Cleared,
        errors=(*_KEYS, 408, 413),
    ),
    ("GET", "/busy_threshold"): Operation(
        summary="From when on workers count as busy",
        tag="Operation",
        answer=status_answers.AllThresholds,
        errors=_KEYS,
    ),
    ("POST", "/busy_threshold"): Operation(
        summary="Change it for one model; what is left out stays, and null is no threshold",
        tag="Operation",
        request=load_thresholds.ThresholdChange,
        answer=status_answers.ModelThresholds,
        errors=READS,
        example={"active_decode_blocks_threshold": 0.9},
    ),
    ("GET", "/health"): Operation(
        summary="200 if somebody can answer, else 503",
        tag="Operation",
        answer=status_answers.Healthy,
        others={503: status_answers.Unhealthy},
    ),
    ("GET", "/live"): Operation(
        summary="200 as long as the process lives", tag="Operation", answer=status_answers.Live
    ),
    ("GET", "/metrics"): Operation(
        summary="Prometheus's format", tag="Operation", answer=metrics.CONTENT_TYPE
    ),
    ("GET", "/openapi.json"): Operation(
        summary="This description", tag="Operation", answer=dict[str, Any], errors=_KEYS
    ),
    ("GET", "/docs"): Operation(
        summary="This description, to be read by people",
        tag="Operation",
        answer=_HTML,
        errors=_KEYS,
    ),
    ("GET", "/"): Operation(
        summary="Models, and where to look, for people", tag="Operation", answer=_HTML
    ),
}
