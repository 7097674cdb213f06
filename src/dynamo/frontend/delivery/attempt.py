"""An attempt to answer a prompt at one worker: all its choices, or the rest of them after another worker was lost.

An `Attempt` is the receiver of that worker's stream. It passes outputs on unread. How the stream ends is reported to
the delivery, which may have another attempt made.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from dynamo.base import errors
from dynamo.frontend.delivery import choices
from dynamo.protocols import generate
from dynamo.runtime import requests


class OutputSink(Protocol):
    """The delivery that an attempt serves."""

    def deliver(self, output: generate.Output, first: int = 0) -> None:
        """Take an output for a choice of the attempt that begins with choice number `first`."""
        ...

    def deliver_all(self, outputs: Sequence[generate.Output], first: int = 0) -> None:
        """Take outputs that came together."""
        ...

    def handle_broken(self, attempt: "Attempt", error: errors.DynamoError) -> None:
        """Take note that this attempt ended before its answer was complete."""
        ...


class Attempt:
    """An attempt for consecutive choices. `num_moves` counts the workers that had the request before and were lost."""

    __slots__ = (
        "_sink",
        "choices",
        "instance_id",
        "lost_instances",
        "num_moves",
        "receive",
        "receive_all",
        "request",
        "stream",
    )

    def __init__(
        self,
        sink: OutputSink,
        request: generate.Request,
        open_choices: Sequence[choices.Choice],
        *,
        num_moves: int = 0,
        lost_instances: frozenset[int] = frozenset(),
    ) -> None:
        self.request = request
        self.choices = open_choices
        self.num_moves = num_moves
        self.lost_instances = lost_instances  # that had the request before
        self.instance_id: int | None = None  # that has it now
        self._sink = sink
        self.stream: requests.Stream | None = None  # of the worker, to cancel it
        first = open_choices[0].index
        # called per token: with one prompt, which is nearly always so, there is no call in between
        self.receive: Callable[[generate.Output], None] = (
            functools.partial(sink.deliver, first=first) if first else sink.deliver
        )
        self.receive_all: Callable[[Sequence[generate.Output]], None] = (
            functools.partial(sink.deliver_all, first=first) if first else sink.deliver_all
        )

    @property
    def is_open(self) -> bool:
        """True if any of its choices is incomplete."""
        for choice in self.choices:  # noqa: SIM110 (twice a request: a generator costs more than the rest)
            if choice.finish_reason is None:
                return True
        return False

    @property
    def has_unsettled(self) -> bool:
        """True if a choice is over and not settled: a fault of ours has lost its last output."""
        return any(choice.is_over and not choice.is_settled for choice in self.choices)

    @property
    def has_begun(self) -> bool:
        """True if any token has come, from whichever worker."""
        return any(choice.text.num_tokens for choice in self.choices)

    def collect_answered(self, num_choices: int) -> Mapping[int, bytes]:
        """Return the packed tokens so far of each open choice, by its place among the `num_choices` of its prompt."""
        return {
            choice.index % num_choices: choice.text.token_ids
            for choice in self.choices
            if choice.finish_reason is None
        }

    def cancel(self) -> None:
        """Cancel the request at the worker."""
        if self.stream is not None:
            self.stream.cancel()

    def cancel_choice(self, choice: choices.Choice) -> None:
        """Cancel one choice at the worker; the others go on."""
        if len(self.choices) == 1:
            self.cancel()
        elif self.stream is not None:
            self.stream.send_signal(choice.index - self.choices[0].index)

    def replied(self, body: msgspec.Raw) -> None:
        """Refuse a reply: the worker should stream (`requests.Receiver`)."""
        del body
        self._sink.handle_broken(
            self, errors.RemoteProtocolError("expected tokens from the worker")
        )

    def ended(self, error: errors.DynamoError | None) -> None:
        """Report an early end of the stream (`requests.Receiver`)."""
        if error is None and self.is_open:
            error = errors.StreamBroken("the worker ended before its answer did")
        if error is not None:
            self._sink.handle_broken(self, error)
