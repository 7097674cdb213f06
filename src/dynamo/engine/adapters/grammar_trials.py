"""The grammars that an engine of another project gets, each tried before by that project's code (`engine.trials`).

All requests and choices with the same grammar share one trial. What has been tried is cached by content. The process of
the trials starts with the first guided request.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from dynamo.base import errors, tasks
from dynamo.engine import trials
from dynamo.protocols import generate

MAX_CACHED = 256
MAX_WAITING = 64  # grammars, whichever number of requests has each
MAX_AT_ONCE = 4
_Result = trials.Verdict | errors.DynamoError


class GrammarTrials:
    """The trials of one engine; used on one event loop."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        limits: trials.TrialLimits,
        *,
        environment: Mapping[str, str] = {},
    ) -> None:
        """Nothing is started yet; `module` calls `trials.serve` with these limits."""
        self._module, self._arguments, self._limits = module, arguments, limits
        self._environment = environment
        self._process: trials.TrialProcess | None = None
        self._verdicts: OrderedDict[generate.GuidedDecoding, trials.Verdict] = OrderedDict()
        self._running: dict[generate.GuidedDecoding, asyncio.Task[_Result]] = {}
        self._tasks = tasks.Tasks()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def check(self, guided: generate.GuidedDecoding) -> None:
        """Return when the engine can be given this grammar. Raises InvalidRequest, Overloaded, or EngineFailed."""
        result: _Result | None = self._verdicts.get(guided)
        if result is None:
            result = await asyncio.shield(self._running.get(guided) or self._start(guided))
        else:
            self._verdicts.move_to_end(guided)
        if isinstance(result, errors.DynamoError):
            raise result
        result.check(guided, self._limits)

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
        except OSError as error:  # the process cannot start, as without memory
            return errors.EngineFailed(f"no grammar can be tried: {error}")
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
            self._process = trials.TrialProcess(
                self._module, self._arguments, environment=self._environment
            )
        return await self._process.attempt(guided)

    async def close(self) -> None:
        """End all trials and their process."""
        await self._tasks.close()
        await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.close)
