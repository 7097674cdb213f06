"""One data-parallel rank of the simulated engine: a scheduler, its cache, and the task that makes its steps."""

import asyncio

from dynamo.base import clock as clocks
from dynamo.engine import api
from dynamo.engine.mock.batch import Batch, Plan
from dynamo.engine.mock.timing import Timing
from dynamo.kvbm import exchange as exchanges
from dynamo.protocols import generate


class Rank:
    """Makes steps while there is work: schedule, wait as long as a GPU would, commit."""

    def __init__(
        self,
        number: int,
        batch: Batch,
        timing: Timing,
        clock: clocks.Clock,
        exchange: exchanges.KvExchange,
    ) -> None:
        self.number = number
        self.batch = batch
        self._timing = timing
        self._clock = clock
        self._exchange = exchange
        self._has_changed = asyncio.Event()
        self._due = 0.0  # when the last step was over

    def submit(self, request: generate.Request) -> None:
        """Begin it with the next step."""
        self.batch.submit(request)
        self._has_changed.set()

    def end_import(self, import_id: int, *, is_copied: bool) -> None:
        """Let the choice of an import go on."""
        self.batch.end_import(import_id, is_copied=is_copied)
        self._has_changed.set()

    def release_lease(self, lease_id: int) -> None:
        """Free the blocks under a lease."""
        self.batch.release_lease(lease_id)
        self._has_changed.set()

    async def live(self, sink: api.EngineSink) -> None:
        """Step until cancelled."""
        self._due = self._clock.now()
        while True:
            plan = self.batch.schedule()
            if imports := self.batch.take_imports():
                self._exchange.begin_imports(imports)
            if plan.is_empty:
                self._has_changed.clear()
                await self._has_changed.wait()
                self._due = self._clock.now()
            else:
                await self._step(plan, sink)

    def tell_events(self, sink: api.EngineSink) -> None:
        """What its cache took in and forgot since the last time."""
        if events := self.batch.take_events():
            sink.kv_events(events, self.number)

    async def _step(self, plan: Plan, sink: api.EngineSink) -> None:
        await self._pace(plan)
        outputs = self.batch.commit()
        if holding := self.batch.take_holding():
            outputs = [self._placed(holding, one) for one in outputs]
        if outputs:
            sink.outputs(outputs)
        self.tell_events(sink)

    def _placed(
        self, holding: dict[str, generate.Request], told: api.EngineOutput
    ) -> api.EngineOutput:
        """If blocks are held with this output: told where they are."""
        if told.output.kv_transfer_params is None:
            return told
        output = self._exchange.publish_lease(holding[told.request_id], told.output)
        return api.EngineOutput(told.request_id, output)

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
