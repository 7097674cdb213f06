"""OpenAI's `POST /v1/completions`: its requests and its answers, as chunks of a stream or one body.

Choices are numbered over all prompts: prompt number * n + number of the choice.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.frontend import pipeline
from dynamo.frontend.apis import error_dialects, openapi
from dynamo.frontend.apis.operation import GENERATION_ERRORS, Operation, RequestHandlers
from dynamo.frontend.delivery import choices, sse, streaming
from dynamo.preprocess import inputs, options, preprocessor
from dynamo.runtime.http import json_body

MAX_ANSWERS = 2048  # to all prompts of a request together
MAX_BEST_OF = 20
MAX_SENT_BYTES = 32 * 2**20  # of all prompts: a worker's connection breaks when 64 MiB wait for it


class CompletionRequest(
    inputs.GenerationInput, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Text to continue; several prompts are several continuations."""

    prompt: str | list[str | inputs.UInt32 | list[inputs.UInt32]]
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=MAX_BEST_OF)] | None = None
    suffix: str | None = None
    prompt_embeds: None = None  # refused, unless it asks for nothing

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_drawn(self) -> int:
        return self.best_of or self.num_choices

    @property
    def is_best_of(self) -> bool:
        return self.num_drawn > self.num_choices

    @property
    def is_echoed(self) -> bool:
        return bool(self.echo)

    @property
    def is_scored(self) -> bool:
        return self.max_tokens == 0

    @property
    def prompts(self) -> list[inputs.Prompt]:
        """One or more prompts, each a text or token ids."""
        if self.extensions.token_data is not None:
            return [self.extensions.token_data]
        return split_prompts(self.prompt)

    @property
    def prompt_param(self) -> str:
        """The name of the field that holds the prompts."""
        return "prompt" if self.extensions.token_data is None else "nvext.token_data"

    def check(self) -> None:
        super().check()
        if not isinstance(self.prompt, str):
            self._check_prompts(self.prompt)
        if self.is_scored and not self.echo:
            raise errors.InvalidRequest.of_param(
                "max_tokens", "expected at least 1, got 0; 0 is only allowed with echo"
            )
        if self.extensions.max_thinking_tokens is not None:
            raise errors.InvalidRequest.of_param(
                "nvext.max_thinking_tokens", "a completion is all content; only allowed in a chat"
            )
        if self.suffix and self.echo:
            raise errors.InvalidRequest.of_param("suffix", "not supported together with echo")
        if self.best_of is not None:
            self._check_best_of(self.best_of)

    def _check_prompts(self, prompt: list[str | int | list[int]]) -> None:
        check_one_kind(prompt, "prompt")
        is_single = len(prompt) == 1 or isinstance(prompt[0], int)
        if not isinstance(prompt[0], int) and len(prompt) * self.num_drawn > MAX_ANSWERS:
            raise errors.InvalidRequest.of_param(
                "prompt",
                f"expected at most {MAX_ANSWERS} answers to all prompts together, "
                f"got {len(prompt)} prompts and n (or best_of) of {self.num_drawn}",
            )
        if self.extensions.token_data is not None and not is_single:
            raise errors.InvalidRequest.of_param(
                "nvext.token_data", f"it stands for one prompt; got {len(prompt)} in prompt"
            )

    def _check_best_of(self, best_of: int) -> None:
        if best_of < self.num_choices:
            raise errors.InvalidRequest.of_param(
                "best_of", f"expected at least n, which is {self.num_choices}, got {best_of}"
            )
        if best_of > self.num_choices and self.stream:
            raise errors.InvalidRequest.of_param(
                "best_of",
                "which answers are the best is known at their end; expected n or nothing "
                f"when stream is true, got {best_of}",
            )


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[inputs.Prompt]:
    """Return the prompts in this field, after `check_one_kind` has checked it."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]  # all are ids
    return prompt  # type: ignore[return-value]  # none is an id


def check_one_kind(prompts: list[str | int | list[int]], param: str) -> None:
    """Raise InvalidRequest, which names `param`, for an empty or a mixed list."""
    if len(set(map(type, prompts))) != 1:
        raise errors.InvalidRequest.of_param(
            param,
            "expected a string, or a list of strings, of token ids, or of lists of token ids, got "
            + ("a mixed list" if prompts else "an empty list"),
        )


decode = json_body.RequestDecoder(CompletionRequest).decode


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a choice; the lists have one length."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(sse.ChoiceFields, kw_only=True):
    """One of the `n` answers to one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "content_filter"] | None  # null: the stream goes on
    prompt_token_ids: sse.TokenIds = msgspec.UNSET
    prompt_logprobs: sse.PromptLogprobs = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The whole answer, and the data of an event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: sse.Usage | None = None
    nvext: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # as `nvext.extra_fields` names them


