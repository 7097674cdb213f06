"""A question that a quiet engine is asked, to see whether it still answers: one that hangs looks like one that rests.

Quiet means that its load has not changed for a while. An engine at a long prompt is not: its load tells how much of
the prompt is left. So only an engine that neither answers the question nor gets on with anything is given up.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.protocols import blocks, generate, load
from dynamo.runtime import requests

_QUESTION = generate.Request(
    id="canary",
    model="canary",
    token_ids=blocks.pack((0,)),
    stop_conditions=generate.StopConditions(max_tokens=1, ignore_eos=True),
    sampling_options=generate.SamplingOptions(temperature=0.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """In seconds."""

    wait_s: float = 10.0  # quiet until it is asked
    answer_s: float = 3.0  # asked until it is given up


class Canary:
    """`take` is what handles requests; `measure` gives the load of each rank."""

    def __init__(
        self,
        take: requests.Handler,
        measure: Callable[[], Sequence[load.ForwardPassMetrics]],
        patience: Patience,
        clock: clocks.Clock,
    ) -> None:
        self._take = take
        self._measure = measure
        self._patience = patience
        self._clock = clock

    async def watch(self) -> errors.EngineFailed:
        """Returns why the engine is beyond use, when it is."""
        while True:
            before = self._measure()
            await self._clock.sleep(self._patience.wait_s)
            if self._measure() == before and not await self._is_alive():
                return errors.EngineFailed(
                    f"the engine hangs: it did not answer a token within {self._patience.answer_s:g} s"
                )

    async def _is_alive(self) -> bool:
        call = Question()
        self._take(call)
        before = self._measure()
        waits = [
            asyncio.ensure_future(call.is_over.wait()),
            asyncio.ensure_future(self._clock.sleep(self._patience.answer_s)),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        call.cancel()
        return call.is_over.is_set() or self._measure() != before


class Question:
    """A `requests.Call` that nobody made. It is over with the first word, whichever: who refuses lives, too."""

    endpoint = "canary"
    headers: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.body = msgspec.Raw(msgspec.msgpack.encode(_QUESTION))
        self.is_over = asyncio.Event()
        self._on_cancel: Callable[[], None] | None = None

    def cancel(self) -> None:
        """Wait no more."""
        if self._on_cancel is not None:
            self._on_cancel()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self._on_cancel = callback

    def on_choice_cancel(self, callback: Callable[[int], None]) -> None:
        """It has one choice."""

    def send(self, output: generate.Output) -> None:
        self.is_over.set()

    def reply(self, value: Any) -> None:
        self.is_over.set()

    def finish(self) -> None:
        self.is_over.set()

    def fail(self, error: errors.DynamoError) -> None:
        self.is_over.set()
