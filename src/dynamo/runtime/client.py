"""The client of one endpoint: it follows the endpoint's instances, chooses one, and tries the next if that one is lost.

An instance that could not be reached, or broke in the middle of an answer, is *down*: it is chosen only when no other
is left, until discovery reports it again or one request has reached it. Every `inhibited_s` one request may try it,
while the others keep away. So a worker that was killed costs one failed attempt, not one per request, a stopped one
keeps one request waiting at a time, and a hiccup of the network heals by itself. One that discovery has lost, and that
may live or be unready, is chosen only when no other is left, for as long as that lasts.

Three ways to ask: `call` returns one reply, `stream` iterates over many, and `open` delivers by callback, which is the
cheapest per item.
"""

import asyncio
import bisect
import functools
import logging
import math
import random
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import msgspec

from dynamo.base import clock, errors, tasks
from dynamo.protocols import instances
from dynamo.runtime import discovery, requests

Mode = Literal["round-robin", "random"]
T = TypeVar("T")
_log = logging.getLogger(__name__)
_decode_instance = msgspec.json.Decoder(instances.Instance).decode


class RequestOptions(TypedDict, total=False):
    """The choice of the instance for a request (see `EndpointClient.open`), and the request's metadata and limit."""

    mode: Mode
    instance_id: int | None
    among: Collection[int] | None
    headers: Mapping[str, str] | None
    timeout_s: float | None


