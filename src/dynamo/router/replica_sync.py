"""Replica sync: the routers of one namespace tell each other which requests each has in flight, and at which worker.

Every router publishes its own changes, and applies those of the others as if they were its own. Changes within one
turn of the event loop go out as one message.

Messages may be lost and routers may come late, so each router also serves an endpoint (`active_sequences`) that
returns all its requests in flight and the number of its next message. A router that meets a peer, sees a gap in the
numbers of its messages, or gets new workers asks there, and holds back newer messages until the snapshot has come. If
none comes, it goes on with what it knows and with these messages, and asks again. When a peer vanishes from discovery,
its requests are freed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from dynamo.base import errors, tasks
from dynamo.observability import logs
from dynamo.protocols import instances, wire
from dynamo.protocols import load as load_events
from dynamo.router.api import Decision, Prompt
from dynamo.runtime import client, component, events, requests

SNAPSHOT_TIMEOUT_S = 5.0
RETRY_S = 1.0
PART_BLOCKS = 2**20  # of a snapshot in one reply: 9 MB, of the 32 that a frame may have
MAX_HELD = 10_000  # messages held back during a request for a snapshot; beyond, ask again
_logger = logging.getLogger(__name__)
Event = load_events.ActiveSequenceEvent


class SequenceSnapshot(msgspec.Struct, frozen=True):
    """Requests that a router has in flight after its messages with numbers below `next_number`: all, or a part."""

    next_number: int
    requests: list[Event]


@dataclass(slots=True)
class _Peer:
    """The state of another router as this one knows it."""

    next_number: int = 0  # of its messages
    is_asked: bool = False  # for its snapshot, until it has given one
    is_holding: bool = False  # its messages wait for the snapshot
    messages: list[events.Event] = field(default_factory=list)  # that wait
    keys: set[str] = field(default_factory=set)  # of its requests in flight


class ReplicaSync:
    """One router's part in it. `apply` is called with each change of another router."""

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
        self._log = logs.PeerLog(_logger, runtime.clock.now)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[Event]).decode

    async def start(self) -> None:
        """Publish to the other routers, subscribe to them, and serve snapshots."""
        with contextlib.suppress(errors.Unavailable):  # published when discovery is back
            await self._runtime.events.advertise(self._topic)
        self._subscription = await self._runtime.events.subscribe(self._topic, self._on_messages)
        with contextlib.suppress(errors.Unavailable):
            await self._runtime.register(self._name, self._serve_snapshot)
        self._client = self._runtime.client(self._name)
        self._client.on_change(self._update_peers)
        self._update_peers()

    async def close(self) -> None:
        """Stop all tasks and unsubscribe."""
        await self._tasks.close()
        if self._subscription is not None:
            await self._subscription.close()

    def publish_add(self, key: str, decision: Decision, prompt: Prompt) -> None:
        """Publish that a request of this router was sent to a worker."""
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
        self._publish(event)

    def publish_prefill_completed(self, key: str) -> None:
        """Publish that the prompt of a request of this router is computed."""
        event = self._own.get(key)
        if event is not None and isinstance(event.data, load_events.AddRequest):
            completed = msgspec.structs.replace(event.data, is_prefill_completed=True)
            self._own[key] = msgspec.structs.replace(event, data=completed)
            self._publish(msgspec.structs.replace(event, data=load_events.MarkPrefillCompleted()))

    def publish_free(self, key: str) -> None:
        """Publish that a request of this router has ended."""
        event = self._own.pop(key, None)
        if event is not None:
            self._publish(msgspec.structs.replace(event, data=load_events.Free()))

    def request_snapshots(self) -> None:
        """Ask all peers for their snapshots, because requests to workers new to this router were ignored before."""
        for instance_id in self._peers:
            self._request_snapshot(instance_id)

    def _publish(self, event: Event) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(event)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._send(unsent)

    def _send(self, changes: list[Event]) -> None:
        """Send changes as one message; in halves if it would be too long for the event plane."""
        try:
            self._runtime.events.publish(self._topic, self._encode(changes))
            self._next_number += 1
        except errors.LocalProtocolError as error:
            if len(changes) == 1:
                self._log.warning(
                    "", "other routers learn of a request by snapshots only: %s", error
                )
                return
            middle = len(changes) // 2
            self._send(changes[:middle])
            self._send(changes[middle:])

    def _serve_snapshot(self, call: requests.Call) -> None:
        self._flush()
        work = self._send_snapshot(call, self._next_number, list(self._own.values()))
        self._tasks.start("send a snapshot", work)

    async def _send_snapshot(
        self, call: requests.Call, number: int, in_flight: list[Event]
    ) -> None:
        """Send a snapshot in parts, because all requests together may be too long for one reply."""
        part: list[Event] = []
        num_left = PART_BLOCKS
        for event in in_flight:
            added = event.data
            assert isinstance(added, load_events.AddRequest), "only additions are kept"
            num_left -= len(added.token_sequence)
            if part and num_left < 0:
                call.reply(SequenceSnapshot(number, part))
                part, num_left = [], PART_BLOCKS - len(added.token_sequence)
                await asyncio.sleep(0)  # let other messages go out between two parts
            part.append(event)
        call.reply(SequenceSnapshot(number, part))
        call.finish()

    def _update_peers(self) -> None:
        """Free the requests of lost routers, and ask new ones for their snapshots."""
        assert self._client is not None
        peer_ids = self._client.instances.keys() - {self._runtime.instance_id}
        for lost in self._peers.keys() - peer_ids:
            self._free(self._peers.pop(lost).keys)
        for new in peer_ids - self._peers.keys():
            self._peers[new] = _Peer()
            self._request_snapshot(new)

    def _request_snapshot(self, instance_id: int) -> None:
        """Ask a peer for its snapshot, unless it is asked already."""
        peer = self._peers[instance_id]
        if not peer.is_asked:
            peer.is_asked = peer.is_holding = True
            self._tasks.start(f"ask router {instance_id:x}", self._ask(instance_id, peer))

    async def _ask(self, instance_id: int, peer: _Peer) -> None:
        """Ask a peer for its snapshot until it gives one, or has left: then nothing would free its requests."""
        assert self._client is not None
        while self._peers.get(instance_id) is peer:
            peer.is_holding = True
            try:
                snapshot = await self._fetch(self._client, instance_id)
            except errors.DynamoError as error:
                name = f"{instance_id:x}"
                self._log.warning(name, "no active sequences from router %s yet: %s", name, error)
                self._go_on(peer)
                await self._runtime.clock.sleep(RETRY_S)
            else:
                if self._peers.get(instance_id) is peer:
                    self._apply_snapshot(peer, snapshot)
                return

    @staticmethod
    async def _fetch(routers: client.EndpointClient, instance_id: int) -> SequenceSnapshot:
        """Return the whole snapshot of a peer. Raises DynamoError."""
        parts = routers.stream(
            None,
            item_type=SequenceSnapshot,
            instance_id=instance_id,
            timeout_s=SNAPSHOT_TIMEOUT_S,
        )
        async with contextlib.aclosing(parts):
            snapshots = [part async for part in parts]
        if not snapshots:
            raise errors.RemoteProtocolError("expected a snapshot, got none")
        in_flight = [event for part in snapshots for event in part.requests]
        return SequenceSnapshot(snapshots[0].next_number, in_flight)

    def _apply_snapshot(self, peer: _Peer, snapshot: SequenceSnapshot) -> None:
        self._free(peer.keys - {event.request_id for event in snapshot.requests})
        peer.keys.clear()
        for event in snapshot.requests:
            self._apply_event(peer, event)
        peer.next_number, peer.is_asked = snapshot.next_number, False
        self._go_on(peer)

    def _go_on(self, peer: _Peer) -> None:
        """Take the messages that were held back, and the next ones as they come."""
        messages, peer.messages, peer.is_holding = peer.messages, [], False
        self._on_messages(messages)

    def _on_messages(self, messages: Iterable[events.Event]) -> None:
        for message in messages:
            peer = self._peers.get(message.publisher)
            if peer is None:
                continue
            if message.number > peer.next_number and not peer.is_asked:
                self._request_snapshot(message.publisher)
            if peer.is_holding:
                peer.messages.append(message)
                del peer.messages[:-MAX_HELD]
            elif message.number >= peer.next_number:
                peer.next_number = message.number + 1
                self._apply_message(peer, message)

    def _apply_message(self, peer: _Peer, message: events.Event) -> None:
        try:
            changes = self._decode(message.payload)
        except wire.DECODE_ERRORS as error:
            _logger.warning("ignored a message of router %x: %s", message.publisher, error)
            return
        for event in changes:
            self._apply_event(peer, event)

    def _apply_event(self, peer: _Peer, event: Event) -> None:
        if isinstance(event.data, load_events.Free):
            peer.keys.discard(event.request_id)
        else:
            peer.keys.add(event.request_id)
        self._apply(event)

    def _free(self, keys: Iterable[str]) -> None:
        """Free requests of another router, because they have ended or the router is lost."""
        for key in list(keys):
            self._apply(Event(request_id=key, worker_id=0, router_id="", data=load_events.Free()))
