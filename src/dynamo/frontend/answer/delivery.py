"""An answer on its way from workers to a client: what streamed and whole answers have in common.

A request has one or more prompts; each is one stream at a worker and brings n choices. A `Leg` takes what one worker
says and passes it to the `Delivery` of the whole request, which ends exactly once: complete, failed, or abandoned by
the client. Whatever still runs at a worker then is cancelled at once. A leg that breaks off may be followed by others
(`go_on`), of which the client sees nothing.
"""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from dynamo.base import errors
from dynamo.frontend import metrics, nvext_response
from dynamo.frontend.answer import choices, echo, parsed_choice, sse
from dynamo.frontend.answer.leg import Leg
from dynamo.preprocess import preprocessor
from dynamo.protocols import blocks, generate, openai_errors, openai_fields, openai_usage
from dynamo.runtime.http import exchange

S_co = TypeVar("S_co", bound=sse.Shape, covariant=True)


class Dialect(Protocol):
    """How an API tells errors: one of the modules `protocols.*_errors`."""

    def status_of(self, error: errors.DynamoError) -> int:
        """The HTTP status."""
        ...

    def body_of(self, error: errors.DynamoError) -> bytes:
        """The error as JSON."""
        ...

    def refusal(self, status: int, message: str) -> bytes:
        """An error that is none of our classes, as JSON."""
        ...


class Order(msgspec.Struct, Generic[S_co], frozen=True, kw_only=True):
    """What a client asked for, ready to be answered."""

    shape: S_co
    dialect: Dialect
    preparer: preprocessor.Preprocessor
    prompts: Sequence[preprocessor.Prepared]
    request: openai_fields.GenerationFields
    headers: exchange.Headers = ()
    extra: nvext_response.NvextResponse | None = None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt that the engine gives."""
        return self.prompts[0].request.sampling_options.n

    @property
    def annotations(self) -> Sequence[str]:
        """What the caller wants to know of its request, by the original's names."""
        return self.prompts[0].request.annotations

    def annotation(self, name: str) -> str:
        """The value of one of them that is known beforehand."""
        prompt = self.prompts[0]
        match name:
            case "formatted_prompt":
                return prompt.prompt or ""
            case "token_ids":
                return sse.encode(blocks.unpack(prompt.request.token_ids)).decode()
            case _:  # the caller's own, if it has one: the same as in our headers
                return dict(self.headers).get("x-request-id", prompt.request.id)

    def new_choices(self) -> list[choices.Choice]:
        """All answers to all prompts, numbered over all."""
        makers = [
            maker for maker in map(self._maker, self.prompts) for _ in range(self.num_choices)
        ]
        return [make(number) for number, make in enumerate(makers)]

    def _maker(self, prompt: preprocessor.Prepared) -> Callable[[int], choices.Choice]:
        """Makes the answers to one prompt, given their number."""
        if not self.request.is_echoed:
            return lambda number: _choice(number, self.preparer, prompt)
        shared = echo.Echo(prompt, self.preparer)
        return lambda number: echo.EchoedChoice(
            number,
            self.preparer.answer(prompt.request),
            shared,
            has_logprobs=_has_logprobs(prompt),
            is_scored=self.request.is_scored,
        )


