"""The events of one worker (and rank) put into the order in which it told them.

    in order        applied at once
    told before     dropped
    a hole          waits, and we are *behind*: the worker has to be asked (`ask`), its answer goes to `replayed`
    another epoch   the worker began anew: what it held is void

We begin behind, because what a worker held before we listened is not known. Being behind, batches wait, at most
`MAX_WAITING` of them; if that is not enough they are dropped, which leaves a hole that is noticed like any other.
A wrong guess costs one more question, never a wrong state.
"""

from collections.abc import Sequence

from dynamo.protocols import kv_events

MAX_WAITING = 1024  # batches


class KvEventOrder:
    """One rank of one worker. Every method gives the events to apply now, in order."""

    def __init__(self, position: kv_events.Position | None = None) -> None:
        self.position = position  # what is applied; None: nothing that could be continued
        self.is_behind = True
        self._waiting: list[kv_events.EventBatch] = []
        self._missed: list[kv_events.KvEvent] = []
        self._is_telling_all = False

    def take(self, batch: kv_events.EventBatch) -> Sequence[kv_events.KvEvent]:
        """A batch as it was published."""
        if not self.is_behind:
            return self._next(batch)
        if len(self._waiting) == MAX_WAITING:
            self._waiting.clear()
        self._waiting.append(batch)
        return ()

    def ask(self) -> kv_events.Position | None:
        """From where a replay is wanted (None: from nothing). We are behind until it has come, whole."""
        self.is_behind, self._missed, self._is_telling_all = True, [], False
        return self.position

    def replayed(self, part: kv_events.ReplayPart) -> Sequence[kv_events.KvEvent]:
        """A part of the answer. All that is held is applied as it comes; what was missed, when it is complete."""
        if part.begins_anew:
            self.position, self._is_telling_all = None, True
            return (kv_events.Cleared(), *part.events)
        if part.position is None:
            if self._is_telling_all:
                return part.events
            self._missed += part.events
            return ()
        return self._complete(part.events, part.position)

    def _complete(
        self, last: Sequence[kv_events.KvEvent], position: kv_events.Position
    ) -> list[kv_events.KvEvent]:
        """The answer has ended at this position; go on with what waited."""
        events = [*self._missed, *last]
        waiting, self._waiting, self._missed = self._waiting, [], []
        self.position, self.is_behind, self._is_telling_all = position, False, False
        for batch in waiting:
            if batch.epoch == position.epoch:  # else it is old, or its like will come again
                events += self.take(batch)
        return events

    def _next(self, batch: kv_events.EventBatch) -> Sequence[kv_events.KvEvent]:
        events: Sequence[kv_events.KvEvent] = ()
        if self.position is None or batch.epoch != self.position.epoch:
            events = (kv_events.Cleared(),)
            self.position = kv_events.Position(batch.epoch, 0)
        known = self.position.next_event_id - batch.first_event_id
        if known < 0:
            self.is_behind = True
            self._waiting.append(batch)
            return events
        if known >= len(batch.events):
            return events
        self.position = kv_events.Position(batch.epoch, batch.first_event_id + len(batch.events))
        return (*events, *batch.events[known:])
