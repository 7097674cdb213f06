"""The KV events of one rank of a worker, put into the order in which the worker published them.

    in order             applied at once
    a repeated event     dropped
    a gap                kept, and the stream is *behind*: the worker has to be asked for a replay (`begin_replay`),
                         the parts of its answer go to `apply_replay`
    another epoch        the worker was restarted: its earlier blocks are void

The stream begins behind, because what a worker cached before the subscription is unknown. Being behind, batches wait,
at most `MAX_WAITING` of them; beyond that they are dropped, which leaves a gap that is noticed like any other. A wrong
guess costs one more replay, never a wrong state.
"""  # decider

from collections.abc import Sequence

from dynamo.protocols import kv_events

MAX_WAITING = 1024  # batches


class KvEventOrder:
    """One rank of one worker. Each method returns the events to apply now, in order."""

    def __init__(self) -> None:
        # up to here all is applied; None: a replay has to start anew
        self.position: kv_events.Position | None = None
        self.is_behind = True
        self._waiting: list[kv_events.EventBatch] = []
        self._replayed: list[kv_events.KvEvent] = []
        self._is_full_replay = False

    def apply_batch(self, batch: kv_events.EventBatch) -> Sequence[kv_events.KvEvent]:
        """Take a published batch."""
        if not self.is_behind:
            return self._apply_in_order(batch)
        if len(self._waiting) == MAX_WAITING:
            self._waiting.clear()
        self._waiting.append(batch)
        return ()

    def expect_gap(self) -> None:
        """Take it that events are missing, because none came for too long: a replay has to be asked for."""
        self.is_behind = True

    def begin_replay(self) -> kv_events.Position | None:
        """Return the position to ask a replay from (None: the beginning). The stream is behind until it ends."""
        self.is_behind, self._replayed, self._is_full_replay = True, [], False
        return self.position

    def apply_replay(self, part: kv_events.ReplayPart) -> Sequence[kv_events.KvEvent]:
        """Take a part of a replay: all blocks of a worker apply as they come, missed events when they are complete."""
        if part.begins_anew:
            self.position, self._is_full_replay = None, True
            return (kv_events.Cleared(), *part.events)
        if part.position is not None:
            return self._end_replay(part.events, part.position)
        if self._is_full_replay:
            return part.events
        self._replayed += part.events
        return ()

    def _end_replay(
        self, last_events: Sequence[kv_events.KvEvent], position: kv_events.Position
    ) -> list[kv_events.KvEvent]:
        """Continue at the position that the replay reached, with the batches that waited for it."""
        events = [*self._replayed, *last_events]
        waiting, self._waiting, self._replayed = self._waiting, [], []
        self.position, self.is_behind, self._is_full_replay = position, False, False
        for batch in waiting:
            if batch.epoch == position.epoch:  # else it is old, or its epoch will be noticed again
                events += self.apply_batch(batch)
        return events

    def _apply_in_order(self, batch: kv_events.EventBatch) -> Sequence[kv_events.KvEvent]:
        events: Sequence[kv_events.KvEvent] = ()
        if self.position is None or batch.epoch != self.position.epoch:
            events = (kv_events.Cleared(),)
            self.position = kv_events.Position(batch.epoch, 0)
        num_repeated = self.position.next_event_id - batch.first_event_id
        if num_repeated < 0:
            self.is_behind = True
            self._waiting.append(batch)
            return events
        if num_repeated >= len(batch.events):
            return events
        self.position = kv_events.Position(batch.epoch, batch.first_event_id + len(batch.events))
        return (*events, *batch.events[num_repeated:])