class EndpointClient:
    """The instances of one endpoint and the requests to them. `start` and `close` it; its maker does both."""

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
        """`inhibited_s`: seconds for which a lost instance is avoided; `draw(n)` returns a random number below `n`."""
        self.name = name
        self._path = name.path
        self._registry = registry
        self._plane = plane
        self._inhibited_s = inhibited_s
        self._clock = time or clock.SystemClock()
        self._draw = draw
        self._instances: dict[int, instances.Instance] = {}
        # the present instances of this endpoint by id: a live view
        self.instances: Mapping[int, instances.Instance] = self._instances
        self._ids: tuple[int, ...] = ()
        self._down_until: dict[int, float] = {}
        self._unconfirmed: set[int] = set()  # discovery has lost them, and they may live
        self._last_chosen = 0  # by round robin
        self._listeners: list[Callable[[], None]] = []
        self._is_served = asyncio.Event()
        self._tasks = tasks.Tasks()

    def start(self) -> None:
        """Begin to follow the instances."""
        self._tasks.start(f"watch instances of {self.name}", self._watch())

    async def close(self) -> None:
        """Stop following the instances; open streams go on."""
        await self._tasks.close()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call this after each change of `instances`."""
        self._listeners.append(listener)

    async def wait_for_instances(self, timeout_s: float) -> None:
        """Wait until there is an instance. Raises NoWorkers if there is none within `timeout_s`."""
        try:
            async with self._clock.timeout(timeout_s):
                await self._is_served.wait()
        except TimeoutError:
            raise self._no_workers(None) from None

    async def open(  # noqa: PLR0913 (the constraints of one request, all but two with a default)
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
        alternatives: Callable[[], Collection[int]] | None = None,
        gives_up_early: bool = False,
    ) -> requests.Stream:
        """Open a stream to `instance_id`, or to the instance that `mode` chooses (`among` these, if given).

        Each instance is tried at most once. `on_asked` gets the id of the one that took the request, before anything
        comes back. `alternatives` returns the instances that can take the request over: an instance that is silent is
        given up only for one of them, or when it has left discovery; without it, always. `gives_up_early` is that of
        `RequestPlane.open`. Raises NoWorkers; and WorkerLost if `instance_id` is given and cannot be reached.
        """
        lost_by_id: dict[int, errors.DynamoError] = {}
        while (chosen := self._choose(mode, instance_id, among, lost_by_id)) is not None:
            if chosen in self._down_until:
                self.report_down(chosen)  # this request tries it; the others keep away meanwhile
            try:
                stream = await self._plane.open(
                    self._instances[chosen].transport[self._plane.name],
                    self._path,
                    body,
                    _WatchedReceiver(receiver, self, chosen),
                    instance_id=chosen,
                    headers=headers,
                    timeout_s=timeout_s,
                    may_move=None
                    if alternatives is None
                    else functools.partial(self._has_alternative, chosen, alternatives),
                    gives_up_early=gives_up_early,
                )
            except (errors.WorkerLost, errors.NoWorkers) as error:  # NoWorkers: it changed its role
                self.report_down(chosen)
                if instance_id is not None:
                    raise
                lost_by_id[chosen] = error
            else:
                self._note_reached(chosen)
                if on_asked is not None:
                    on_asked(chosen)
                return stream
        raise self._no_workers(instance_id, *lost_by_id.values())

    async def call(
        self, request: Any, *, reply_type: type[T], **options: Unpack[RequestOptions]
    ) -> T:
        """Send a request and return its one reply, decoded as `reply_type`. Chooses and raises as `open`.

        Also raises the error that the handler failed with, and RemoteProtocolError if the reply has another type.
        """
        receiver: requests.ItemReceiver[T] = requests.ItemReceiver(reply_type)
        stream = await self.open(request, receiver, **options)
        try:
            return await receiver.only_item()
        finally:
            stream.cancel()

    async def stream(
        self,
        request: Any,
        *,
        item_type: type[T],
        max_buffered: int = requests.MAX_BUFFERED_ITEMS,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[T, None]:
        """Send a request when the iteration begins, and iterate over its items or replies. Raises as `call`.

        The stream is cancelled at the server when the iterator is closed or its task cancelled: use
        `contextlib.aclosing` where the loop may end early. More than `max_buffered` items that wait for the reader end
        the stream by Overloaded.
        """
        receiver: requests.ItemReceiver[T] = requests.ItemReceiver(
            item_type, max_buffered=max_buffered
        )
        stream = await self.open(request, receiver, **options)
        try:
            async for item in receiver:
                yield item
        finally:
            stream.cancel()

    def choose(
        self,
        *,
        mode: Mode = "round-robin",
        instance_id: int | None = None,
        among: Collection[int] | None = None,
    ) -> int:
        """Return the id of the instance that `open` would try first, without asking it. Raises NoWorkers."""
        chosen = self._choose(mode, instance_id, among, {})
        if chosen is None:
            raise self._no_workers(instance_id)
        return chosen

    def report_down(self, instance_id: int) -> None:
        """Try this instance last for a while, or as long as discovery does not confirm it."""
        if instance_id in self._instances:
            is_unconfirmed = instance_id in self._unconfirmed
            until = math.inf if is_unconfirmed else self._clock.now() + self._inhibited_s
            self._down_until[instance_id] = until

    def _note_reached(self, instance_id: int) -> None:
        """Choose this instance as the others again, unless discovery has lost it."""
        if instance_id not in self._unconfirmed:
            self._down_until.pop(instance_id, None)

    def usable(
        self, among: Collection[int] | None = None, tried: Collection[int] = ()
    ) -> Sequence[int]:
        """Return the ids worth trying now: present, of `among` if given, not `tried`, and not down unless all are."""
        present = self._ids if among is None else [i for i in self._ids if i in among]
        return candidates(present, self._down_until, self._clock.now(), tried)

    def is_down(self, instance_id: int) -> bool:
        """Return whether this instance has ended its connection, or the last request failed to reach it, or broke.

        Discovery lists a killed process until its lease ends; its connection ends at once. Of one that was lost for a
        while this tries the connection, so that it is not down until a request comes.
        """
        until = self._down_until.get(instance_id)
        if until is None:
            return self._plane.is_answering(instance_id) is False
        if self._clock.now() >= until:
            address = self._instances[instance_id].transport[self._plane.name]
            if self._plane.is_answering(instance_id, address):
                self._note_reached(instance_id)
        return instance_id in self._down_until

    def _has_alternative(
        self, instance_id: int, alternatives: Callable[[], Collection[int]]
    ) -> bool:
        """Return whether another instance is there that is not known to be down, or this one has left."""
        present = self._instances
        return instance_id not in present or any(
            each != instance_id and each in present and each not in self._down_until
            for each in alternatives()
        )

    def _choose(
        self,
        mode: Mode,
        instance_id: int | None,
        among: Collection[int] | None,
        tried: Mapping[int, Any],
    ) -> int | None:
        if instance_id is not None:
            return instance_id if instance_id in self._instances else None
        is_limited = among is not None or tried or self._down_until  # seldom so
        ids = self.usable(among, tried) if is_limited else self._ids
        if not ids:
            return None
        if mode == "random":
            return at_random(ids, self._draw)
        self._last_chosen = round_robin(ids, self._last_chosen)
        return self._last_chosen

    def _no_workers(self, instance_id: int | None, *lost: errors.DynamoError) -> errors.NoWorkers:
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
            except (
                ValueError,
                RecursionError,
            ) as error:  # msgspec's other errors are of this class
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
        if isinstance(change, discovery.Put) and not change.is_confirmed:
            self._unconfirmed.add(instance_id)
            self.report_down(instance_id)
        else:
            self._unconfirmed.discard(instance_id)
            self._down_until.pop(instance_id, None)
        self._ids = tuple(sorted(self._instances))
        if self._ids:
            self._is_served.set()
        else:
            self._is_served.clear()
        for listener in self._listeners:
            listener()


class _WatchedReceiver:
    """A receiver that reports its instance down if it is lost in the middle; costs nothing per item."""

    __slots__ = ("_client", "_instance_id", "_receiver", "receive", "receive_all", "replied")

    def __init__(
        self, receiver: requests.Receiver, client: EndpointClient, instance_id: int
    ) -> None:
        self.receive: Callable[[Any], None] = receiver.receive
        self.receive_all = getattr(receiver, "receive_all", None)
        self.replied: Callable[[msgspec.Raw], None] = receiver.replied
        self._receiver = receiver
        self._client = client
        self._instance_id = instance_id

    def ended(self, error: errors.DynamoError | None) -> None:
        if isinstance(error, errors.WorkerLost):
            self._client.report_down(self._instance_id)
        self._receiver.ended(error)


def round_robin(ids: Sequence[int], last: int) -> int:
    """Return the id after `last`, which need not be present any more."""
    return ids[bisect.bisect_right(ids, last) % len(ids)]


def at_random(ids: Sequence[int], draw: Callable[[int], int]) -> int:
    """Return any id; `draw(n)` returns a random number below `n`."""
    return ids[draw(len(ids))]


def candidates(
    ids: Sequence[int], down_until: Mapping[int, float], now: float, tried: Collection[int]
) -> Sequence[int]:
    """Return the ids that are not tried yet and not known to be down; if all the rest are down, those."""
    if not tried and not down_until:
        return ids
    untried = [i for i in ids if i not in tried]
    return [i for i in untried if down_until.get(i, now) <= now] or untried
