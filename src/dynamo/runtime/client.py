"""The asking side of one endpoint: it follows who serves it, chooses one, and goes to the next if that one is lost.

An instance that could not be reached, or broke in the middle of an answer, is *down*: it is asked only when
nobody else is left, until discovery tells of it again or one request has found it well. Every `inhibited_s` one is
allowed to try, while the others keep away. So a worker that was killed costs one failed attempt, not one per request,
one that is stopped keeps one request waiting at a time, and a hiccup of the network heals without anybody's help.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from dynamo.base import clock, errors, tasks
from dynamo.protocols import generate, instances
from dynamo.runtime import choice, discovery, requests

Mode = Literal["round-robin", "random"]
_log = logging.getLogger(__name__)
_decode_instance = msgspec.json.Decoder(instances.Instance).decode


class EndpointClient:
    """Started with `start`, ended with `close`; whoever made it does both."""

    def __init__(
        self,
        name: instances.EndpointName,
        registry: discovery.Discovery,
        plane: requests.RequestPlane,
        *,
        inhibited_s: float = 5.0,
        time: clock.Clock | None = None,
        draw: Callable[[int], int] = random.randrange,
    ) -> None:
        self.name = name
        self._path = name.path
        self._registry = registry
        self._plane = plane
        self._inhibited_s = inhibited_s
        self._clock = time or clock.SystemClock()
        self._draw = draw
        self._instances: dict[int, instances.Instance] = {}
        self._ids: tuple[int, ...] = ()
        self._down_until: dict[int, float] = {}
        self._last = 0  # chosen by round robin
        self._listeners: list[Callable[[], None]] = []
        self._is_served = asyncio.Event()
        self._tasks = tasks.Tasks()

    def start(self) -> None:
        """Begin to follow the instances."""
        self._tasks.start(f"watch instances of {self.name}", self._watch())

    async def close(self) -> None:
        """Follow them no more; open streams live on."""
        await self._tasks.close()

    @property
    def instances(self) -> Mapping[int, instances.Instance]:
        """Who serves this endpoint now, by instance id. A living view."""
        return self._instances

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call this after each change of `instances`."""
        self._listeners.append(listener)

    async def wait_for_instances(self, timeout_s: float) -> None:
        """Until somebody serves it. Raises NoWorkers if nobody does in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_served.wait()
        except TimeoutError:
            raise self._nobody(None) from None

    async def open(
        self,
        body: Any,
        receiver: requests.Receiver,
        *,
        mode: Mode = "round-robin",
        instance_id: int | None = None,
        among: Collection[int] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        on_asked: Callable[[int], None] | None = None,
    ) -> requests.Stream:
        """Ask `instance_id`, or whom `mode` chooses (`among` these, if given); each instance is tried at most once.

        `on_asked` is told the instance that took it, before anything comes back.

        Raises NoWorkers; and WorkerLost if `instance_id` is given and cannot be reached.
        """
        tried: dict[int, errors.WorkerLost] = {}
        while (chosen := self._choose(mode, instance_id, among, tried)) is not None:
            self._try(chosen)
            try:
                stream = await self._plane.open(
                    self._instances[chosen].transport[self._plane.name],
                    self._path,
                    body,
                    _Watched(receiver, self, chosen),
                    headers=headers,
                    timeout_s=timeout_s,
                )
            except errors.WorkerLost as error:
                self.report_down(chosen)
                if instance_id is not None:
                    raise
                tried[chosen] = error
            else:
                self._down_until.pop(chosen, None)
                if on_asked is not None:
                    on_asked(chosen)
                return stream
        raise self._nobody(instance_id, *tried.values())

    def choose(
        self,
        *,
        mode: Mode = "round-robin",
        instance_id: int | None = None,
        among: Collection[int] | None = None,
    ) -> int:
        """Whom `open` would ask first; nobody is asked. Raises NoWorkers."""
        chosen = self._choose(mode, instance_id, among, {})
        if chosen is None:
            raise self._nobody(instance_id)
        return chosen

    def report_down(self, instance_id: int) -> None:
        """Ask this one last, for a while."""
        if instance_id in self._instances:
            self._down_until[instance_id] = self._clock.now() + self._inhibited_s

    def _try(self, instance_id: int) -> None:
        """If it is down, this request sees whether it still is; the others keep away from it meanwhile."""
        if instance_id in self._down_until:
            self.report_down(instance_id)

    def usable(
        self, among: Collection[int] | None = None, tried: Collection[int] = ()
    ) -> Sequence[int]:
        """Who is worth asking now: living, of `among` if given, not tried yet, and not down unless all are."""
        living = self._ids if among is None else [i for i in self._ids if i in among]
        return choice.candidates(living, self._down_until, self._clock.now(), tried)

    def _choose(
        self,
        mode: Mode,
        instance_id: int | None,
        among: Collection[int] | None,
        tried: Mapping[int, Any],
    ) -> int | None:
        if instance_id is not None:
            return instance_id if instance_id in self._instances else None
        ids = self.usable(among, tried)
        if not ids:
            return None
        if mode == "random":
            return choice.at_random(ids, self._draw)
        self._last = choice.round_robin(ids, self._last)
        return self._last

    def _nobody(self, instance_id: int | None, *lost: errors.WorkerLost) -> errors.NoWorkers:
        if instance_id is not None:
            return errors.NoWorkers(f"no instance {instance_id:x} serves {self.name}")
        if lost:
            return errors.NoWorkers(
                f"none of the {len(lost)} instances of {self.name} can be reached: {lost[-1]}"
            )
        return errors.NoWorkers(
            f"nobody serves {self.name}: start a worker for it, in the same namespace and with the same discovery"
        )

    async def _watch(self) -> None:
        prefix = f"{instances.INSTANCES}{self.name.path}/"
        async for change in self._registry.watch(prefix):
            digits = change.key.removeprefix(prefix)
            try:
                self._apply(int(digits, 16), change)
            except ValueError as error:  # msgspec's errors are some too
                _log.warning("ignored %s in discovery: %s", change.key, error)

    def _apply(self, instance_id: int, change: discovery.Change) -> None:
        if isinstance(change, discovery.Put):
            instance = _decode_instance(change.value)
            if self._plane.name not in instance.transport:
                raise ValueError(
                    f"expected an address for the {self._plane.name} request plane, got {instance.transport}"
                )
            self._instances[instance_id] = instance
        else:
            self._instances.pop(instance_id, None)
        self._down_until.pop(instance_id, None)
        self._ids = tuple(sorted(self._instances))
        if self._ids:
            self._is_served.set()
        else:
            self._is_served.clear()
        for listener in self._listeners:
            listener()


class _Watched:
    """A receiver whose instance is reported down if it is lost in the middle; costs nothing per token."""

    __slots__ = ("_client", "_instance_id", "_receiver", "receive", "replied")

    def __init__(
        self, receiver: requests.Receiver, client: EndpointClient, instance_id: int
    ) -> None:
        self.receive: Callable[[generate.Output], None] = receiver.receive
        self.replied: Callable[[msgspec.Raw], None] = receiver.replied
        self._receiver = receiver
        self._client = client
        self._instance_id = instance_id

    def ended(self, error: errors.DynamoError | None) -> None:
        if isinstance(error, errors.WorkerLost):
            self._client.report_down(self._instance_id)
        self._receiver.ended(error)
