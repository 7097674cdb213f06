"""The copies of a tiered cache, made by threads beside the engine's: loads never queue behind offloads.

    to host memory        one thread for loads, one for offloads: a copy of memory
    from and to disk      two threads each, so that the disk has more than one request at a time; four for objects, and
                          four for questions to an object store

The engine's thread begins copies and hears of their ends by `post`, which must run the given function in that thread
between its steps. Nothing here waits for a disk: a copy that hangs holds its thread and its slots, and no request.
"""

import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dynamo.kvbm import tier_policy
from dynamo.kvbm.host_memory import HostMemory
from dynamo.kvbm.storage import Storage
from dynamo.kvbm.tier_jobs import TierCopy
from dynamo.kvbm.tiered_cache import DEVICE, HOST
from dynamo.kvbm.tiers import Segment, SharedChanges
from dynamo.protocols import kv_events
from dynamo.transfer import api

Generations = tuple[int, int]
"""How often all blocks were forgotten, in host memory and in the storage below."""
Post = Callable[[Callable[[], None]], None]
_MIN_MEMORY_S = 1.0  # a copy of memory may take: shorter ones would fail on a busy machine
_LOG_EVERY_S = 60.0
_CLOSE_S = 2.0
_logger = logging.getLogger(__name__)


class CopyOutcome(NamedTuple):
    """The result of a copy."""

    failed: frozenset[int]  # positions of blocks
    began_at: float  # on the steady clock, as its end
    ended_at: float

    @property
    def seconds(self) -> float:
        """The time from its begin in the thread to its end."""
        return self.ended_at - self.began_at


OnEnd = Callable[[TierCopy, CopyOutcome], None]
OnPurged = Callable[[str | None], None]  # with what has failed, for people