class CompletionFormatter:
    """Formats the answer to one request."""

    def __init__(self, request: CompletionRequest, answer_identity: sse.Identity) -> None:
        self._head = answer_identity.head("cmpl-", "text_completion")
        names = answer_identity.token_names(by_id=request.return_tokens_as_token_ids)
        self._token_text = names.token_text

    def chunk(self, part: sse.ChoicePart) -> dict[str, Any]:
        """Return the chunk for a part of one choice; a first chunk is like the others."""
        text = content_of(part.piece)
        row = self._choice(part.index, text, part.reports, part.finish_reason)
        return self._object([{**row, **self._token_fields(part)}])

    def usage_chunk(self, usage: sse.Usage) -> dict[str, Any]:
        return {**self._object([]), "usage": usage}

    def whole(self, answers: Sequence[sse.WholeChoice], usage: sse.Usage) -> dict[str, Any]:
        rows = [
            {
                **self._choice(
                    answer.index,
                    "".join(map(content_of, answer.pieces)),
                    answer.reports,
                    answer.finish_reason,
                ),
                **self._token_fields(answer),
            }
            for answer in answers
        ]
        return {**self._object(rows), "usage": usage}

    def _token_fields(self, part: sse.ChoicePart | sse.WholeChoice) -> dict[str, Any]:
        return sse.choice_fields(part) | sse.prompt_fields(part, self._token_text)

    def _object(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "choices": rows}

    def _choice(
        self,
        index: int,
        text: str,
        reports: Sequence[choices.TokenReport] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None if reports is None else self._logprobs(reports),
            "finish_reason": finish_reason,
        }

    def _logprobs(self, reports: Sequence[choices.TokenReport]) -> dict[str, Any]:
        return {
            "tokens": [self._token_text(report.token_id) for report in reports],
            "token_logprobs": [
                report.logprobs and sse.finite(report.logprobs.logprob) for report in reports
            ],
            "top_logprobs": [self._top_logprobs(report) for report in reports],
            "text_offset": [report.start for report in reports],
        }

    def _top_logprobs(self, report: choices.TokenReport) -> dict[str, float] | None:
        """Return the likeliest tokens and the sampled one, which is last unless it is among them.

        Of tokens with one text, as parts of characters are, it is that of the likeliest.
        """
        if report.logprobs is None:
            return None
        text = self._token_text
        top: dict[str, float] = {}
        for token in report.logprobs.top:
            top.setdefault(text(token.token_id), sse.finite(token.logprob))
        top.setdefault(text(report.token_id), sse.finite(report.logprobs.logprob))
        return top


def content_of(piece: choices.Piece | None) -> str:
    """Return the text of a piece; a completion has no others than content."""
    return piece if isinstance(piece, str) else ""


async def prepare(
    preparer: preprocessor.Preprocessor, completion: CompletionRequest, request_id: str
) -> Sequence[preprocessor.Prepared]:
    """Prepare each prompt of the request. Raises RequestError."""
    prepared = await preparer.prepare_prompts(
        completion,
        request_id,
        prompts=completion.prompts,
        suffix=completion.suffix,
        param=completion.prompt_param,
    )
    num_tokens = sum(prompt.request.prompt_len for prompt in prepared)
    options.check_repeated(completion, completion.num_drawn * num_tokens)
    if len(prepared) > 1:
        empty = msgspec.structs.replace(prepared[0].request, token_ids=b"")
        num_bytes = len(prepared) * len(msgspec.msgpack.encode(empty))  # each is sent with them
        num_bytes += sum(len(prompt.request.token_ids) for prompt in prepared)
        if num_bytes > MAX_SENT_BYTES:
            raise errors.InvalidRequest.of_param(
                completion.prompt_param,
                f"expected prompts of at most {MAX_SENT_BYTES} bytes together, each with the options of the request, "
                f"got {num_bytes}",
            )
    return prepared


API = pipeline.GenerationApi(
    endpoint="completions",
    decode=decode,
    prepare=prepare,
    make_formatter=CompletionFormatter,
    stream=streaming.StreamDelivery,
    dialect=error_dialects.OPENAI,
)

_NO_THINKING = openapi.make_object(
    (),
    nvext={
        "anyOf": [
            openapi.NULL,
            openapi.make_object((), max_thinking_tokens=openapi.NULL),
        ]
    },
)


def operations(handlers: RequestHandlers) -> Sequence[Operation]:
    return (
        Operation(
            method="POST",
            path="/v1/completions",
            handler=handlers.generate(API),
            summary="Continue a text",
            tag="OpenAI",
            request=CompletionRequest,
            request_details={"prompt": openapi.PROMPTS, "logit_bias": openapi.LOGIT_BIAS},
            request_rules=(_NO_THINKING, openapi.FORMAT_RULE),
            answer=Completion,
            events=Completion,
            ends_with_done=True,
            errors=GENERATION_ERRORS,
            example={"prompt": "Once upon a time", "max_tokens": 60},
        ),
    )
