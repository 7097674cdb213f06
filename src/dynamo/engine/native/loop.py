"""The engine's loop: one thread, and the only one that uses the scheduler, the memory and the runner.

    event loop  ──commands: submit, abort, clear, stop──▶  this thread  ──one delivery per step──▶  event loop

Commands run between steps, in order; with nothing to compute, the thread waits in their queue. The results of a step
are delivered as one value, however many sequences they cover. Copies between cache tiers begin between steps and run
beside them; their ends come as commands.
"""

import contextlib
import functools
import queue
import time
import weakref
from collections import abc
from typing import Protocol

from dynamo.base import errors
from dynamo.engine.native.scheduler import Scheduler, StepResult
from dynamo.engine.native.sequence import Chunk, Grammar, Sampled, Sequence
from dynamo.kvbm import sharing, tier_copies, tier_jobs, tier_report
from dynamo.observability import tracing
from dynamo.protocols import generate, kv_events


class ModelRunner(Protocol):
    """The interface to the model runner (`runner.Runner`, or a fake)."""

    def run(self, chunks: abc.Sequence[Chunk]) -> abc.Sequence[Sampled | errors.DynamoError | None]:
        """Compute the chunks; return for each the drawn token, an error, or None if it does not sample."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that has ended."""


class EngineLoop:
    """`run` and `step` are called by the engine's thread; the other methods may be called by any."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        deliver: abc.Callable[[StepResult], None],
        begin_imports: abc.Callable[[list[sharing.KvImport]], None],
        copies: tier_copies.TierCopies | None = None,
    ) -> None:
        """`copies` makes the copies between the tiers of the scheduler's cache."""
        self._scheduler = scheduler
        self._runner = runner
        self._deliver = deliver
        self._begin_imports = begin_imports
        self._commands: queue.SimpleQueue[abc.Callable[[], None]] = queue.SimpleQueue()
        self._copies = copies
        # By request id, as long as a request runs whose spans are exported.
        self._records = weakref.WeakValueDictionary[str, tracing.StageRecord]()
        self._is_stopping = False
        self.load = scheduler.load()  # as of the last step or command; replaced, never changed

    def run(self) -> None:
        """Run steps and commands until `stop` is called."""
        if self._copies is not None:
            self._copies.open(self._commands.put, self._end_tier_copy, self._add_slots)
        try:
            while not self._is_stopping:
                has_computed = self._scheduler.has_work and self.step()
                if not (has_computed and self._scheduler.has_work):
                    self._wait_for_command()
                while not self._commands.empty():
                    self._commands.get()()
                self.load = self._scheduler.load()
        finally:
            if self._copies is not None:
                self._copies.close()

    def step(self) -> bool:
        """Schedule, run, commit. Returns False if nothing can be computed before a command comes."""
        chunks = self._scheduler.schedule()
        while self._copies is not None and self._begin_copies(self._copies):
            chunks = self._scheduler.schedule()  # once more: nothing was computed since
        if imports := self._scheduler.take_imports():
            self._begin_imports(imports)  # before the step, so that they run at the same time
        if not chunks:
            return False
        began_at = time.perf_counter()
        sampled = self._runner.run(chunks)
        wall_s = time.perf_counter() - began_at
        if self._scheduler.tiers is not None:
            self._scheduler.tiers.cost.record_step(sum(c.num_tokens for c in chunks), wall_s)
        self._scheduler.record_pass(chunks, wall_s)
        result = self._scheduler.commit(chunks, sampled)
        self._forget(result.ended)
        self.load = self._scheduler.load()  # before delivery, so that a listener reads the new load
        self._deliver(result)
        return True

    def submit(self, request: generate.Request, grammar: Grammar | None = None) -> None:
        """Add a request before the next step. The stages of its call include its reads from cache tiers."""
        if self._copies is not None and (record := tracing.stage_record.get()) is not None:
            self._records[request.id] = record
        self._commands.put(functools.partial(self._submit, request, grammar))

    def abort(self, request_id: str) -> None:
        """Abort a request before the next step."""
        self._commands.put(functools.partial(self._abort, request_id))

    def abort_choice(self, request_id: str, index: int) -> None:
        """Abort one choice of a request before the next step."""
        self._commands.put(functools.partial(self._abort_choice, request_id, index))

    def end_import(self, import_id: int, *, is_copied: bool) -> None:
        """Let the sequence of an import go on before the next step."""
        end = functools.partial(self._scheduler.end_import, import_id, is_copied=is_copied)
        self._commands.put(end)

    def release_lease(self, lease_id: int) -> None:
        """Free blocks that were leased to another engine."""
        self._commands.put(functools.partial(self._scheduler.release_lease, lease_id))

    def clear(self, on_cleared: tier_copies.OnPurged) -> None:
        """Clear the prefix cache, then call `on_cleared` in this or another thread."""
        self._commands.put(functools.partial(self._clear, on_cleared))

    def report_tiers(self) -> tier_report.TierReport | None:
        """Return the report on the cache tiers; None if there are none."""
        return self._scheduler.report_tiers()

    def stop(self) -> None:
        """End `run` before the next step."""
        self._commands.put(self._end_run)

    def _wait_for_command(self) -> None:
        """Run the next command, when one comes; before that copy and publish what there is."""
        copies = self._copies
        if copies is None:
            self._commands.get()()
            return
        if self._begin_copies(copies):
            return
        result = self._scheduler.take_events()
        if result.block_events:
            self._deliver(result)
        with contextlib.suppress(queue.Empty):  # a copy is late
            self._commands.get(timeout=copies.seconds_to_deadline())()

    def _begin_copies(self, copies: tier_copies.TierCopies) -> bool:
        """Begin copies between tiers, and make quick loads at once.

        Return whether a sequence can go on that could not before.
        """
        tiers = self._scheduler.tiers
        assert tiers is not None
        tiers.record_time(time.monotonic())
        tiers.apply_changes(copies.look())
        late = copies.take_late()
        for copy in late:
            is_load = copy.path[1] is kv_events.DEVICE  # which is waited for in any case
            if self._records and not is_load:
                self._record_read(copy, tier_report.describe_late_read(copy, time.monotonic()))
            tiers.stop_waiting(copy)
        can_go_on = bool(late)
        for copy in tiers.take_copies():
            if copy.is_quick:
                outcome = copies.run(copy)
                self._end_tier_copy(copy, outcome)
                can_go_on = True
            else:
                copies.begin(copy)
        return can_go_on

    def _end_tier_copy(self, copy: tier_jobs.TierCopy, outcome: tier_copies.CopyOutcome) -> None:
        if self._records:
            num_failed = len(outcome.failed)
            read = tier_report.describe_read(
                copy, outcome.began_at, outcome.ended_at, num_failed=num_failed
            )
            self._record_read(copy, read)
        assert self._scheduler.tiers is not None
        self._scheduler.tiers.record_time(time.monotonic())
        self._scheduler.end_tier_copy(copy, outcome.failed, outcome.seconds)
        self._deliver_exports()

    def _record_read(self, copy: tier_jobs.TierCopy, read: tier_report.TierRead) -> None:
        """Add a read from a tier to the stages of the requests that wait for it."""
        assert self._scheduler.tiers is not None
        for sequence in self._scheduler.tiers.waiting_for(copy):
            if not isinstance(sequence, Sequence):
                continue
            record = self._records.get(sequence.request.id)
            if record is not None:
                record.stages.append(
                    tracing.Stage("read_tier", read.began_at, read.ended_at, read.attributes)
                )

    def _deliver_exports(self) -> None:
        """Deliver the answers to requests for cached blocks now: they wait for no step."""
        if (result := self._scheduler.take_exports()).outputs:
            self._deliver(result)

    def _add_slots(self, num_slots: int) -> None:
        assert self._scheduler.tiers is not None
        self._scheduler.tiers.host.add_slots(num_slots)

    def _submit(self, request: generate.Request, grammar: Grammar | None) -> None:
        if self._copies is not None and self._scheduler.tiers is not None:
            self._scheduler.tiers.record_time(time.monotonic())
            self._scheduler.tiers.apply_changes(self._copies.look())
        self._scheduler.submit(request, grammar)
        self._deliver_exports()

    def _abort(self, request_id: str) -> None:
        self._forget(self._scheduler.abort(request_id))

    def _abort_choice(self, request_id: str, index: int) -> None:
        self._forget(self._scheduler.abort_choice(request_id, index))

    def _clear(self, on_cleared: tier_copies.OnPurged) -> None:
        self._deliver(self._scheduler.clear())
        if self._copies is None:
            on_cleared(None)
        else:
            self._copies.forget(on_cleared)

    def _end_run(self) -> None:
        self._is_stopping = True

    def _forget(self, ended: abc.Sequence[Sequence]) -> None:
        for sequence in ended:
            self._runner.forget(sequence)
