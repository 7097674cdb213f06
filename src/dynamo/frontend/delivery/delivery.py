"""The delivery of an answer from workers to a client: what streamed and whole answers share, and whole answers.

A request has one or more prompts; each is one stream at a worker and brings n choices. An `Attempt` takes the outputs
of one worker and passes them to the `Delivery` of the whole request, which ends exactly once: complete, failed, or
abandoned by the client. Whatever still runs at a worker then is cancelled at once. An attempt that breaks off may be
followed by others (`Retry`), of which the client sees nothing.
"""

import abc
import asyncio
import collections
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from dynamo.base import errors
from dynamo.frontend import metrics, nvext
from dynamo.frontend.delivery import choices, sse
from dynamo.frontend.delivery.attempt import Attempt
from dynamo.observability import logs
from dynamo.preprocess import inputs, options, preprocessor
from dynamo.protocols import blocks, generate, model_errors
from dynamo.runtime.http import exchange

_FEW_LOGPROBS = 2**14  # are encoded at once, in some 25 ms at most
_failures = logs.PeerLog(logging.getLogger(__name__), time.monotonic)
# Replaces an attempt that ended early by others; returns False if the request fails instead.
Retry = Callable[[Attempt, errors.DynamoError], bool]
F_co = TypeVar("F_co", bound=sse.AnswerFormatter, covariant=True)


class ErrorDialect(Protocol):
    """The form of an API's errors: one of `apis.error_dialects`."""

    BODY_TYPE: type  # of an error's JSON

    def status_of(self, error: errors.DynamoError) -> int:
        """Return the HTTP status."""
        ...

    def body_of(self, error: errors.DynamoError) -> bytes:
        """Return the error as JSON."""
        ...

    def refusal(self, status: int, message: str) -> bytes:
        """Return the JSON of an error that is none of our classes."""
        ...


