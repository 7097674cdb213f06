"""The sleep of a worker: its engine releases its memory, no frontend finds it, and an operator can wake it.

    awake ── sleep: drain as when stopping ──▶ asleep ── wake_up: register as when starting ──▶ awake

While it sleeps, discovery has an estimate of how long waking up takes (as long as it took last time; before the first
time, as long as falling asleep): requests of a model without another worker wait for it.

One change runs at a time, for a bounded time. An engine that fails in a change, or does not finish it in time, is in an
unknown state. It counts as dead, which ends the worker, so that a supervisor can start a new one.

Routes of the system port, named as in NVIDIA Dynamo:

POST /engine/sleep      {"level": 1}           level 1 keeps the weights in host memory, level 2 drops them
POST /engine/wake_up    {"tags": ["weights"]}  weights, kv_cache, or without tags both

200 when the worker is in that state, also if it was before; 400 names a wrong field; 409: another change runs.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.runtime.http import exchange, json_body
from dynamo.worker import health

CHANGE_S = 300.0  # a large model moves to host memory within seconds, from the disk within minutes
_logger = logging.getLogger(__name__)
_Command = Callable[[bytes], Awaitable[Mapping[str, object]]]


class SleepRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /engine/sleep."""

    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1


class WakeUpRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /engine/wake_up."""

    tags: list[Literal["weights", "kv_cache"]] = []


_decode_sleep = json_body.RequestDecoder(SleepRequest).decode
_decode_wake_up = json_body.RequestDecoder(WakeUpRequest).decode


class SleepingWorker(Protocol):
    """What a worker does before its engine sleeps and after it wakes."""

    async def withdraw(self) -> None:
        """Leave discovery and finish or hand over all requests, within a bounded time."""
        ...

    async def promise_wake_up(self, estimate_s: float) -> None:
        """Have frontends hold requests for a worker that wakes up within about `estimate_s` seconds."""
        ...

    async def clear_prefixes(self) -> None:
        """Drop the engine's cached prefixes and publish that."""
        ...

    async def restore(self) -> None:
        """Accept requests and register in discovery."""
        ...

    def died(self, error: errors.EngineFailed) -> None:
        """End the worker because its engine is unusable."""
        ...


class Sleep:
    """Puts one worker to sleep and wakes it, on an operator's command, from `begin` on."""

    def __init__(
        self,
        controller: api.SleepController,
        worker: SleepingWorker,
        clock: clocks.Clock,
        *,
        change_s: float = CHANGE_S,
    ) -> None:
        self._controller, self._worker, self._clock = controller, worker, clock
        self._change_s = change_s
        self._state = "not ready yet"
        self._level = 0
        self._wake_up_s: float | None = None  # how long it took last time
        self._tasks = tasks.Tasks()

    def begin(self) -> None:
        """Accept commands: the worker serves now."""
        self._state = "awake"

    async def close(self) -> None:
        """Refuse commands, and cancel the change that is under way."""
        self._state = "about to stop"
        await self._tasks.close()

    async def sleep(self, level: int) -> str:
        """Put the worker to sleep and return its state in words. Raises Conflict or EngineFailed."""
        if self._state == "asleep":
            return f"asleep already (level {self._level})"
        return await self._change("awake", "falling asleep", self._fall_asleep(level))

    async def wake_up(self, tags: Sequence[str]) -> str:
        """Wake the worker and return its state in words. Raises Conflict or EngineFailed."""
        if self._state == "awake":
            return "awake already"
        return await self._change("asleep", "waking up", self._wake_up(tags))

    def routes(self) -> Mapping[tuple[str, str], exchange.Handler]:
        """Return the routes of the system port for both commands."""

        async def sleep(body: bytes) -> Mapping[str, object]:
            return {"status": "ok", "message": await self.sleep(_decode_sleep(body).level)}

        async def wake_up(body: bytes) -> Mapping[str, object]:
            return {"status": "ok", "message": await self.wake_up(_decode_wake_up(body).tags)}

        async def respond(command: _Command, request: exchange.Exchange) -> None:
            await health.respond(request, command(request.request.body or b"{}"))

        return {
            ("POST", "/engine/sleep"): functools.partial(respond, sleep),
            ("POST", "/engine/wake_up"): functools.partial(respond, wake_up),
        }

    async def _change(
        self, required_state: str, transient_state: str, work: Coroutine[Any, Any, str]
    ) -> str:
        """Run a change of state to its end, even if the caller is cancelled meanwhile."""
        if self._state != required_state:
            work.close()
            raise errors.Conflict(f"the worker is {self._state}: ask again when it is not")
        self._state = transient_state
        task = self._tasks.start(transient_state, self._run_or_fail(transient_state, work))
        await asyncio.wait([task])
        if task.cancelled():
            raise errors.Conflict(f"the worker stops while it is {transient_state}")
        result: str | errors.EngineFailed = task.result()
        if isinstance(result, errors.EngineFailed):
            raise result
        return result

    async def _run_or_fail(
        self, transient_state: str, work: Coroutine[Any, Any, str]
    ) -> str | errors.EngineFailed:
        try:
            return await work
        except Exception as error:  # noqa: BLE001 - whatever the engine raises here, it is lost
            is_late = isinstance(error, TimeoutError)
            reason = f"not done within {self._change_s:g} s" if is_late else error
            failure = errors.EngineFailed(f"the engine failed while {transient_state}: {reason}")
            failure.__cause__ = error
        self._state = "lost"
        self._worker.died(failure)
        return failure

    async def _fall_asleep(self, level: int) -> str:
        await self._worker.withdraw()
        began_at = self._clock.now()
        async with self._clock.timeout(self._change_s):
            await self._worker.clear_prefixes()
            await self._controller.sleep(level)
        took_s = self._clock.now() - began_at
        await self._worker.promise_wake_up(took_s if self._wake_up_s is None else self._wake_up_s)
        self._state, self._level = "asleep", level
        _logger.info("asleep (level %d)", level)
        return f"asleep (level {level})"

    async def _wake_up(self, tags: Sequence[str]) -> str:
        began_at = self._clock.now()
        async with self._clock.timeout(self._change_s):
            is_awake = await self._controller.wake_up(tags)
        if not is_awake:
            self._state = "asleep"
            return f"asleep still, though {', '.join(tags)} may be back"
        await self._worker.restore()
        self._wake_up_s = self._clock.now() - began_at
        self._state = "awake"
        _logger.info("awake")
        return "awake"
