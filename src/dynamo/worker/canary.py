"""The health check of a quiet engine: a probe request, because an engine that hangs looks like an idle one.

An engine is quiet when its load has not changed for a while. An engine that computes a long prompt is not quiet: its
load shows how much of the prompt is left. So the worker gives up only an engine that neither answers the probe nor
makes any progress.
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

_PROBE_REQUEST = generate.Request(
    id="canary",
    model="canary",
    token_ids=blocks.pack((0,)),
    stop_conditions=generate.StopConditions(max_tokens=1, ignore_eos=True),
    sampling_options=generate.SamplingOptions(temperature=0.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """The time limits of a health check, in seconds."""

    wait_s: float = 10.0  # without progress, before the probe
    answer_s: float = 3.0  # for the answer to the probe


class Canary:
    """Probes one engine: `handle` accepts requests, `measure` returns the load of each rank."""

    def __init__(
        self,
        handle: requests.Handler,
        measure: Callable[[], Sequence[load.ForwardPassMetrics]],
        check: HealthCheck,
        clock: clocks.Clock,
    ) -> None:
        self._handle = handle
        self._measure = measure
        self._check = check
        self._clock = clock

    async def watch(self) -> errors.EngineFailed:
        """Probe the engine whenever it is quiet; return the error once it hangs."""
        while True:
            load_before = self._measure()
            await self._clock.sleep(self._check.wait_s)
            if self._measure() == load_before and not await self._is_alive():
                return errors.EngineFailed(
                    f"the engine hangs: it did not answer a token within {self._check.answer_s:g} s"
                )

    async def _is_alive(self) -> bool:
        probe = Probe()
        self._handle(probe)
        load_before = self._measure()
        try:
            async with self._clock.timeout(self._check.answer_s):
                await probe.is_answered.wait()
        except TimeoutError:
            probe.cancel()
            return self._measure() != load_before
        probe.cancel()
        return True


class Probe:
    """A `requests.Call` without a caller. Any answer ends it: an engine that refuses is alive, too."""

    endpoint = "canary"
    headers: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.body = msgspec.Raw(msgspec.msgpack.encode(_PROBE_REQUEST))
        self.is_answered = asyncio.Event()
        self._on_cancel: Callable[[], None] | None = None

    def cancel(self) -> None:
        """Abort the probe in the engine."""
        if self._on_cancel is not None:
            self._on_cancel()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self._on_cancel = callback

    def on_signal(self, callback: Callable[[int], None]) -> None:
        """Ignore the callback: the probe has one choice."""

    def send(self, output: generate.Output) -> None:
        self.is_answered.set()

    def reply(self, value: Any) -> None:
        self.is_answered.set()

    def finish(self) -> None:
        self.is_answered.set()

    def fail(self, error: errors.DynamoError) -> None:
        self.is_answered.set()