class PreparedRequest(msgspec.Struct, Generic[F_co], frozen=True, kw_only=True):
    """A request that is ready to be sent to workers, and what its answer needs."""

    formatter: F_co
    dialect: ErrorDialect
    preparer: preprocessor.Preprocessor
    prompts: Sequence[preprocessor.Prepared]
    request: inputs.GenerationInput
    headers: exchange.Headers = ()
    extra: nvext.NvextResponse | None = None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt that the engine generates."""
        return self.prompts[0].request.sampling_options.n

    @property
    def annotations(self) -> Sequence[str]:
        """Names of the annotations that the client requested (`nvext.annotations`)."""
        return self.prompts[0].request.annotations

    def annotation_value(self, name: str) -> str:
        """Return the value of an annotation that is known before the answer."""
        prompt = self.prompts[0]
        match name:
            case "formatted_prompt":
                return prompt.prompt or ""
            case "token_ids":
                return sse.encode(blocks.unpack(prompt.request.token_ids)).decode()
            case _:  # the client's own id, if it has one: the same as in our headers
                return dict(self.headers).get("x-request-id", prompt.request.id)

    def make_choices(self) -> list[choices.Choice]:
        """Return new choices for all prompts, numbered over all."""
        made: list[choices.Choice] = []
        num_choices = self.num_choices
        for prompt in self.prompts:
            echoed = choices.EchoedPrompt(prompt, self.preparer) if self.request.is_echoed else None
            for _ in range(num_choices):
                made.append(self.make_choice(len(made), prompt, echoed))
        if self.request.return_token_ids:
            for choice in made:
                choice.token_ids = []
        return made

    def prompt_token_ids_of(self, choice: choices.Choice) -> Sequence[int] | None:
        """Return the token ids of the choice's prompt, if the answer is to have them or their log probabilities."""
        if not self.request.return_token_ids and self.request.prompt_logprobs is None:
            return None
        prompt = self.prompts[choice.index // self.num_choices]
        return blocks.unpack(prompt.request.token_ids)

    def make_choice(
        self, number: int, prompt: preprocessor.Prepared, echoed: choices.EchoedPrompt | None
    ) -> choices.Choice:
        """Return a new choice of this prompt, which it repeats if `echoed` is given."""
        has_logprobs = prompt.request.output_options.logprobs is not None
        # as vLLM; OpenAI's chats leave the end token out
        is_chat = isinstance(self.request, inputs.Conversation)
        reports_end = bool(self.request.return_token_ids) or not is_chat
        parsers = None if echoed is not None else prompt.parsers
        text = self.preparer.make_answer_text(
            prompt.request, self.request, shows_marks=parsers is not None
        )
        if echoed is not None:
            return choices.EchoedChoice(
                number, text, echoed, has_logprobs=has_logprobs, is_scored=self.request.is_scored
            )
        if parsers is None:
            return choices.Choice(number, text, has_logprobs=has_logprobs, reports_end=reports_end)
        return choices.ParsedChoice(
            number,
            text,
            parsers,
            has_logprobs=has_logprobs,
            is_single_call=prompt.is_single_call,
            reports_end=reports_end,
            stops_in_thoughts=self.request.stops_in_thoughts,
        )


class Delivery(abc.ABC):
    """The delivery of one answer; subclasses define how outputs reach the client."""

    __slots__ = ("_attempts", "_meter", "_num_cached", "_num_open", "_num_prompt_tokens",
                 "_reported_prompts", "_retry", "_wait_callbacks", "choices", "client", "count_tokens", "is_over",
                 "num_choices", "prepared")  # fmt: skip

    def __init__(
        self,
        client: exchange.Exchange,
        prepared: PreparedRequest[sse.AnswerFormatter],
        meter: metrics.RequestMeter,
    ) -> None:
        self.client = client
        self.prepared = prepared
        extra = prepared.extra
        self.count_tokens = (
            extra.wrap_counter(meter.record_tokens) if extra else meter.record_tokens
        )
        self.num_choices = prepared.num_choices  # of each prompt
        self.choices = prepared.make_choices()
        self._meter = meter
        self._attempts: list[Attempt] = []  # by choice
        self._retry: Retry = _never_retry
        self._num_open = len(prepared.prompts)
        # tokens of all prompts; with images, as the engine counts them once it reports
        self._num_prompt_tokens = 0
        for prompt in prepared.prompts:
            self._num_prompt_tokens += prompt.request.prompt_len
        self._num_cached = 0  # of these
        self._reported_prompts: set[int] = set()
        # the answer is complete, failed or abandoned, so workers need no further requests
        self.is_over = False
        self._wait_callbacks: list[Callable[[], None]] = []
        client.on_disconnect(self._abandon)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call this if the answer ends while a prompt waits for a worker; at once if it is over."""
        if self.is_over:
            callback()
        else:
            self._wait_callbacks.append(callback)

    def make_attempts(self, retry: Retry) -> Sequence[Attempt]:
        """Return the first attempt for each prompt; `retry` follows one that breaks off."""
        self._retry = retry
        attempts = []
        for number, prompt in enumerate(self.prepared.prompts):
            attempt = Attempt(self, prompt.request, self.choices_of(number))
            attempts.append(attempt)
            self._attempts += [attempt] * self.num_choices
        return attempts

    def original_request(self, attempt: Attempt) -> generate.Request:
        """Return the request of the attempt's prompt before any worker was lost."""
        return self.prepared.prompts[attempt.choices[0].index // self.num_choices].request

    def split(self, attempt: Attempt, rest: Mapping[int, generate.Request]) -> Sequence[Attempt]:
        """Replace an attempt that broke off by one for each request in `rest`.

        The keys are the places, among the prompt's choices, of the first choice of each request.
        """
        lost = attempt.lost_instances
        if attempt.instance_id is not None:
            lost |= {attempt.instance_id}
        prompt_first = attempt.choices[0].index // self.num_choices * self.num_choices
        attempts = []
        for place, request in rest.items():
            first = prompt_first + place
            last = first + request.sampling_options.n
            part = self.choices[first:last]
            num_moves = attempt.num_moves + 1
            new = Attempt(self, request, part, num_moves=num_moves, lost_instances=lost)
            self._attempts[first:last] = [new] * len(part)
            attempts.append(new)
        return attempts

    def handle_broken(self, attempt: Attempt, error: errors.DynamoError) -> None:
        """Retry an attempt that its worker cannot complete, or fail the request.

        If a fault of ours lost the last output of a choice, or the whole answer, nothing else would end the request.
        """
        if self.is_over:
            return
        is_lost = not self._num_open or attempt.has_unsettled
        if is_lost or (attempt.is_open and not self._retry(attempt, error)):
            self.fail(error)

    def choices_of(self, prompt_number: int) -> Sequence[choices.Choice]:
        """Return the n choices of one prompt."""
        num = self.num_choices
        return self.choices[prompt_number * num : (prompt_number + 1) * num]

    @abc.abstractmethod
    def deliver(self, output: generate.Output, first: int = 0) -> None:
        """Take an output for a choice of the prompt with choices from number `first`."""

    def deliver_all(self, outputs: Sequence[generate.Output], first: int = 0) -> None:
        for output in outputs:
            self.deliver(output, first)

    def fail(self, error: errors.DynamoError) -> None:
        """End the request by an error. A stream that has begun reports it as its last event."""
        if self.is_over:
            return
        self._close()
        self._meter.record_failure(error)
        if self.client.is_streaming:
            _log_failure(error, self.client)
            self.client.end(self.error_event(error))
        else:
            respond_error(self.client, error, self.prepared.dialect, self.prepared.headers)

    def error_event(self, error: errors.DynamoError) -> bytes:
        """Return the last event of a stream that fails."""
        return b"data: " + self.prepared.dialect.body_of(error) + b"\n\n"

    def record_cached(self, choice: choices.Choice, output: generate.Output) -> None:
        """Record the cached prompt tokens and the KV transfer that this output reports, if any.

        Of several workers for one prompt, the first report counts.
        """
        if output.kv_transfer_params is not None and self.prepared.extra is not None:
            self.prepared.extra.record_transfer(output.kv_transfer_params)
        if output.cached_tokens is None:
            return
        prompt_number = choice.index // self.num_choices
        if prompt_number in self._reported_prompts:
            return
        self._reported_prompts.add(prompt_number)
        if output.prompt_len is not None:
            known_len = self.prepared.prompts[prompt_number].request.prompt_len
            self._num_prompt_tokens += output.prompt_len - known_len
        self._num_cached += output.cached_tokens
        self._meter.record_cached(output.cached_tokens, output.tier_tokens)

    def settle(self, choice: choices.Choice) -> bool:
        """Account for a choice that has ended, and return whether the whole answer is complete.

        If it is, `complete` follows once the client has it.
        """
        choice.is_settled = True
        siblings = self.choices_of(choice.index // self.num_choices)
        is_any_cut = False
        for sibling in siblings:
            if sibling.finish_reason is None:
                if choice.is_cut:
                    self._attempts[choice.index].cancel_choice(choice)
                return False
            is_any_cut |= sibling.is_cut
        if is_any_cut:
            self._cancel(siblings)  # the engine knows neither stop strings nor tool calls
        self._num_open -= 1
        return not self._num_open

    def complete(self) -> None:
        """Take note that the client has the whole answer."""
        self._release()
        self._meter.record_success()

    def usage(self) -> sse.Usage:
        """Return the tokens so far."""
        completion = reasoning = 0
        for choice in self.choices:
            completion += choice.text.num_tokens
            reasoning += choice.num_reasoning_tokens
        return self.make_usage(completion, reasoning)

    def make_usage(self, completion: int, reasoning: int) -> sse.Usage:
        """Return the usage with so many tokens of all choices."""
        prompt = self._num_prompt_tokens
        return sse.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=sse.PromptTokensDetails(cached_tokens=self._num_cached),
            completion_tokens_details=sse.CompletionTokensDetails(reasoning_tokens=reasoning),
        )

    def extra_fields(self, *, is_last: bool) -> dict[str, Any]:
        """Return the fields that `nvext.extra_fields` requested."""
        if self.prepared.extra is None:
            return {}
        share = self._num_cached / self._num_prompt_tokens
        return self.prepared.extra.build_fields(self._meter, is_last=is_last, cached_share=share)

    def _abandon(self) -> None:
        """End the request because the client has disconnected."""
        if not self.is_over:
            self._close()
            self._meter.record_disconnect()

    def _close(self) -> None:
        self.is_over = True
        self._cancel(self.choices)
        self._release()
        callbacks, self._wait_callbacks = self._wait_callbacks, []
        for callback in callbacks:
            callback()

    def _release(self) -> None:
        """Drop the references to attempts, which refer to this object: a cycle would wait for the garbage collector."""
        self.is_over = True
        self._retry = _never_retry
        self._attempts = []

    def _cancel(self, cancelled: Sequence[choices.Choice]) -> None:
        if self._attempts:
            for attempt in {self._attempts[choice.index] for choice in cancelled}:
                attempt.cancel()


def _never_retry(attempt: Attempt, error: errors.DynamoError) -> bool:
    del attempt, error
    return False


def respond_error(
    client: exchange.Exchange,
    error: errors.DynamoError,
    dialect: ErrorDialect,
    headers: exchange.Headers = (),
) -> None:
    """Answer by an error; a temporary one carries Retry-After, in whole seconds."""
    _log_failure(error, client)
    if client.is_streaming:  # the client was told that it waits
        client.end(b"data: " + dialect.body_of(error) + b"\n\n")
        return
    headers = (*headers, *retry_headers(error))
    client.respond(dialect.status_of(error), dialect.body_of(error), headers=headers)


def _log_failure(error: errors.DynamoError, client: exchange.Exchange) -> None:
    """Log an error that is not the client's fault, unless it has gone: it is told no names of inner processes."""
    if not isinstance(error, errors.RequestError) and not client.is_closed:
        kind = type(error).__name__
        _failures.warning(kind, "a request failed: %s: %s", kind, error)


def retry_headers(error: errors.DynamoError) -> exchange.Headers:
    """Return Retry-After, in whole seconds, for a temporary error; clients are told not to repeat a suspect."""
    if isinstance(error, model_errors.SuspectRequest):
        return (("x-should-retry", "false"),)  # as OpenAI's and Anthropic's clients read it
    if not isinstance(error, errors.Unavailable | errors.RateLimited):
        return ()
    return (("retry-after", str(max(1, math.ceil(error.retry_after_s)))),)


class WholeDelivery(Delivery):
    """Keeps the text of each choice until the last one ends."""

    __slots__ = ("_num_logprobs", "_prompt_logprobs", "_reports", "_texts")

    def __init__(
        self,
        client: exchange.Exchange,
        prepared: PreparedRequest[sse.AnswerFormatter],
        meter: metrics.RequestMeter,
    ) -> None:
        super().__init__(client, prepared, meter)
        self._texts: dict[int, list[str]] = collections.defaultdict(list)  # by choice
        self._reports: dict[int, list[choices.TokenReport]] = collections.defaultdict(list)
        self._prompt_logprobs: dict[int, Sequence[generate.TokenLogprobs]] = {}  # by prompt
        self._num_logprobs = 0  # of prompts and of answers, as often as the body has them

    def deliver(self, output: generate.Output, first: int = 0) -> None:
        number = first + output.index
        choice = self.choices[number]
        if choice.finish_reason is not None or self.is_over:
            return
        self.count_tokens(choice, len(output.token_ids))
        self.record_cached(choice, output)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[number // self.num_choices] = output.prompt_logprobs
            num_each = (self.prepared.request.prompt_logprobs or 0) + 1
            self._num_logprobs += self.num_choices * num_each * len(output.prompt_logprobs)
        if choice.token_ids is not None:
            choice.token_ids += output.token_ids
        text, reports = choice.read(output)
        self._texts[number].append(text)
        if reports:
            self._reports[number] += reports
            self._num_logprobs += len(reports) * ((self.prepared.request.num_logprobs or 0) + 1)
            if self._num_logprobs > (most := 2 * options.MAX_LOGPROBS):
                self.fail(
                    errors.InvalidRequest.of_param(
                        "logprobs",
                        f"the answer has more than {most} log probabilities: "
                        "ask for fewer, or set stream to true",
                    )
                )
                return
        if choice.is_over and self.settle(choice):
            self._respond()

    def _respond(self) -> None:
        selected = self.choices
        if self.prepared.request.is_best_of:
            selected = [
                choice
                for number in range(len(self.prepared.prompts))
                for choice in self._select_best(number)
            ]
        has_reports = self.prepared.request.num_logprobs is not None
        answers = [
            sse.WholeChoice(
                index,
                choice.take_pieces("".join(self._texts[choice.index])),
                sse.finish_reason(choice),
                self._reports[choice.index] if has_reports else None,
                choice.text.stop_reason,
                choice.take_token_ids(),
                self.prepared.prompt_token_ids_of(choice),
                self._logprobs_of_prompt(choice),
                choice.stop_token,
            )
            for index, choice in enumerate(selected)
        ]
        usage, extra = self.usage(), self.extra_fields(is_last=True)
        if self._num_logprobs <= _FEW_LOGPROBS:
            body = self._encode(answers, usage, extra)
            self.client.respond(200, body, headers=self.prepared.headers)
            self.complete()
            return
        self._release()  # the answer is complete, whatever happens to the worker
        encode = functools.partial(self._encode, answers, usage, extra)
        exchange.encode_apart(encode).add_done_callback(self._send)

    def _encode(
        self, answers: Sequence[sse.WholeChoice], usage: sse.Usage, extra: dict[str, Any]
    ) -> bytes:
        return sse.encode({**self.prepared.formatter.whole(answers, usage), **extra})

    def _send(self, encoded: asyncio.Future[bytes]) -> None:
        """Send the body that was encoded in a thread. A fault of ours is raised once the client has its error."""
        if self.client.is_closed:
            self._meter.record_disconnect()
            return
        try:
            body = encoded.result()
        except Exception:
            error = errors.DynamoError("an internal error lost the answer; see the log")
            self._meter.record_failure(error)
            respond_error(self.client, error, self.prepared.dialect, self.prepared.headers)
            raise
        self.client.respond(200, body, headers=self.prepared.headers)
        self.complete()

    def _logprobs_of_prompt(
        self, choice: choices.Choice
    ) -> Sequence[generate.TokenLogprobs] | None:
        if self.prepared.request.prompt_logprobs is None:
            return None
        return self._prompt_logprobs.get(choice.index // self.num_choices, ())

    def _select_best(self, prompt_number: int) -> Sequence[choices.Choice]:
        """Return the answers to this prompt that the client receives: of all that were drawn the likeliest."""
        drawn = sorted(self.choices_of(prompt_number), key=_mean_logprob, reverse=True)
        return drawn[: self.prepared.request.num_choices]


def _mean_logprob(choice: choices.Choice) -> float:
    return choice.reporter.mean_logprob if choice.reporter is not None else 0.0
