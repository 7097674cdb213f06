"""The engine's loop: one thread, which alone touches scheduler, memory and runner.

    event loop  ──commands: submit, abort, clear, stop──▶  this thread  ──one delivery per step──▶  event loop

Commands are carried out between steps, in order; with nothing to do, the thread sleeps in their queue. What a step
brought is delivered as one value, however many sequences it carries.
"""

import functools
import queue
from collections import abc
from typing import Protocol

from dynamo.base import errors
from dynamo.engine.native.scheduler import Scheduler, StepResult
from dynamo.engine.native.sequence import Chunk, Grammar, Sampled, Sequence
from dynamo.kvbm import sharing
from dynamo.protocols import generate


class Runner(Protocol):
    """What computes (`runner.Runner`, or a fake)."""

    def run(self, chunks: abc.Sequence[Chunk]) -> abc.Sequence[Sampled | errors.DynamoError | None]:
        """Compute all; for each chunk that samples the token drawn, or why none could be drawn, else None."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """This sequence is over: drop what is kept for it."""
        ...


def _refuse_imports(imports: list[sharing.KvImport]) -> None:
    raise errors.LocalProtocolError(f"this engine cannot import blocks, got {len(imports)} imports")


class EngineLoop:
    """`run` and `step` belong to the thread; all else may be called from any."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        deliver: abc.Callable[[StepResult], None],
        begin_imports: abc.Callable[[list[sharing.KvImport]], None] = _refuse_imports,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._deliver = deliver
        self._begin_imports = begin_imports
        self._commands: queue.SimpleQueue[abc.Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self.load = scheduler.load()  # as of the last step or command; replaced, never changed

    def run(self) -> None:
        """Work until stopped."""
        while not self._is_stopping:
            has_worked = self._scheduler.has_work and self.step()
            self._carry_out_commands(must_wait=not (has_worked and self._scheduler.has_work))
            self.load = self._scheduler.load()

    def step(self) -> bool:
        """Schedule, run, commit. False if nothing can be computed before a command comes."""
        chunks = self._scheduler.schedule()
        if imports := self._scheduler.take_imports():
            self._begin_imports(imports)  # before the step, so that they run beside it
        if not chunks:
            return False
        sampled = self._runner.run(chunks)
        result = self._scheduler.commit(chunks, sampled)
        self._forget(result.ended)
        self.load = self._scheduler.load()  # whoever hears of the step finds the load after it
        self._deliver(result)
        return True

    def submit(self, request: generate.Request, grammar: Grammar | None = None) -> None:
        """Begin it with the next step."""
        self._commands.put(functools.partial(self._scheduler.submit, request, grammar))

    def abort(self, request_id: str) -> None:
        """End it before the next step."""
        self._commands.put(functools.partial(self._abort, request_id))

    def abort_choice(self, request_id: str, index: int) -> None:
        """End one choice of it before the next step."""
        self._commands.put(functools.partial(self._abort_choice, request_id, index))

    def end_import(self, import_id: int, *, is_copied: bool) -> None:
        """A copy has ended: its sequence may go on."""
        end = functools.partial(self._scheduler.end_import, import_id, is_copied=is_copied)
        self._commands.put(end)

    def release_lease(self, lease_id: int) -> None:
        """Nobody needs these blocks any more."""
        self._commands.put(functools.partial(self._scheduler.release_lease, lease_id))

    def clear(self, done: abc.Callable[[], None]) -> None:
        """Forget all reusable prefixes, then call `done` (in the thread)."""
        self._commands.put(functools.partial(self._clear, done))

    def stop(self) -> None:
        """Leave `run` before the next step."""
        self._commands.put(self._leave)

    def _carry_out_commands(self, *, must_wait: bool) -> None:
        """All that are there, at least one if it must be waited for."""
        if must_wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _abort(self, request_id: str) -> None:
        self._forget(self._scheduler.abort(request_id))

    def _abort_choice(self, request_id: str, index: int) -> None:
        self._forget(self._scheduler.abort_choice(request_id, index))

    def _clear(self, done: abc.Callable[[], None]) -> None:
        self._deliver(self._scheduler.clear())
        done()

    def _leave(self) -> None:
        self._is_stopping = True

    def _forget(self, ended: abc.Sequence[Sequence]) -> None:
        for sequence in ended:
            self._runner.forget(sequence)
