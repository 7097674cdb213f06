"""A worker that sleeps: its engine has given its memory back, nobody finds it, and it can be woken.

    awake ── sleep: leaves as one that stops does ──▶ asleep ── wake_up: comes back as one that starts ──▶ awake

One change at a time, and each bounded: an engine that fails at it, or is not done in time, is in a state that nobody
knows. It counts as dead, which ends the worker, so that whoever watches over it can start another.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from dynamo.base import errors, tasks
from dynamo.engine import api

CHANGE_S = 300.0  # a large model to host memory takes seconds, from the disk minutes
_logger = logging.getLogger(__name__)


class Worker(Protocol):
    """What is done around an engine's sleep."""

    async def retire(self) -> None:
        """Be found no more, and have nothing under way. Bounded in time."""
        ...

    async def forget_prefixes(self) -> None:
        """The engine's, and say so."""
        ...

    async def come_back(self) -> None:
        """Take requests, and be found."""
        ...

    def died(self, error: errors.EngineFailed) -> None:
        """The engine is beyond use."""
        ...


class Sleeping:
    """Of one worker, which can be told from `begin` on."""

    def __init__(
        self, sleeper: api.SleepController, worker: Worker, *, change_s: float = CHANGE_S
    ) -> None:
        self._sleeper, self._worker = sleeper, worker
        self._change_s = change_s
        self._state = "not ready yet"
        self._level = 0
        self._tasks = tasks.Tasks()

    def begin(self) -> None:
        """The worker serves."""
        self._state = "awake"

    async def close(self) -> None:
        """A change that is under way ends now, wherever it is."""
        self._state = "about to stop"
        await self._tasks.close()

    async def sleep(self, level: int) -> str:
        """To `api.SleepController.sleep`; gives what became of it. Raises Conflict, EngineFailed."""
        if self._state == "asleep":
            return f"asleep already (level {self._level})"
        return await self._change("awake", "falling asleep", self._fall_asleep(level))

    async def wake_up(self, tags: Sequence[str]) -> str:
        """To `api.SleepController.wake_up`; gives what became of it. Raises Conflict, EngineFailed."""
        if self._state == "awake":
            return "awake already"
        return await self._change("asleep", "waking up", self._wake_up(tags))

    async def _change(self, before: str, meanwhile: str, work: Coroutine[Any, Any, str]) -> str:
        """Goes on to its end though nobody waits for it any more."""
        if self._state != before:
            work.close()
            raise errors.Conflict(f"the worker is {self._state}: ask again when it is not")
        self._state = meanwhile
        task = self._tasks.start(meanwhile, self._or_die(meanwhile, work))
        await asyncio.wait([task])
        if task.cancelled():
            raise errors.Conflict(f"the worker stops while it is {meanwhile}")
        result: str | errors.EngineFailed = task.result()
        if isinstance(result, errors.EngineFailed):
            raise result
        return result

    async def _or_die(self, what: str, work: Coroutine[Any, Any, str]) -> str | errors.EngineFailed:
        try:
            return await work
        except Exception as error:  # noqa: BLE001 - whatever an engine raises at it, it is lost
            is_late = isinstance(error, TimeoutError)
            why = f"not done within {self._change_s:g} s" if is_late else error
            failure = errors.EngineFailed(f"the engine failed while {what}: {why}")
            failure.__cause__ = error
        self._state = "lost"
        self._worker.died(failure)
        return failure

    async def _fall_asleep(self, level: int) -> str:
        await self._worker.retire()
        async with asyncio.timeout(self._change_s):
            await self._worker.forget_prefixes()
            await self._sleeper.sleep(level)
        self._state, self._level = "asleep", level
        _logger.info("asleep (level %d)", level)
        return f"asleep (level {level})"

    async def _wake_up(self, tags: Sequence[str]) -> str:
        async with asyncio.timeout(self._change_s):
            is_awake = await self._sleeper.wake_up(tags)
        if not is_awake:
            self._state = "asleep"
            return f"asleep still, though {', '.join(tags)} may be back"
        await self._worker.come_back()
        self._state = "awake"
        _logger.info("awake")
        return "awake"
