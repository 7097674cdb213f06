"""One data-parallel rank of the simulated engine: a scheduler, its cache, and the task that makes its steps."""

import asyncio

from dynamo.base import clock as clocks
from dynamo.engine import api
from dynamo.engine.mock.batch import Batch, Plan
from dynamo.engine.mock.timing import Timing
from dynamo.protocols import generate


class Rank:
    """Makes steps while there is work: schedule, wait as long as a GPU would, commit."""

    def __init__(self, number: int, batch: Batch, timing: Timing, clock: clocks.Clock) -> None:
        self.number = number
        self.batch = batch
        self._timing = timing
        self._clock = clock
        self._has_work = asyncio.Event()
        self._due = 0.0  # when the last step was over

    def submit(self, request: generate.Request) -> None:
        """Begin it with the next step."""
        self.batch.submit(request)
        self._has_work.set()

    async def live(self, sink: api.EngineSink) -> None:
        """Step until cancelled."""
        self._due = self._clock.now()
        while True:
            if not self.batch.has_work:
                self._has_work.clear()
                await self._has_work.wait()
                self._due = self._clock.now()
            await self._step(sink)

    def tell_events(self, sink: api.EngineSink) -> None:
        """What its cache took in and forgot since the last time."""
        if events := self.batch.take_events():
            sink.kv_events(events, self.number)

    async def _step(self, sink: api.EngineSink) -> None:
        await self._pace(self.batch.schedule())
        if outputs := self.batch.commit():
            sink.outputs(outputs)
        self.tell_events(sink)

    async def _pace(self, plan: Plan) -> None:
        """Wait until the step is over; what is late by less than a step is caught up."""
        duration_s = self._timing.step_s(
            num_prompt_tokens=plan.num_prompt_tokens,
            num_decoding=plan.num_decoding,
            active_share=plan.active_share,
        )
        now = self._clock.now()
        self._due = max(self._due, now - duration_s) + duration_s
        await self._clock.sleep(max(0.0, self._due - now))