class Delivery(abc.ABC):
    """The answer to one request; `StreamDelivery` and `WholeDelivery` say how it reaches the client."""

    def __init__(
        self, client: exchange.Exchange, order: Order[sse.Shape], meter: metrics.RequestMeter
    ) -> None:
        self.client = client
        self.order = order
        self.count_tokens = order.extra.counting(meter.tokens) if order.extra else meter.tokens
        self.num_choices = order.num_choices  # of each prompt
        self.choices = order.new_choices()
        self._meter = meter
        self._leg_of: list[Leg] = []  # by choice
        self.go_on: Callable[[Leg, errors.DynamoError], bool] = _cannot
        self._num_open = len(order.prompts)
        self._cached_by_prompt: dict[int, int] = {}
        self._is_over = False
        self._on_gone: list[Callable[[], None]] = []
        client.on_disconnect(self._abandon)

    @property
    def is_over(self) -> bool:
        """Complete, failed or abandoned: nothing more is to be asked of workers."""
        return self._is_over

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call this if the client goes: a prompt waits for a worker."""
        self._on_gone.append(callback)

    def prompt_legs(self) -> Sequence[Leg]:
        """One for each prompt, to be sent."""
        made = [
            Leg(self, prompt.request, self.choices_of(number))
            for number, prompt in enumerate(self.order.prompts)
        ]
        self._leg_of = [leg for leg in made for _ in range(self.num_choices)]
        return made

    def origin(self, leg: Leg) -> generate.Request:
        """What was asked for at first, before any worker was lost."""
        return self.order.prompts[leg.choices[0].index // self.num_choices].request

    def split(self, leg: Leg, rest: Mapping[int, generate.Request]) -> Sequence[Leg]:
        """Legs for these requests, by the choice of the prompt that they begin with, instead of one that broke off."""
        lost = leg.lost if leg.instance_id is None else leg.lost | {leg.instance_id}
        prompt_first = leg.choices[0].index // self.num_choices * self.num_choices
        made = []
        for place, request in rest.items():
            first = prompt_first + place
            last = first + request.sampling_options.n
            mine = self.choices[first:last]
            new = Leg(self, request, mine, num_moves=leg.num_moves + 1, lost=lost)
            self._leg_of[first:last] = [new] * len(mine)
            made.append(new)
        return made

    def broke_off(self, leg: Leg, error: errors.DynamoError) -> None:
        """A worker cannot end what it began."""
        if self._is_over or not leg.is_open:
            return
        if not self.go_on(leg, error):
            self.fail(error)

    def is_open(self, prompt_number: int) -> bool:
        """Does any choice of this prompt still grow?"""
        return None in [choice.finish_reason for choice in self.choices_of(prompt_number)]

    def choices_of(self, prompt_number: int) -> Sequence[choices.Choice]:
        """The n answers to one prompt."""
        num = self.num_choices
        return self.choices[prompt_number * num : (prompt_number + 1) * num]

    @abc.abstractmethod
    def deliver(self, output: generate.Output, first: int = 0) -> None:
        """An output for a choice of the prompt whose choices begin with number `first`."""

    def fail(self, error: errors.DynamoError) -> None:
        """The request is over, by an error. A stream that has begun tells it as an event, and then just ends."""
        if self._is_over:
            return
        self._close()
        self._meter.failed(error)
        if self.client.is_streaming:
            self.client.end(self.error_event(error))
        else:
            respond_error(self.client, error, self.order.dialect, self.order.headers)

    def error_event(self, error: errors.DynamoError) -> bytes:
        """The last words of a stream that has begun."""
        return b"data: " + self.order.dialect.body_of(error) + b"\n\n"

    def note_cached(self, choice: choices.Choice, output: generate.Output) -> None:
        """Count the prompt tokens that the worker had, if this output tells, and how the others came.

        Of several workers the first counts.
        """
        if output.kv_transfer_params is not None and self.order.extra is not None:
            self.order.extra.reported(output.kv_transfer_params)
        if output.cached_tokens is None:
            return
        prompt_number = choice.index // self.num_choices
        if prompt_number not in self._cached_by_prompt:
            self._cached_by_prompt[prompt_number] = output.cached_tokens
            self._meter.cached(output.cached_tokens)

    def settle(self, choice: choices.Choice) -> bool:
        """Look whether this choice was the last to end; says whether the answer is complete now."""
        prompt_number = choice.index // self.num_choices
        if self.is_open(prompt_number):
            if choice.is_cut:
                self._leg_of[choice.index].cancel_choice(choice)
            return False
        mine = self.choices_of(prompt_number)
        if True in [one.is_cut for one in mine]:
            self._cancel(mine)  # the engine does not know of stop strings and calls
        self._num_open -= 1
        if not self._num_open:
            self._let_go()
            self._meter.succeeded()
        return self._is_over

    def usage(self) -> openai_usage.Usage:
        """What it cost."""
        prompt = self._num_prompt_tokens
        completion = thought = 0
        for choice in self.choices:
            completion += choice.text.num_tokens
            thought += choice.num_reasoning_tokens
        return openai_usage.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=openai_usage.PromptTokensDetails(cached_tokens=self._num_cached),
            completion_tokens_details=openai_usage.CompletionTokensDetails(
                reasoning_tokens=thought
            ),
        )

    def extra_fields(self, *, is_last: bool) -> dict[str, Any]:
        """What the caller asked to be told beside the answer."""
        if self.order.extra is None:
            return {}
        share = self._num_cached / self._num_prompt_tokens
        return self.order.extra.fields(is_last=is_last, cached_share=share)

    @property
    def _num_prompt_tokens(self) -> int:
        return sum([one.request.prompt_len for one in self.order.prompts])

    @property
    def _num_cached(self) -> int:
        return sum(self._cached_by_prompt.values())

    def _abandon(self) -> None:
        """The client is gone."""
        if not self._is_over:
            self._close()
            self._meter.disconnected()
            for callback in self._on_gone:
                callback()

    def _close(self) -> None:
        self._is_over = True
        self._cancel(self.choices)
        self._let_go()

    def _let_go(self) -> None:
        """It is over. Whom it asked knows it; if it still knew them, only the garbage collector could free them all."""
        self._is_over = True
        self.go_on = _cannot
        self._leg_of = []

    def _cancel(self, given_up: Sequence[choices.Choice]) -> None:
        for leg in {self._leg_of[choice.index] for choice in given_up} if self._leg_of else ():
            leg.cancel()


def _cannot(leg: Leg, error: errors.DynamoError) -> bool:
    """Nobody else is asked."""
    del leg, error
    return False


def _choice(
    number: int, preparer: preprocessor.Preprocessor, prompt: preprocessor.Prepared
) -> choices.Choice:
    has_logprobs = _has_logprobs(prompt)
    if prompt.parsers is None:
        return choices.Choice(number, preparer.answer(prompt.request), has_logprobs=has_logprobs)
    return parsed_choice.ParsedChoice(
        number,
        preparer.answer(prompt.request, shows_marks=True),
        prompt.parsers,
        has_logprobs=has_logprobs,
        is_single_call=prompt.is_single_call,
    )


def _has_logprobs(prompt: preprocessor.Prepared) -> bool:
    return prompt.request.output_options.logprobs is not None


def respond_error(
    client: exchange.Exchange,
    error: errors.DynamoError,
    dialect: Dialect = openai_errors,
    headers: exchange.Headers = (),
) -> None:
    """Answer by an error; one that may pass says when to try again."""
    if isinstance(error, errors.Unavailable | errors.RateLimited):
        headers = (*headers, ("retry-after", str(max(1, math.ceil(error.retry_after_s)))))
    client.respond(dialect.status_of(error), dialect.body_of(error), headers=headers)
