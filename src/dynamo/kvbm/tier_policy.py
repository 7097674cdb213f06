"""The policies of the cache tiers: which blocks are worth a copy to a lower tier, and when loading pays.

`OffloadFilter` selects blocks by how often their content was seen; `ChurnGuard` turns offloading down when nothing of
what it copies is ever read; `LoadCost` compares the time of loading blocks with that of computing them, from what was
measured. All are deciders: they are given measurements and counts, and read no clock.
"""  # decider

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from dynamo.protocols import kv_events

Path = tuple[kv_events.Tier, kv_events.Tier]
"""The tiers of a copy: from, to."""
MIN_FREQUENCY = 2
MIN_LFU_COUNT = 8
MIN_STEP_TOKENS = 16  # a step of fewer tells little of how fast prompts are computed
_WEIGHT = 0.2  # of a new measurement in a running mean
# Before the first measurement. Low for the memory of a server, high for a disk that is none of NVMe.
_BYTES_PER_S = {
    "memory": 2e9,
    kv_events.DISK: 500e6,
    kv_events.REMOTE: 100e6,
    kv_events.PEER: 500e6,
}
_OPTIMISM = 1.02  # factor on a measured speed for each load that it forbids
_OVERHEAD_S = 0.0005  # of a copy: two changes of threads
_SHARE = 0.5  # of the time to compute that a load may take: what is above could make it later than computing
_MIN_YES_RATE = 1 / 8  # of questions to a store, as far as it limits their time
_MIN_WAIT_S = 0.02
_MAX_WAIT_S = 10.0


class FilterKind(StrEnum):
    """The filters of blocks that are offered to a tier."""

    PRESENCE = "presence"  # all that the tier has not
    PASS_ALL = "pass_all"  # the same, and what it has counts as used again
    FREQUENCY = "frequency"  # only what was seen twice, with decay
    PRESENCE_LFU = "presence_lfu"  # only what was seen several times in short order


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Which blocks a tiered cache copies to host memory and to the disk, and how many of the engine's."""

    host_filter: FilterKind = FilterKind.PRESENCE
    disk_filter: FilterKind = FilterKind.PRESENCE
    # Of the engine's registered blocks, at most so many are in host memory too.
    offload_ratio: float = 1.0


class OffloadFilter:
    """Counts how often blocks were seen, and admits those that are seen often enough.

    A count begins at 1, doubles when the block is seen again, and loses 1 with each `decay_after` offers of others.
    """

    def __init__(self, kind: FilterKind, *, max_counts: int) -> None:
        """`max_counts`: blocks that are remembered."""
        self.kind = kind
        self._min_count = {
            FilterKind.FREQUENCY: MIN_FREQUENCY,
            FilterKind.PRESENCE_LFU: MIN_LFU_COUNT,
        }.get(kind, 0)
        self._max_counts = max(1, max_counts)
        # count, time of the last one
        self._counts: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._now = 0  # in offers

    def admits(self, sequence_hash: int) -> bool:
        """Count a block that is offered, and return whether it is worth a copy."""
        if not self._min_count:
            return True
        self._now += 1
        count, seen_at = self._counts.pop(sequence_hash, (0, self._now))
        decay = (self._now - seen_at) // self._max_counts
        count = max(1, (count - decay) * 2)
        self._counts[sequence_hash] = count, self._now
        if len(self._counts) > self._max_counts:
            self._counts.popitem(last=False)
        return count >= self._min_count