class TierCopies:
    """The threads of one engine. All methods are called by the engine's thread."""

    def __init__(self, device: api.BlockCopier, host: HostMemory, disk: Storage | None) -> None:
        self._device, self._host, self._disk = device, host, disk
        self._num_threads: dict[tier_policy.Path, int] = {(HOST, DEVICE): 1, (DEVICE, HOST): 1}
        if disk is not None:
            self._num_threads |= dict.fromkeys(
                ((disk.tier, HOST), (HOST, disk.tier)), disk.num_threads
            )
            if disk.tier == kv_events.REMOTE:
                self._num_threads[disk.tier, disk.tier] = disk.num_threads  # questions
        self._jobs: dict[
            tier_policy.Path, queue.SimpleQueue[tuple[TierCopy, Generations] | None]
        ] = {}
        self._threads: list[threading.Thread] = []
        self._deadlines: dict[TierCopy, float] = {}  # of copies that a request waits for
        self._post: Post | None = None
        self._on_end: OnEnd | None = None
        self._logged_at = -_LOG_EVERY_S
        self._is_closing = threading.Event()

    def open(self, post: Post, on_end: OnEnd, on_slots: Callable[[int], None]) -> None:
        """Start the threads. `on_end` is posted for each copy, `on_slots` when more host memory can be used.

        The first piece of that memory is provided before this returns.
        """
        self._post, self._on_end = post, on_end
        for path, num_threads in self._num_threads.items():
            self._jobs[path] = queue.SimpleQueue()
            self._threads += [self._start(self._serve, path) for _ in range(num_threads)]
        pieces = self._host.provide()
        on_slots(next(pieces, 0))
        provide = functools.partial(self._provide, on_slots=on_slots)
        self._threads.append(self._start(provide, pieces))

    def begin(self, copy: TierCopy) -> None:
        """Give a copy to a thread of its path; its time limit begins now."""
        if copy.limit_s is not None:
            self._deadlines[copy] = time.monotonic() + copy.limit_s
        generations = (
            self._host.generation,
            0 if self._disk is None else self._disk.generation,
        )
        self._jobs[copy.path].put((copy, generations))

    def run(self, copy: TierCopy, generations: Generations = (0, 0)) -> CopyOutcome:
        """Make a copy now, and return how it ended. `generations` are those of the time when it was to begin."""
        began_at = time.monotonic()
        try:
            failed = (self._ask if copy.is_question else self._copy)(copy, generations)
        except BaseException as error:  # noqa: BLE001 - supervises its thread, without which requests would wait for ever
            self._log_failure(copy, repr(error))
            return CopyOutcome(frozenset(range(len(copy.blocks))), began_at, time.monotonic())
        if failed and not copy.is_question:
            self._log_failure(copy, "blocks were gone, or their checksums wrong")
        return CopyOutcome(failed, began_at, time.monotonic())

    def take_late(self) -> list[TierCopy]:
        """Return the copies for which a request has waited long enough, once each."""
        now = time.monotonic()
        late = [copy for copy, deadline in self._deadlines.items() if deadline <= now]
        for copy in late:
            del self._deadlines[copy]
        return late

    def seconds_to_deadline(self) -> float | None:
        """Return after how many seconds `take_late` has something to return; None if no request waits."""
        if not self._deadlines:
            return None
        return max(0.0, min(self._deadlines.values()) - time.monotonic())

    def forget(self, on_purged: OnPurged = lambda _: None) -> None:
        """Find no block in the tiers any more; a thread then removes them, and calls `on_purged`."""
        faults: list[str] = []
        try:
            self._host.forget()
            if self._disk is not None:
                self._disk.forget()
        except OSError as error:
            faults.append(f"blocks in the KV cache tiers were not forgotten: {error}")
        self._start(functools.partial(self._purge, on_purged), faults)

    def renumber(self, stored: Mapping[int, Segment]) -> None:
        """Give other slots to what an earlier run has left below host memory, before the first copy."""
        self._file.renumber(stored)

    def look(self) -> dict[kv_events.Tier, SharedChanges]:
        """Return what other processes have changed in the tiers that they share."""
        changes: dict[kv_events.Tier, SharedChanges] = {}
        try:
            if (found := self._host.look()) is not None:
                changes[HOST] = found
            if self._disk is not None and (found := self._disk.look()) is not None:
                changes[self._disk.tier] = found
        except OSError as error:  # in each step, perhaps
            self._warn(f"the index of a shared tier cannot be read: {error}")
        return changes

    def close(self) -> None:
        """End the threads, then close what they use: later, beside the caller, if one of them hangs. Idempotent."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        for path, jobs in self._jobs.items():
            for _ in range(self._num_threads[path]):
                jobs.put(None)
        self._jobs.clear()
        until = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._start(self._close_storage, self._threads)
        else:
            self._close_storage(())

    def _close_storage(self, threads: Iterable[threading.Thread]) -> None:
        """Close the memory and the storage below it after the last copy, so that the next engine may open them."""
        for thread in threads:
            thread.join()
        self._host.close()
        if self._disk is not None:
            self._disk.close()

    @staticmethod
    def _start(target: Callable[..., None], argument: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=(argument,), name="kvbm", daemon=True)
        thread.start()
        return thread

    def _serve(self, path: tier_policy.Path) -> None:
        assert self._post is not None
        jobs = self._jobs[path]
        while (entry := jobs.get()) is not None and not self._is_closing.is_set():
            copy, generations = entry
            self._post(functools.partial(self._end, copy, self.run(copy, generations)))

    def _end(self, copy: TierCopy, outcome: CopyOutcome) -> None:
        self._deadlines.pop(copy, None)
        assert self._on_end is not None
        self._on_end(copy, outcome)

    def _purge(self, on_purged: OnPurged, faults: list[str]) -> None:
        try:
            if self._disk is not None:
                self._disk.purge()
        except BaseException as error:  # noqa: BLE001 - supervises its thread, for whose end the caller waits
            faults.append(f"blocks were not removed from {self._disk and self._disk.name}: {error}")
        for fault in faults:
            _logger.warning("%s", fault)
        on_purged("; ".join(faults) or None)

    def _provide(self, pieces: Iterator[int], on_slots: Callable[[int], None]) -> None:
        assert self._post is not None
        for num_slots in pieces:
            if self._is_closing.is_set():
                return
            self._post(functools.partial(on_slots, num_slots))

    def _ask(self, question: TierCopy, generations: Generations) -> frozenset[int]:
        """Ask the store for an object; return the positions of all blocks, or none if it is there. Raises OSError."""
        slot, blocks = question.to_slots[0], question.blocks
        is_there = self._file.find_segment(slot, blocks, generations[1])
        return frozenset(() if is_there else range(len(blocks)))

    def _copy(self, copy: TierCopy, generations: Generations) -> frozenset[int]:
        """Make a copy; return the positions of blocks that failed. Raises TransferError or OSError if all did."""
        of_host, of_disk = generations
        source, target = copy.path
        if target == kv_events.DEVICE:
            return self._load(copy)
        if target != kv_events.HOST:
            self._store(copy, of_disk)
            return frozenset()
        self._host.retract(copy.to_slots)
        failed: frozenset[int] = frozenset()
        if source == kv_events.DEVICE:
            self._move(api.TransferOperation.WRITE, copy.from_slots, copy.to_slots, None)
        else:
            failed = self._read(copy)
        for position, block in enumerate(copy.blocks):
            if position not in failed:
                self._host.publish(copy.to_slots[position], block, of_host)
        return failed

    def _load(self, copy: TierCopy) -> frozenset[int]:
        """Copy blocks of host memory to the engine's; return the positions of those that were replaced meanwhile."""
        # The same block may have left and come back, with another one between.
        before = list(map(self._host.version, copy.from_slots, copy.blocks))
        self._move(api.TransferOperation.READ, copy.to_slots, copy.from_slots, copy.limit_s)
        after = map(self._host.version, copy.from_slots, copy.blocks)
        versions = enumerate(zip(before, after, strict=True))
        return frozenset(i for i, (old, new) in versions if old is None or old != new)

    def _store(self, copy: TierCopy, generation: int) -> None:
        """Write blocks of host memory to the storage below, slot by slot."""
        for slot, positions in _positions_by_slot(copy.to_slots):
            segment = tuple([copy.blocks[i] for i in positions])
            contents = [self._host.get(copy.from_slots[i], copy.blocks[i]) for i in positions]
            self._file.write(slot, segment, contents, generation)

    def _read(self, copy: TierCopy) -> frozenset[int]:
        """Read blocks of the storage below into host memory; return the positions of those that are wrong there."""
        failed: set[int] = set()
        for slot, positions in _positions_by_slot(copy.from_slots):
            blocks = [copy.blocks[i] for i in positions]
            contents = [self._host.block(copy.to_slots[i]) for i in positions]
            failed.update(positions[i] for i in self._file.read(slot, blocks, contents))
        return frozenset(failed)

    @property
    def _file(self) -> Storage:
        assert self._disk is not None, "a copy from or to disk without a disk tier"
        return self._disk

    def _move(
        self,
        operation: api.TransferOperation,
        device_blocks: Sequence[int],
        host_slots: Sequence[int],
        limit_s: float | None,
    ) -> None:
        limit = api.TimeLimit(
            api.MAX_DEADLINE_S if limit_s is None else max(limit_s, _MIN_MEMORY_S)
        )
        self._device.move(operation, device_blocks, host_slots, limit)

    def _log_failure(self, copy: TierCopy, error: object) -> None:
        source, target = copy.path
        blocks = f"{len(copy.blocks)} KV blocks from {source} to {target}"
        self._warn(f"a copy of {blocks} failed: {error}")

    def _warn(self, text: str) -> None:
        """Log a warning, if the last one is a minute old."""
        if time.monotonic() - self._logged_at < _LOG_EVERY_S:
            return
        self._logged_at = time.monotonic()
        _logger.warning("%s (logged at most once a minute)", text)


def _positions_by_slot(slots: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Return each slot with the positions at which it stands, which follow one another."""
    for slot, positions in itertools.groupby(range(len(slots)), key=slots.__getitem__):
        yield slot, list(positions)
