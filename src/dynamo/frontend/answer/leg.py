"""The way that an answer goes with one worker: all choices of a prompt, or what is left of one after a worker was lost.

A `Leg` is the receiver of that worker's stream. It passes tokens on without looking at them; how the stream ends is
told to the delivery, which may have another leg made.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from dynamo.base import errors
from dynamo.frontend.answer import choices
from dynamo.protocols import generate
from dynamo.runtime import requests


class Taker(Protocol):
    """Whose answer it is."""

    def deliver(self, output: generate.Output, first: int = 0) -> None:
        """An output for a choice of the leg that begins with choice number `first`."""
        ...

    def broke_off(self, leg: "Leg", error: errors.DynamoError) -> None:
        """This leg is over, and its answer is not complete."""
        ...


class Leg:
    """`choices` follow each other. `num_moves` says how many workers had the request before and were lost."""

    __slots__ = (
        "_stream",
        "_taker",
        "choices",
        "instance_id",
        "lost",
        "num_moves",
        "receive",
        "request",
    )

    def __init__(
        self,
        taker: Taker,
        request: generate.Request,
        answered: Sequence[choices.Choice],
        *,
        num_moves: int = 0,
        lost: frozenset[int] = frozenset(),
    ) -> None:
        self.request = request
        self.choices = answered
        self.num_moves = num_moves
        self.lost = lost  # instances that had it before
        self.instance_id: int | None = None  # who has it
        self._taker = taker
        self._stream: requests.Stream | None = None
        first = answered[0].index
        # called per token: with one prompt, which is nearly always so, nothing stands between
        self.receive: Callable[[generate.Output], None] = (
            functools.partial(taker.deliver, first=first) if first else taker.deliver
        )

    @property
    def is_open(self) -> bool:
        """Does any of its choices still grow?"""
        return None in [choice.finish_reason for choice in self.choices]

    @property
    def has_begun(self) -> bool:
        """Has anything come, from whichever worker?"""
        return any(choice.text.num_tokens for choice in self.choices)

    def answered(self, num_choices: int) -> Mapping[int, bytes]:
        """What has come of each open choice, by its place among the `num_choices` of its prompt."""
        return {
            choice.index % num_choices: choice.text.token_ids
            for choice in self.choices
            if choice.finish_reason is None
        }

    def asked(self, instance_id: int) -> None:
        """This instance has it."""
        self.instance_id = instance_id

    def opened(self, stream: requests.Stream) -> None:
        """So it can be cancelled."""
        self._stream = stream

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self._stream is not None:
            self._stream.cancel()

    def cancel_choice(self, choice: choices.Choice) -> None:
        """Nobody waits for this one; its siblings go on."""
        if len(self.choices) == 1:
            self.cancel()
        elif self._stream is not None:
            self._stream.send_signal(choice.index - self.choices[0].index)

    def replied(self, body: msgspec.Raw) -> None:
        """As `requests.Receiver`."""
        del body
        self._taker.broke_off(self, errors.RemoteProtocolError("expected tokens from the worker"))

    def ended(self, error: errors.DynamoError | None) -> None:
        """As `requests.Receiver`."""
        if error is None and self.is_open:
            error = errors.StreamBroken("the worker ended before its answer did")
        if error is not None:
            self._taker.broke_off(self, error)
