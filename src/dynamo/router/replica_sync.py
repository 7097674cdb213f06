"""What several routers of one namespace tell each other: which requests each has in flight, and where.

Every router publishes what it does, and applies what the others did as if it had done it itself. What happens within
one turn of the event loop goes out as one message.

Messages may be lost and routers may come late, so each also answers an endpoint (`active_sequences`) with all that it
has in flight and the number of its next message. A router that meets another, sees a hole in the numbers of its
messages, or learns of new workers asks there, and keeps what is published meanwhile until the answer is in. When a
router vanishes from discovery, its requests are freed.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from dynamo.base import errors, tasks
from dynamo.protocols import instances
from dynamo.protocols import load as load_events
from dynamo.router.api import Decision, Prompt
from dynamo.runtime import client, component, events, requests

ASK_S = 5.0
MAX_HELD = 10_000  # messages kept while an answer is awaited; more, and we ask again
_logger = logging.getLogger(__name__)
Event = load_events.ActiveSequenceEvent


class InFlight(msgspec.Struct, frozen=True):
    """All that a router has in flight, after its messages with lower numbers than this."""

    next_number: int
    requests: list[Event]


@dataclass(slots=True)
class _Peer:
    """Another router, as far as we have heard."""

    next_number: int | None = None  # None: we have asked, and wait for the answer
    held: list[events.Event] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)


class ReplicaSync:
    """One router's share in it. `apply` is told what others did."""

    def __init__(
        self,
        runtime: component.DistributedRuntime,
        *,
        namespace: str,
        component_name: str,
        apply: Callable[[Event], None],
    ) -> None:
        self.router_id = f"{runtime.instance_id:x}"
        self._runtime = runtime
        self._topic = f"{namespace}/{component_name}/{load_events.ACTIVE_SEQUENCES_SUBJECT}"
        self._name = instances.EndpointName(namespace, component_name, "active_sequences")
        self._apply = apply
        self._own: dict[str, Event] = {}
        self._unsent: list[Event] = []
        self._next_number = 0
        self._peers: dict[int, _Peer] = {}
        self._client: client.EndpointClient | None = None
        self._subscription: events.Subscription | None = None
        self._tasks = tasks.Tasks()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[Event]).decode

    async def start(self) -> None:
        """Join the others."""
        await self._runtime.events.advertise(self._topic)
        self._subscription = await self._runtime.events.subscribe(self._topic, self._hear)
        await self._runtime.register(self._name, self._answer)
        self._client = self._runtime.client(self._name)
        self._client.on_change(self._follow)
        self._follow()

    async def close(self) -> None:
        """Leave."""
        await self._tasks.close()
        if self._subscription is not None:
            await self._subscription.close()

    def added(self, key: str, decision: Decision, prompt: Prompt) -> None:
        """A request of ours goes to a worker."""
        added = load_events.AddRequest(
            token_sequence=tuple(prompt.sequence_hashes),
            isl=prompt.num_tokens,
            overlap=decision.overlap_blocks,
            is_prefill_completed=prompt.is_prefilled,
        )
        event = self._own[key] = Event(
            request_id=key,
            worker_id=decision.worker.instance_id,
            dp_rank=decision.worker.dp_rank,
            router_id=self.router_id,
            data=added,
        )
        self._tell(event)

    def prefill_completed(self, key: str) -> None:
        """Its prompt is computed."""
        event = self._own.get(key)
        if event is not None and isinstance(event.data, load_events.AddRequest):
            completed = msgspec.structs.replace(event.data, is_prefill_completed=True)
            self._own[key] = msgspec.structs.replace(event, data=completed)
            self._tell(msgspec.structs.replace(event, data=load_events.MarkPrefillCompleted()))

    def freed(self, key: str) -> None:
        """It is over."""
        event = self._own.pop(key, None)
        if event is not None:
            self._tell(msgspec.structs.replace(event, data=load_events.Free()))

    def catch_up(self) -> None:
        """We know new workers: what others have in flight there means something to us now."""
        for instance_id in self._peers:
            self._ask(instance_id)

    def _tell(self, event: Event) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(event)

    def _flush(self) -> None:
        if self._unsent:
            self._runtime.events.publish(self._topic, self._encode(self._unsent))
            self._unsent = []
            self._next_number += 1

    def _answer(self, call: requests.Call) -> None:
        """The handler of our endpoint."""
        self._flush()
        call.reply(InFlight(self._next_number, list(self._own.values())))
        call.finish()

    def _follow(self) -> None:
        """Routers came or went."""
        assert self._client is not None
        others = self._client.instances.keys() - {self._runtime.instance_id}
        for gone in self._peers.keys() - others:
            self._free(self._peers.pop(gone).keys)
        for new in others - self._peers.keys():
            self._peers[new] = _Peer(next_number=0)
            self._ask(new)

    def _ask(self, instance_id: int) -> None:
        """Have this router tell all that it has in flight, unless that is under way."""
        peer = self._peers[instance_id]
        if peer.next_number is not None:
            peer.next_number = None
            self._tasks.start(f"ask router {instance_id:x}", self._learn(instance_id, peer))

    async def _learn(self, instance_id: int, peer: _Peer) -> None:
        assert self._client is not None
        try:
            told = await requests.ask(
                self._runtime.requests,
                self._client.instances[instance_id].transport[self._runtime.requests.name],
                self._name.path,
                None,
                reply_type=InFlight,
                timeout_s=ASK_S,
            )
        except (errors.DynamoError, KeyError) as error:
            _logger.warning("router %x does not tell what it has in flight: %s", instance_id, error)
            told = InFlight(peer.held[0].number if peer.held else 0, [])
        self._free(peer.keys - {event.request_id for event in told.requests})
        for event in told.requests:
            self._take(peer, event)
        held, peer.held, peer.next_number = peer.held, [], told.next_number
        self._hear(held)

    def _hear(self, batch: Iterable[events.Event]) -> None:
        """The listener of our topic."""
        for message in batch:
            peer = self._peers.get(message.publisher)
            if peer is not None:
                self._hear_one(peer, message)

    def _hear_one(self, peer: _Peer, message: events.Event) -> None:
        if peer.next_number is None:
            peer.held.append(message)
            del peer.held[:-MAX_HELD]
        elif message.number > peer.next_number:
            peer.held.append(message)
            self._ask(message.publisher)
        elif message.number == peer.next_number:
            peer.next_number += 1
            self._read(peer, message)

    def _read(self, peer: _Peer, message: events.Event) -> None:
        try:
            told = self._decode(message.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _logger.warning("router %x said what cannot be read: %s", message.publisher, error)
            return
        for event in told:
            self._take(peer, event)

    def _take(self, peer: _Peer, event: Event) -> None:
        if isinstance(event.data, load_events.Free):
            peer.keys.discard(event.request_id)
        else:
            peer.keys.add(event.request_id)
        self._apply(event)

    def _free(self, keys: Iterable[str]) -> None:
        """Requests of another router that are over, or that nobody will end any more."""
        for key in list(keys):
            self._apply(Event(request_id=key, worker_id=0, router_id="", data=load_events.Free()))
