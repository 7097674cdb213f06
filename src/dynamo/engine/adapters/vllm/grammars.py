"""Grammars for vLLM: each new one is tried by vLLM's own code, in a process that can be ended (`engine.trials`).

vLLM checks a grammar on the worker's event loop and compiles it in a few threads of its engine, both without an end: a
schema of a few hundred characters would stop the worker, or all guided answers. What has been tried is cached by
content. The process starts with the first guided request, because it imports vLLM once more.
"""

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from dynamo.base import errors, tasks
from dynamo.engine import trials
from dynamo.engine.adapters import translation
from dynamo.protocols import generate

LIMITS = trials.TrialLimits(
    cpu_s=10,  # of large vocabularies: vLLM's XGrammar looks at each token in each state
    memory=2**30,
    wall_s=600,
)
MAX_CHECK_S = 1.0  # of the event loop, for which all streams of the worker wait
MAX_CACHED = 256
MAX_WAITING = 64  # grammars, whichever number of requests has each
MAX_AT_ONCE = 4
_ENVIRONMENT = {  # threads do not survive a fork, and each would reserve memory of its own
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CONFIGURE_LOGGING": "0",
}
_Result = trials.Verdict | errors.DynamoError


class GrammarTrials:
    """The trials of one engine; used on one event loop."""

    def __init__(self, model: Path, flags: Sequence[str]) -> None:
        """Nothing is started yet. `flags` are those of vLLM's engine, beside the directory of its model."""
        self._arguments = [str(model), *flags]
        self._process: trials.TrialProcess | None = None
        self._verdicts: OrderedDict[generate.GuidedDecoding, trials.Verdict] = OrderedDict()
        self._running: dict[generate.GuidedDecoding, asyncio.Task[_Result]] = {}
        self._tasks = tasks.Tasks()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def check(self, guided: generate.GuidedDecoding) -> None:
        """Return when vLLM can be given this grammar. Raises InvalidRequest, Overloaded, or EngineFailed.

        All choices and requests with the same grammar share one trial.
        """
        result: _Result | None = self._verdicts.get(guided)
        if result is None:
            result = await asyncio.shield(self._running.get(guided) or self._start(guided))
        else:
            self._verdicts.move_to_end(guided)
        if isinstance(result, errors.DynamoError):
            raise result
        result.check(guided, LIMITS)

    def _start(self, guided: generate.GuidedDecoding) -> "asyncio.Task[_Result]":
        if len(self._running) >= MAX_WAITING:
            raise errors.Overloaded(f"{MAX_WAITING} grammars wait for compilation; try later")
        task = self._running[guided] = self._tasks.start("try a grammar", self._run(guided))
        return task

    async def _run(self, guided: generate.GuidedDecoding) -> "_Result":
        """Return the verdict, or why there is none; keep it if another trial would end in the same way."""
        try:
            async with self._slots:
                verdict = await self._attempt(guided)
        except errors.DynamoError as error:
            return error
        finally:
            del self._running[guided]
        if not verdict.is_by_chance:
            self._verdicts[guided] = verdict
            if len(self._verdicts) > MAX_CACHED:
                self._verdicts.popitem(last=False)
        return verdict

    async def _attempt(self, guided: generate.GuidedDecoding) -> trials.Verdict:
        if self._process is not None and self._process.has_ended:
            await self._end_process()
        if self._process is None:
            self._process = trials.TrialProcess(__name__, self._arguments, environment=_ENVIRONMENT)
        return await self._process.attempt(guided)

    async def close(self) -> None:
        """End all trials and their process."""
        await self._tasks.close()
        await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.close)


def main(model: str, *flags: str) -> None:
    """Serve the worker that started this process."""
    from dynamo.engine.adapters.vllm import versions  # takes seconds, and is in the worker already

    config = versions.make_config(versions.read_flags(flags, {"model": model}))
    structured = config.structured_outputs_config
    support = translation.GuidedSupport(structured.backend, bool(structured.reasoning_parser))
    compile_grammar = versions.make_grammar_compiler(config)

    def build(guided: generate.GuidedDecoding) -> None:
        check_s = compile_grammar(translation.structured_output_fields(guided, support))
        if check_s > MAX_CHECK_S:
            raise trials.refuse(guided, f"vLLM needs {check_s:.1f} s to check it")

    build(trials.WARM_UP)  # children share its tables
    trials.serve(build, LIMITS)


if __name__ == "__main__":
    main(*sys.argv[1:])