class ChurnGuard:
    """Turns offloading down while blocks leave the tiers unread, and up again when that would have been wrong.

    Turned down, a tier keeps what it has, and the hashes of blocks that were not offloaded are remembered; a prompt
    that would have found them counts against being turned down.
    """

    def __init__(self, num_slots: int) -> None:
        self.is_down = False
        self._window = max(16, num_slots)
        self._num_evicted = self._num_unread = 0
        self._skipped: OrderedDict[int, None] = OrderedDict()
        self._num_missed = 0

    def record_evictions(self, num_evicted: int, num_unread: int) -> bool:
        """Count evictions of host memory, and blocks that left the tiers unread. Return whether this turned it down."""
        self._num_evicted += num_evicted
        self._num_unread += num_unread
        if self._num_evicted < self._window:
            return False
        was_down, self.is_down = self.is_down, self._num_unread >= 0.95 * self._num_evicted
        self._num_evicted = self._num_unread = self._num_missed = 0
        return self.is_down and not was_down

    def record_skipped(self, sequence_hash: int) -> None:
        """Remember a block that was not offloaded."""
        self._skipped[sequence_hash] = None
        if len(self._skipped) > self._window:
            self._skipped.popitem(last=False)

    def record_miss(self, sequence_hash: int) -> bool:
        """Count a block that a prompt needed and no tier had. Return whether this turned offloading up again."""
        if not self.is_down or self._skipped.pop(sequence_hash, 0) == 0:
            return False
        self._num_missed += 1
        if self._num_missed < max(4, self._window // 16):
            return False
        self.is_down, self._num_missed = False, 0
        self._skipped.clear()
        return True


def describe(guard: ChurnGuard) -> str:
    """Return "on", or why offloading is turned down, for people."""
    if not guard.is_down:
        return "on"
    return (
        "turned down: the tiers gave up nearly all of their blocks before a prompt needed them;"
        " one new block in 16 is copied until prompts miss the others"
    )


class LoadCost:
    """What loading and computing take, as running means of what was measured."""

    def __init__(self) -> None:
        self.s_per_token: float | None = None  # of prompts; None: not measured yet
        self.step_s = 0.0
        self._least_s_per_token = 0.0
        self._bytes_per_s: dict[Path, float] = {}
        self._answer_s: float | None = None  # for a question to a store
        self._yes_rate = _MIN_YES_RATE

    @property
    def tokens_per_s(self) -> float | None:
        """How fast prompts are computed; None before the first measurement."""
        return None if self.s_per_token is None else 1 / max(self.s_per_token, 1e-9)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Record a step of the engine."""
        self.step_s += _WEIGHT * (seconds - self.step_s)
        if num_tokens >= MIN_STEP_TOKENS:
            s_per_token = seconds / num_tokens
            mean = s_per_token if self.s_per_token is None else self.s_per_token
            self.s_per_token = mean + _WEIGHT * (s_per_token - mean)
            self._least_s_per_token = min(s_per_token, self._least_s_per_token or s_per_token)

    def least_step_s(self, num_tokens: int) -> float:
        """Return the seconds that a step takes at least: the mean, or so many tokens at the best speed so far.

        The mean speed would not do: steps of many answers, which are slow per token, count in it.
        """
        return max(self.step_s, num_tokens * self._least_s_per_token)

    def record_copy(self, path: Path, num_bytes: int, seconds: float) -> None:
        """Record the bytes and seconds of a copy that ended well, for the mean speed of its path."""
        rate = num_bytes / max(seconds, 1e-6)
        mean = self._bytes_per_s.get(path, rate)
        self._bytes_per_s[path] = mean + _WEIGHT * (rate - mean)

    def record_answer(self, seconds: float, *, is_there: bool) -> None:
        """Record an answer of a store whether it has an object, and for how long a request had to wait for it."""
        mean = seconds if self._answer_s is None else self._answer_s
        self._answer_s = mean + _WEIGHT * (seconds - mean)
        self._yes_rate += _WEIGHT * (is_there - self._yes_rate)

    def can_ask(self, num_tokens: int) -> bool:
        """Return whether a question is worth its time, if so many tokens are computed after a no.

        If not, the time that it is expected to take shrinks a little, so that a slow store is tried again.
        """
        if self._answer_s is None or self._answer_s <= self.max_ask_s(num_tokens):
            return True
        self._answer_s /= _OPTIMISM
        return False

    def max_ask_s(self, num_tokens: int) -> float:
        """Return for how long a request may wait for an answer: the longer, the more of them have been yes."""
        compute_s = 1.0 if self.s_per_token is None else num_tokens * self.s_per_token
        return min(_SHARE * max(self._yes_rate, _MIN_YES_RATE) * compute_s, _MAX_WAIT_S)

    def bytes_per_s(self, path: Path) -> float:
        """Return the speed of copies between two tiers: as measured, else as measured in the other direction."""
        kind = next((tier for tier in path if tier in _BYTES_PER_S), "memory")
        reverse = self._bytes_per_s.get((path[1], path[0]), _BYTES_PER_S[kind])
        return self._bytes_per_s.get(path, reverse)

    def record_declined(self, path: Path) -> None:
        """Record that a load was not worth its time. The measured speed grows a little, so that it is tried again."""
        if path in self._bytes_per_s:
            self._bytes_per_s[path] *= _OPTIMISM

    def copy_s(self, path: Path, num_bytes: int) -> float:
        """Return the seconds that copying takes, the bytes that wait before it included."""
        return _OVERHEAD_S + num_bytes / self.bytes_per_s(path)

    def pays(self, load_s: float, num_tokens: int) -> bool:
        """Return whether loading tokens takes clearly less time than computing them; yes while that is unknown."""
        return self.s_per_token is None or load_s <= _SHARE * num_tokens * self.s_per_token

    def max_wait_s(self, num_tokens: int) -> float:
        """Return for how long a request may wait for these tokens before they are computed instead."""
        compute_s = 1.0 if self.s_per_token is None else num_tokens * self.s_per_token
        return min(max(_SHARE * compute_s, _MIN_WAIT_S), _MAX_WAIT_S)
