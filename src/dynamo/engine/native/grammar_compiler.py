"""The grammar compiler of a worker: one trial per constraint in a process that can be ended, then the grammar itself.

    constraint ── cache ── cheap limits ── trial (`main`) ── compilation in a thread here ── cache

A compiled grammar cannot be passed from one process to another, so it is compiled again here: the trial has shown that
this takes at most two seconds and 512 MiB, and mostly a millisecond. The thread releases Python's lock meanwhile.
Requests with the same constraint share one compilation, which ends when the last of them leaves; verdicts are
cached, refusals too, so a hostile grammar costs its limits once. docs/decisions/0032 has the alternatives.
"""

import asyncio
import functools
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from dynamo.base import errors, tasks
from dynamo.engine import trials
from dynamo.engine.native.guided_decoding import CompiledGrammar, GrammarBuilder
from dynamo.protocols import generate

LIMITS = trials.TrialLimits(
    cpu_s=2,  # an ordinary grammar takes a thousandth of it
    memory=2**29,
    wall_s=300,
)
MAX_CACHED = 64  # grammars and refusals; the least recently used goes first
MAX_WAITING = 64  # constraints that are being compiled, or wait for it
MAX_AT_ONCE = 8

Eos = tuple[int, ...]  # the tokens that end an answer
Result = CompiledGrammar | errors.DynamoError


@dataclass(slots=True, eq=False)
class _Compilation:
    """One compilation and the requests that wait for it."""

    guided: generate.GuidedDecoding
    eos: Eos
    task: asyncio.Task[Result] | None = None
    num_waiting: int = 0
    is_tried: bool = False  # what follows is short, and is not given up

    @property
    def key(self) -> tuple[generate.GuidedDecoding, Eos]:
        """Return what distinguishes this grammar from others."""
        return self.guided, self.eos


class GrammarCompiler:
    """Compiles the grammars of one model; used on one event loop."""

    def __init__(self, tokenizer_path: Path, vocab_size: int) -> None:
        self._tokenizer = tokenizer_path, vocab_size
        self._cached: OrderedDict[tuple[generate.GuidedDecoding, Eos], Result] = OrderedDict()
        self._running: dict[tuple[generate.GuidedDecoding, Eos], _Compilation] = {}
        self._tasks = tasks.Tasks()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._lock = asyncio.Lock()  # of the two below
        self._trials: trials.TrialProcess | None = None
        self._builder: GrammarBuilder | None = None

    @property
    def is_possible(self) -> bool:
        """Return whether trials can run here, and the model has the tokenizer that compilation needs."""
        return sys.platform == "linux" and self._tokenizer[0].is_file()

    async def compile(self, guided: generate.GuidedDecoding, eos: Eos) -> CompiledGrammar:
        """Return the grammar of answers that one of the tokens `eos` ends.

        The last request that leaves ends the trial. Raises InvalidRequest for a constraint that is invalid or exceeds
        a limit, Overloaded, or EngineFailed.
        """
        result = self._cached.get((guided, eos))
        if result is None:
            running = self._join(guided, eos)
            assert running.task is not None
            try:
                result = await asyncio.shield(running.task)
            finally:
                running.num_waiting -= 1
                if not running.num_waiting and not running.is_tried:
                    self._remove(running)
                    running.task.cancel()
        else:
            self._cached.move_to_end((guided, eos))
        if isinstance(result, errors.InvalidRequest):
            raise errors.InvalidRequest(str(result), param=result.param)  # the first is kept
        if isinstance(result, errors.DynamoError):
            raise result
        return result

    async def close(self) -> None:
        """Give up all compilations."""
        await self._tasks.close()
        if self._trials is not None:
            await asyncio.to_thread(self._trials.close)
            self._trials = None

    def _join(self, guided: generate.GuidedDecoding, eos: Eos) -> _Compilation:
        """Wait for the running compilation of this constraint, or for a new one; return it."""
        running = self._running.get((guided, eos))
        if running is None:
            if len(self._running) >= MAX_WAITING:
                raise errors.Overloaded(f"{MAX_WAITING} grammars wait for compilation; try later")
            running = self._running[guided, eos] = _Compilation(guided, eos)
            running.task = self._tasks.start("compile a grammar", self._run(running))
        running.num_waiting += 1
        return running

    def _remove(self, running: _Compilation) -> None:
        if self._running.get(running.key) is running:
            del self._running[running.key]

    async def _run(self, running: _Compilation) -> Result:
        """Compile; return the grammar or the error, and cache it if another attempt would end in the same way."""
        result: Result
        try:
            async with self._slots:
                result = await self._compile(running)
        except errors.DynamoError as error:
            result = error
        except Exception as error:  # noqa: BLE001 - the waiting requests get the error
            result = errors.EngineFailed(f"no grammar could be compiled: {error!r}")
        finally:
            self._remove(running)
        if isinstance(result, CompiledGrammar | errors.InvalidRequest):
            self._cached[running.key] = result
            if len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        return result

    async def _compile(self, running: _Compilation) -> CompiledGrammar:
        async with self._lock:
            builder, process = await self._prepare(running.eos)
        verdict = await process.attempt(running.guided)
        verdict.check(running.guided, LIMITS)
        running.is_tried = True
        build = functools.partial(builder.build, running.guided)
        return await asyncio.to_thread(trials.run_deep, build)

    async def _prepare(self, eos: Eos) -> tuple[GrammarBuilder, trials.TrialProcess]:
        """Start the process for trials and read the tokenizer, both at once. Raises EngineFailed."""
        if self._trials is not None and (
            self._trials.has_ended or self._builder is None or self._builder.eos != eos
        ):
            await asyncio.to_thread(self._trials.close)
            self._trials = None
        if self._trials is None:
            path, vocab_size = self._tokenizer
            arguments = [str(path), str(vocab_size), ",".join(map(str, eos))]
            self._trials = trials.TrialProcess(__name__, arguments)
        if self._builder is None or self._builder.eos != eos:
            self._builder = await asyncio.to_thread(GrammarBuilder, *self._tokenizer, eos)
        return self._builder, self._trials


def main(arguments: list[str]) -> None:
    """Try grammars for the worker that started this process; the model's tokenizer is read before the first trial."""
    path, vocab_size, eos = arguments
    try:
        builder = GrammarBuilder(Path(path), int(vocab_size), tuple(map(int, eos.split(","))))
    except errors.EngineFailed:
        sys.exit(1)  # the worker, which reads the same file, reports it
    builder.build(trials.WARM_UP)  # children share its tables
    trials.serve(builder.build, LIMITS)


if __name__ == "__main__":
    main(sys.argv[1:])
