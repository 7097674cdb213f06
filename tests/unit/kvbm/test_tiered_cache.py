"""The tiered cache, against memories that are plain dictionaries, after any history of copies that end late or fail."""

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kvbm import pool as pools
from dynamo.kvbm import tier_jobs, tier_policy, tier_report, tiered_cache, tiers
from dynamo.protocols import generate, kv_events

DEVICE, HOST, DISK, REMOTE = kv_events.TIERS
BLOCK_BYTES = 1000
# `DYNAMO_TIER_OPERATIONS=1000000 pytest tests/unit/kvbm/test_tiered_cache.py -k history` takes some minutes.
NUM_OPERATIONS = int(os.environ.get("DYNAMO_TIER_OPERATIONS", "3000"))


class Rig:
    """A pool with tiers; memories map slots to the names of the blocks whose content is there."""

    def __init__(
        self, num_device=24, num_host=12, num_disk=16, segment_blocks=1, below=DISK, **options
    ):
        self.pool = pools.BlockPool(num_device)
        self.host = tiers.Tier(HOST, num_host, self.pool.events)
        self.disk = None
        if num_disk:
            num_slots = num_disk // segment_blocks
            self.disk = tiers.Tier(
                below, num_slots, self.pool.events, segment_blocks=segment_blocks
            )
        self.cache = tiered_cache.TieredCache(
            self.pool, self.host, self.disk, block_size=4, block_bytes=BLOCK_BYTES,
            options=tier_policy.TierOptions(**options),
        )  # fmt: skip
        self.memories = {DEVICE: {}, HOST: {}, below: {}}
        self.running, self.held = [], {tier: set() for tier in self.memories}

    def compute(self, chain, priority=0, num_cached=0):
        """Fill blocks with a chain, register, offer and release them. Return whether there was room."""
        fresh = self.pool.allocate(len(chain))
        if fresh is None:
            return False
        self.register(chain, fresh, range(len(chain)), priority)
        self.pool.release(fresh)
        return True

    def register(self, chain, blocks, new, priority=0, hint=None):
        for i in new:
            self.memories[DEVICE][blocks[i]] = {chain[i]}
        self.pool.commit_chain(blocks, chain, chain, new)
        self.cache.offer(new.start, self.blocks(chain)[new.start : new.stop], priority, hint)

    @staticmethod
    def blocks(chain):
        return [tiers.CachedBlock(n, n, chain[i - 1] if i else None) for i, n in enumerate(chain)]

    def begin(self):
        """Begin the copies that the cache wants, and check what they read."""
        for copy in self.cache.take_copies():
            source = self.memories[copy.path[0]]
            for block, slot in zip(copy.blocks, copy.from_slots, strict=True):
                assert copy.is_question or block.sequence_hash in source[slot]
            for slot in copy.to_slots:
                self.memories[copy.path[1]][slot] = set()  # half written
            self.running.append(copy)

    def end(self, copy, failed=frozenset()):
        """End a copy: what it read must not have changed meanwhile."""
        self.running.remove(copy)
        source, target = (self.memories[tier] for tier in copy.path)
        assert not any(target[slot] for slot in copy.to_slots)
        if copy.path == (REMOTE, HOST):  # another object may have been found in the slot meanwhile
            pairs = enumerate(zip(copy.blocks, copy.from_slots, strict=True))
            failed |= {i for i, (b, slot) in pairs if b.sequence_hash not in source[slot]}
        for position, (block, read, written) in enumerate(
            zip(copy.blocks, copy.from_slots, copy.to_slots, strict=True)
        ):
            is_there = copy.is_question or block.sequence_hash in source[read]
            assert is_there or (copy.path == (REMOTE, HOST) and position in failed)
            if position not in failed:
                target[written].add(block.sequence_hash)
        self.cache.end_copy(copy, failed, 0.001)

    def settle(self):
        """Make all copies that there are to make."""
        self.begin()
        while self.running:
            self.end(self.running[0])
            self.begin()

    def apply_events(self):
        for event in self.pool.take_events():
            match event:
                case kv_events.Stored(blocks=blocks, tier=tier):
                    for block in blocks:
                        assert block.block_hash not in self.held[tier]
                        self.held[tier].add(block.block_hash)
                case kv_events.Removed(block_hashes=names, tier=tier):
                    assert self.held[tier] >= set(names)
                    self.held[tier] -= set(names)
                case kv_events.Cleared():
                    self.held = {tier: set() for tier in self.held}

    def check(self):
        """What can be found is what its name says, and what the events say."""
        self.apply_events()
        for tier in (self.host, self.disk):
            names = {name for name in ALL_NAMES if tier.find(name)}
            assert names == self.held[tier.name]
            for name in names:
                assert name in self.memories[tier.name][tier.find(name).slot]

    def evict_device(self):
        self.pool.release(self.pool.allocate(self.pool.num_free))

    def load(self, chain, waiting="sequence", **options):
        """Load what the tiers have of a chain. Return the number of blocks."""
        self.cache.prepare(waiting, chain)
        self.settle()
        blocks = self.pool.allocate(len(chain))
        num_loaded = self.cache.load(
            waiting, chain, blocks, **({"is_engine_busy": False} | options)
        )
        self.settle()
        assert [self.memories[DEVICE][b] for b in blocks[:num_loaded]] == [
            {name} for name in chain[:num_loaded]
        ]
        self.pool.release(blocks)
        return num_loaded


CHAINS = [[100 * chain + i for i in range(1, 9)] for chain in range(1, 9)]
# Those of histories part from each other at any block, so also within a segment.
TREE = [CHAINS[i % 3][:i] + CHAINS[i][i:] for i in range(8)]
ALL_NAMES = {name for chain in CHAINS for name in chain}


HINTS = (
    generate.CacheHint(ttl_s=300),
    generate.CacheHint(ttl_s=300, is_pinned=True),
    generate.CacheHint(is_memory_only=True),
)


def rig_with_disk_blocks() -> Rig:
    """Return a cache that has the blocks of the first chain on disk only."""
    rig = Rig(num_host=8, num_disk=32)
    rig.compute(CHAINS[0])
    rig.settle()
    rig.host.clear()
    rig.evict_device()
    return rig


def test_evicted_blocks_are_loaded_from_host_memory():
    rig = Rig(num_disk=0)
    rig.compute(CHAINS[0])
    rig.settle()
    rig.evict_device()

    assert rig.load(CHAINS[0]) == 8
    assert rig.cache.num_copied[HOST, DEVICE] == 8


def test_blocks_that_host_memory_has_evicted_are_loaded_from_disk():
    rig = Rig(num_host=10, num_disk=64)
    for chain in CHAINS[:4]:
        rig.compute(chain)
        rig.settle()
    rig.host.clear()
    rig.evict_device()

    assert rig.load(CHAINS[0]) == 5  # preparing uses half of the host tier
    assert rig.cache.num_copied[DISK, HOST] == 5


def test_block_that_was_evicted_before_its_turn_is_skipped():
    rig = Rig()
    rig.compute(CHAINS[0])
    rig.evict_device()
    rig.settle()

    assert rig.host.num_used == 0


def test_running_copy_is_not_found_and_keeps_its_block():
    rig = Rig(num_device=8)
    rig.compute(CHAINS[0])
    rig.begin()
    num_free = rig.pool.num_free

    assert rig.running
    assert num_free < 8
    assert rig.host.find(CHAINS[0][0]) is None
    rig.settle()
    assert rig.pool.num_free == 8
    assert rig.host.find(CHAINS[0][0])


def test_failed_copy_is_no_hit():
    rig = Rig(num_disk=0)
    rig.compute(CHAINS[0])
    rig.begin()
    while rig.running:
        rig.end(rig.running[0], failed=frozenset({0}))
        rig.begin()
    rig.evict_device()

    assert rig.load(CHAINS[0]) == 0
    assert rig.cache.counts["failed_blocks"] == 8
    assert rig.cache.counts["matched_tokens"] == 0


def test_damaged_block_of_the_disk_is_dropped():
    rig = rig_with_disk_blocks()
    rig.cache.prepare("sequence", CHAINS[0])
    rig.begin()
    (copy,) = rig.running
    rig.end(copy, failed=frozenset({2}))

    assert rig.disk.find(CHAINS[0][2]) is None
    assert rig.disk.find(CHAINS[0][1])
    assert not rig.cache.is_preparing("sequence")
    assert rig.load(CHAINS[0]) == 2


def test_request_stops_waiting_for_a_late_disk_and_others_do_not_begin():
    rig = rig_with_disk_blocks()
    rig.cache.prepare("first", CHAINS[0])
    (copy,) = rig.cache.take_copies()
    is_waiting = rig.cache.is_preparing("first")
    rig.cache.stop_waiting(copy)
    rig.cache.prepare("second", CHAINS[0])

    assert is_waiting
    assert not rig.cache.is_preparing("first")
    assert not rig.cache.is_preparing("second")
    assert rig.cache.counts["late_loads"] == 1


def test_two_prompts_with_one_beginning_wait_for_the_same_read_of_the_disk():
    rig = rig_with_disk_blocks()
    rig.cache.prepare("first", CHAINS[0][:3])
    rig.begin()
    rig.cache.prepare("second", CHAINS[0][:4])
    is_second_waiting = rig.cache.is_preparing("second")
    rig.settle()
    rig.cache.forget("first")
    for chain in CHAINS[1:3]:  # they do not push out what the second one still needs
        rig.compute(chain)
        rig.settle()

    assert is_second_waiting
    assert not rig.cache.is_preparing("second")
    assert rig.cache.num_copied[DISK, HOST] == 4
    rig.evict_device()
    assert rig.load(CHAINS[0][:4], "second") == 4


def test_hit_rate_of_the_disk_counts_each_prompt_that_shares_a_read():
    rig = rig_with_disk_blocks()
    for waiting in ("first", "second"):
        rig.cache.prepare(waiting, CHAINS[0][:4])
    rig.settle()
    for waiting in ("first", "second"):
        blocks = rig.pool.allocate(4)
        rig.cache.load(waiting, CHAINS[0][:4], blocks, is_engine_busy=False)
        copy = rig.cache.new_copies[-1]
        rig.settle()
        assert rig.cache.count_tokens_by_tier(copy, 16) == {DISK: 16}

    assert tier_report.make_report(rig.pool, rig.cache).disk_hit_rate == 1.0


def test_two_prompts_stop_waiting_for_the_same_late_read():
    rig = rig_with_disk_blocks()
    for waiting in ("first", "second"):
        rig.cache.prepare(waiting, CHAINS[0])
    (copy,) = rig.cache.take_copies()
    rig.cache.stop_waiting(copy)

    assert not rig.cache.is_preparing("first")
    assert not rig.cache.is_preparing("second")
    assert rig.cache.counts["late_loads"] == 2


@pytest.mark.parametrize(("failed", "num_left"), [({0, 1, 2, 3}, 0), ({2}, 2)])
def test_two_prompts_that_wait_for_a_read_which_fails_go_on_with_what_it_has_brought(
    failed, num_left
):
    rig, chain = rig_with_disk_blocks(), CHAINS[0][:4]
    for waiting in ("first", "second"):
        rig.cache.prepare(waiting, chain)
    rig.begin()
    (copy,) = rig.running
    rig.end(copy, frozenset(failed))
    are_waiting = [rig.cache.is_preparing(waiting) for waiting in ("first", "second")]
    blocks = [rig.pool.allocate(4) for _ in range(2)]
    num_loaded = [
        rig.cache.load(waiting, chain, ids, is_engine_busy=False)
        for waiting, ids in zip(("first", "second"), blocks, strict=True)
    ]
    rig.settle()

    assert are_waiting == [False, False]
    assert num_loaded == [num_left, num_left]
    assert rig.cache.counts["failed_blocks"] == len(failed)
    assert [rig.disk.find(name) is None for name in chain] == [i in failed for i in range(4)]
    assert rig.host.num_used == 4 - len(failed)
    assert not any(block.num_users for name in chain if (block := rig.host.find(name)))


def test_late_read_of_an_aborted_prompt_is_not_waited_for_by_another():
    rig = rig_with_disk_blocks()
    rig.cache.prepare("first", CHAINS[0])
    rig.begin()
    (copy,) = rig.running
    rig.cache.forget("first")
    rig.cache.stop_waiting(copy)
    rig.cache.prepare("second", CHAINS[0])
    is_waiting = rig.cache.is_preparing("second")
    rig.settle()

    assert not is_waiting
    assert rig.load(CHAINS[0], "third") == 8


def test_block_in_host_memory_amid_those_on_disk_does_not_end_the_read():
    rig = rig_with_disk_blocks()
    rig.compute(CHAINS[0][:4])
    rig.settle()
    for position in (0, 1, 3):
        rig.host.drop(rig.host.find(CHAINS[0][position]))
    rig.evict_device()

    assert rig.load(CHAINS[0][:4]) == 4
    assert rig.cache.num_copied[DISK, HOST] == 3


def test_prepared_blocks_stay_until_their_sequence_is_admitted():
    rig = rig_with_disk_blocks()
    rig.cache.prepare("sequence", CHAINS[0])
    rig.settle()
    for chain in CHAINS[1:3]:
        rig.compute(chain)
        rig.settle()

    assert all(rig.host.find(name) for name in CHAINS[0][:4])
    rig.cache.forget("sequence")
    rig.compute(CHAINS[3])
    rig.settle()
    assert not any(rig.host.find(name) for name in CHAINS[0])


def test_blocks_from_disk_do_not_take_the_place_of_the_prompts_first_blocks():
    rig = Rig(num_host=8, num_disk=32)
    rig.compute(CHAINS[0])
    rig.settle()
    rig.cache.touch(CHAINS[0])
    rig.compute(CHAINS[1][:6])
    rig.settle()
    rig.evict_device()

    assert [name for name in CHAINS[0] if rig.host.find(name)] == CHAINS[0][:2]
    assert rig.load(CHAINS[0]) == 2 + 4  # the half of host memory from disk


def test_load_that_does_not_pay_is_computed():
    rig = Rig(num_disk=0)
    rig.compute(CHAINS[0])
    rig.settle()
    rig.evict_device()
    rig.cache.cost.record_step(32, 1e-6)

    assert rig.load(CHAINS[0]) == 0
    assert rig.cache.counts["not_worth_loading"] == 1


def test_load_that_a_busy_engine_would_notice_late_is_computed(monkeypatch):
    monkeypatch.setattr(tiered_cache, "QUICK_BYTES", 0)
    monkeypatch.setattr(tiered_cache, "QUICK_SHARE", 0)
    rig = Rig(num_disk=0)
    rig.compute(CHAINS[0])
    rig.settle()
    rig.evict_device()
    rig.cache.cost.record_step(32, 0.5)
    rig.cache.cost.step_s = 10.0

    assert rig.load(CHAINS[0], is_engine_busy=True) == 0
    assert rig.load(CHAINS[0], is_engine_busy=False) == 8


def test_loads_that_take_a_small_share_of_a_step_are_made_before_it(monkeypatch):
    monkeypatch.setattr(tiered_cache, "QUICK_BYTES", 0)
    rig = Rig(num_device=32, num_host=32, num_disk=0)
    for chain in CHAINS[:3]:
        rig.compute(chain)
        rig.settle()
    rig.evict_device()
    rig.cache.cost.record_copy((HOST, DEVICE), 10 * BLOCK_BYTES, seconds=1.0)
    rig.cache.cost.step_s = 1 / tiered_cache.QUICK_SHARE  # so ten blocks may be loaded before one

    def begin(chain):
        blocks = rig.pool.allocate(len(chain))
        assert rig.cache.load("sequence", chain, blocks, is_engine_busy=True) == len(chain)
        return rig.cache.new_copies[-1].is_quick

    assert [begin(CHAINS[0]), begin(CHAINS[1])] == [True, False]
    before, beside = rig.cache.new_copies[-2:]
    assert before.limit_s is None  # a copy of memory that the engine itself makes
    assert beside.limit_s > 0
    rig.begin()  # the next step
    assert begin(CHAINS[2])


def test_load_is_made_before_a_step_that_computes_much_of_its_prompt(monkeypatch):
    monkeypatch.setattr(tiered_cache, "QUICK_BYTES", 0)
    rig = Rig(num_device=40, num_host=40, num_disk=0)
    for chain in CHAINS[:4]:
        rig.compute(chain)
        rig.settle()
    rig.evict_device()
    rig.cache.cost.record_copy((HOST, DEVICE), 8 * BLOCK_BYTES, seconds=1.0)
    rig.cache.cost.record_step(32, 1 / tiered_cache.QUICK_SHARE)
    rig.cache.cost.step_s = (
        0.0  # so eight blocks may be loaded before 32 tokens, those of eight others
    )

    def begin(chain, num_new, max_new):
        blocks = rig.pool.allocate(len(chain))
        names = [*chain, *range(1000, 1000 + num_new)]
        options = {"is_engine_busy": True, "max_new": max_new}
        assert rig.cache.load("sequence", names, blocks, **options) == len(chain)
        return rig.cache.new_copies[-1].is_quick

    assert begin(CHAINS[0], num_new=8, max_new=48)
    assert not begin(CHAINS[1], num_new=7, max_new=64)
    assert not begin(CHAINS[2], num_new=8, max_new=48)  # only 16 tokens are left of the step
    assert begin(CHAINS[3], num_new=8, max_new=64)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.7, 1.0])
def test_no_more_than_the_given_share_of_blocks_is_offloaded(ratio):
    rig = Rig(num_device=32, num_host=64, num_disk=0, offload_ratio=ratio)
    for num_chains, chain in enumerate(CHAINS[:4], 1):
        rig.compute(chain)
        rig.settle()
        assert rig.host.num_used <= ratio * 8 * num_chains
    assert rig.host.num_used == int(ratio * 32)


def test_failed_copies_to_the_disk_do_not_raise_the_share_of_offloaded_blocks():
    rig = Rig(num_device=16, num_host=32, num_disk=32, offload_ratio=0.5)
    rig.compute(CHAINS[0])
    rig.begin()
    while rig.running:
        copy = rig.running[0]
        rig.end(copy, frozenset(range(len(copy.blocks)) if copy.path == (HOST, DISK) else ()))
        rig.begin()

    assert (rig.host.num_used, rig.disk.num_used) == (4, 0)


def test_frequency_filter_copies_what_a_second_prompt_has():
    rig = Rig(num_disk=0, host_filter=tier_policy.FilterKind.FREQUENCY)
    rig.compute(CHAINS[0])
    rig.settle()
    once = rig.host.num_used
    rig.cache.offer(0, [tiers.CachedBlock(name, name, None) for name in CHAINS[0][:3]], 0)
    rig.settle()

    assert (once, rig.host.num_used) == (0, 3)


def test_blocks_that_other_workers_have_given_up_do_not_count_as_offloaded():
    rig = Rig(num_device=4, num_host=8, num_disk=0, offload_ratio=0.5)
    chain = CHAINS[0][:4]
    theirs = dict(enumerate(rig.blocks(chain)[:2], 10))
    rig.host.apply_changes(tiers.SharedChanges(theirs, [], is_cleared=False))
    rig.compute(chain)
    rig.settle()
    num_before = rig.host.num_used
    rig.host.apply_changes(tiers.SharedChanges({}, list(theirs), is_cleared=False))
    rig.settle()

    assert (num_before, rig.host.num_used) == (0, 2)


def test_blocks_of_high_priority_are_copied_first():
    rig = Rig(num_disk=0)
    rig.compute(CHAINS[0], priority=0)
    rig.compute(CHAINS[1], priority=3)
    (first, *_) = rig.cache.take_copies()

    assert {block.sequence_hash for block in first.blocks} <= set(CHAINS[1])


def test_full_tier_takes_new_blocks_though_priorities_follow_the_clock():
    rig = Rig(num_host=8, num_disk=0)
    now = 1_795_000_000  # a deadline as priority, as some clients of vLLM have it
    for number, chain in enumerate(CHAINS[:2]):
        rig.compute(chain, priority=-now - number)
        rig.settle()

    assert all(map(rig.host.find, CHAINS[1]))


def test_churn_turns_offloading_down_and_says_so():
    rig = Rig(num_device=24, num_host=16, num_disk=0)
    for number in range(1, 60):
        rig.compute([10_000 * number + i for i in range(8)])
        rig.settle()
    report = tier_report.make_report(rig.pool, rig.cache)

    assert report.counts["turned_down"] == 1
    assert report.offloading.startswith("turned down")
    assert report.copied["offload_blocks_d2h"] < 59 * 8 / 2


@pytest.mark.parametrize("segment_blocks", [1, 3])
def test_host_memory_that_passes_its_blocks_on_to_a_disk_is_not_turned_down(segment_blocks):
    """In segments of three blocks the last two of a chain are not stored."""
    rig = Rig(num_device=24, num_host=16, num_disk=480, segment_blocks=segment_blocks)
    chains = [[10_000 * number + i for i in range(8)] for number in range(1, 60)]
    for chain in chains:
        rig.compute(chain)
        rig.settle()
    num_whole = 8 - 8 % segment_blocks

    assert rig.cache.counts["turned_down"] == 0
    assert all(rig.disk.find(name) for chain in chains for name in chain[:num_whole])


def test_disk_that_gives_up_its_blocks_unread_turns_offloading_down():
    rig = Rig(num_device=24, num_host=16, num_disk=32)
    for number in range(1, 60):
        rig.compute([10_000 * number + i for i in range(8)])
        rig.settle()

    assert rig.cache.guard.is_down
    assert rig.cache.num_copied[DEVICE, HOST] < 59 * 8 / 2


@pytest.mark.parametrize(
    ("num_device", "num_host", "num_copied"),
    [(4096, 4096, [400, 400]), (512, 256, [64, 32])],
    ids=["all of a long step", "at most an eighth of a tier"],
)
def test_blocks_of_a_step_are_copied_before_the_next_one(num_device, num_host, num_copied):
    rig = Rig(num_device=num_device, num_host=num_host, num_disk=4096)
    assert rig.compute(range(1, 401))
    to_host = rig.cache.take_copies()
    for copy in to_host:
        rig.cache.end_copy(copy)
    to_disk = [copy for copy in rig.cache.take_copies() if copy.path == (HOST, DISK)]

    assert [sum(len(copy.blocks) for copy in begun) for begun in (to_host, to_disk)] == num_copied


def test_full_tier_is_skipped_and_counted():
    rig = Rig(num_host=1, num_disk=0)
    rig.compute(CHAINS[0][:1], priority=5)
    rig.settle()
    rig.compute(CHAINS[1][:2], priority=0)
    rig.settle()

    assert rig.cache.counts["skipped_tier_full"] > 0
    assert rig.host.find(CHAINS[0][0])


def test_blocks_for_memory_only_are_not_written_to_the_disk():
    rig = Rig()
    rig.register(CHAINS[0], rig.pool.allocate(8), range(8), hint=HINTS[2])
    rig.compute(CHAINS[1])
    rig.settle()
    rig.check()

    assert rig.held[DISK] == set(CHAINS[1])
    assert rig.cache.counts["kept_off_disk"] == 8


def test_hint_of_a_later_request_reaches_blocks_that_the_tiers_have():
    rig = Rig()
    rig.compute(CHAINS[0])
    rig.settle()
    rig.cache.offer(0, [tiers.CachedBlock(name, name, None) for name in CHAINS[0][:3]], 0, HINTS[1])

    assert (rig.host.num_kept, rig.disk.num_kept) == (3, 3)


def test_block_takes_its_time_to_live_along_to_the_disk_and_back():
    rig = Rig()
    rig.register(CHAINS[0][:4], rig.pool.allocate(4), range(4), hint=HINTS[1])
    rig.settle()
    on_disk = rig.disk.num_kept
    rig.host.clear()
    rig.pool.clear()
    rig.cache.prepare("sequence", CHAINS[0][:4])
    rig.settle()

    assert on_disk == 4
    assert rig.host.num_kept == 4


def segment_rig(num_blocks=8, **options) -> Rig:
    """Return a cache with segments of four blocks below host memory, and the first blocks of a chain."""
    rig = Rig(num_host=16, segment_blocks=4, **options)
    rig.compute(CHAINS[0][:num_blocks])
    rig.settle()
    return rig


def test_segment_is_written_when_host_memory_has_all_its_blocks():
    rig = segment_rig(3)
    before = rig.disk.num_used
    rig.compute(CHAINS[0][:7])
    rig.settle()
    rig.check()

    assert before == 0
    assert rig.held[DISK] == set(CHAINS[0][:4])
    assert rig.cache.num_copied[HOST, DISK] == 4


def test_each_segment_is_one_copy_of_its_own_batch(monkeypatch):
    monkeypatch.setattr(tier_jobs, "BATCH_BLOCKS", 4)
    rig = segment_rig(0)
    rig.compute(CHAINS[0])
    began = []
    while copies := rig.cache.take_copies():
        began += copies
        for copy in copies:
            rig.cache.end_copy(copy)
    rig.host.clear()
    rig.evict_device()
    rig.cache.prepare("sequence", CHAINS[0][2:])
    began += rig.cache.take_copies()

    names = {
        path: [
            [block.sequence_hash for block in copy.blocks] for copy in began if copy.path == path
        ]
        for path in ((HOST, DISK), (DISK, HOST))
    }
    assert names[HOST, DISK] == [CHAINS[0][:4], CHAINS[0][4:]]
    assert names[DISK, HOST] == [CHAINS[0][2:4], CHAINS[0][4:]]


def test_segment_that_lacks_a_block_is_written_when_a_request_uses_it_again():
    rig = segment_rig(3)
    rig.host.drop(rig.host.find(CHAINS[0][1]))
    rig.compute(CHAINS[0][:4])
    rig.settle()
    without = rig.disk.num_used
    rig.cache.offer(
        0, [tiers.CachedBlock(n, n, n - 1 if i else None) for i, n in enumerate(CHAINS[0][:4])], 0
    )
    rig.settle()

    assert (without, rig.disk.num_used) == (1, 1)


def test_prompt_that_ends_in_a_segment_reads_only_its_blocks_of_it():
    rig = segment_rig()
    rig.host.clear()
    rig.evict_device()

    assert rig.load(CHAINS[0][:6]) == 6
    assert rig.cache.num_copied[DISK, HOST] == 6


def test_wrong_block_of_a_segment_is_computed_and_the_segment_is_gone():
    rig = segment_rig()
    for name in CHAINS[0]:
        rig.host.drop(rig.host.find(name))
    rig.evict_device()
    rig.cache.prepare("sequence", CHAINS[0])
    rig.begin()
    (copy,) = rig.running
    rig.end(copy, failed=frozenset({2}))
    rig.check()

    assert rig.held[DISK] == set(CHAINS[0][4:])
    assert rig.cache.counts["failed_blocks"] == 1
    assert rig.load(CHAINS[0]) == 2


def test_segment_with_a_block_for_memory_only_is_not_written():
    rig = segment_rig(0)
    rig.register(CHAINS[0][:2], rig.pool.allocate(2), range(2), hint=HINTS[2])
    rig.compute(CHAINS[0])
    rig.settle()
    rig.check()

    assert rig.held[DISK] == set(CHAINS[0][4:])
    assert rig.cache.counts["kept_off_disk"] == 4


def test_segment_has_the_time_to_live_of_any_of_its_blocks():
    rig = segment_rig(0)
    rig.register(CHAINS[0][:2], rig.pool.allocate(2), range(2), hint=HINTS[1])
    rig.compute(CHAINS[0])
    rig.settle()
    rig.cache.offer(0, [tiers.CachedBlock(name, name, None) for name in CHAINS[0]], 0, HINTS[0])
    report = tier_report.make_report(rig.pool, rig.cache)

    assert [rig.disk.find(name).is_pinned for name in CHAINS[0]] == [True] * 4 + [False] * 4
    assert rig.disk.find(CHAINS[0][7]).ttl_s == 300
    assert [(use.num_blocks, use.used_blocks, use.kept_blocks) for use in report.tiers[2:]] == [
        (16, 8, 8)
    ]


def test_block_that_only_another_worker_still_has_is_left_to_it():
    rig = Rig()
    (block,) = rig.blocks(CHAINS[0][:1])
    rig.compute(CHAINS[0][:1])
    rig.begin()
    rig.end(rig.running[0])  # now it waits for its copy to the disk
    theirs = tiers.SharedChanges({100: block}, [], is_cleared=False)
    rig.host.apply_changes(theirs)
    rig.host.drop(rig.host.find(block.sequence_hash))

    assert rig.host.find(block.sequence_hash).is_foreign
    assert not rig.cache.take_copies()


def test_chains_that_part_within_a_segment_have_their_common_blocks_twice():
    rig = segment_rig()
    other = TREE[6]  # the first six blocks are the same
    rig.compute(other)
    rig.settle()
    rig.check()
    num_slots = rig.disk.num_used
    slots = {rig.disk.find(other[i]).slot for i in (3, 7)}
    for name in {*CHAINS[0], *other}:
        rig.host.drop(rig.host.find(name))
    rig.evict_device()
    rig.cache.prepare("sequence", other)
    copies = rig.cache.take_copies()
    rig.disk.drop(rig.disk.find(other[-1]))
    rig.check()

    assert num_slots == 3
    assert [{*copy.from_slots} for copy in copies] == [slots]
    assert rig.held[DISK] == set(CHAINS[0])


def test_segment_that_two_workers_of_the_host_have_computed_is_written_by_the_one_with_its_end():
    rig = segment_rig(0)
    theirs = {
        20 + i: tiers.CachedBlock(name, name, name - 1 if i else None)
        for i, name in enumerate(CHAINS[0])
        if i not in (2, 3)
    }
    for slot, block in theirs.items():
        rig.memories[HOST][slot] = {block.sequence_hash}
    rig.host.apply_changes(tiers.SharedChanges(theirs, [], is_cleared=False))
    rig.compute(CHAINS[0])
    rig.begin()
    while rig.running[0].path == (DEVICE, HOST):
        rig.end(rig.running[0])
        rig.begin()
    rig.end(rig.running[0], failed=frozenset(range(4)))  # the store is away: host memory is right
    still_there = [bool(rig.host.find(name)) for name in CHAINS[0]]
    rig.compute(CHAINS[0])
    rig.settle()

    assert still_there == [True] * 8
    assert [bool(rig.disk.find(name)) for name in CHAINS[0]] == [True] * 4 + [False] * 4


def test_block_that_the_disk_has_lost_is_written_again_when_a_request_uses_it():
    rig = Rig()
    rig.compute(CHAINS[0])
    rig.settle()
    rig.disk.drop(rig.disk.find(CHAINS[0][3]))
    rig.compute(CHAINS[0])
    rig.settle()

    assert rig.disk.find(CHAINS[0][3])
    assert rig.cache.num_copied[HOST, DISK] == 9


def test_segment_without_room_is_skipped_and_counted(monkeypatch):
    rig = segment_rig(0, num_disk=4)
    rig.compute(CHAINS[1][:4], priority=1)
    rig.settle()
    rig.compute(CHAINS[0])
    rig.settle()
    skipped = rig.cache.counts["skipped_tier_full"]
    monkeypatch.setattr(tiers, "MAX_QUEUED", 0)
    rig.cache.offer(4, [tiers.CachedBlock(name, name, None) for name in CHAINS[0][4:]], 0)
    rig.settle()
    rig.check()

    assert (skipped, rig.cache.counts["skipped_queue_full"]) == (2, 1)
    assert rig.held[DISK] == set(CHAINS[1][:4])


def test_segment_is_evicted_as_a_whole():
    rig = segment_rig(num_disk=8)
    rig.cache.touch(CHAINS[0])
    rig.compute(CHAINS[1][:4])
    rig.settle()
    rig.check()

    assert rig.held[DISK] == set(CHAINS[0][:4] + CHAINS[1][:4])


class History:
    """Random operations; sequences hold blocks while their loads run, as in an engine."""

    def __init__(self, seed, rig):
        self.draw, self.rig, self.number, self.now = random.Random(seed), rig, 0, 0
        self.waiting = {}  # sequence -> chain: its blocks are prepared
        self.loading = {}  # sequence -> blocks

    def step(self):
        (operation,) = self.draw.choices(
            (self.compute, self.arrive, self.admit, self.end_copy, self.rig.begin, self.leave, self.late,
             self.rig.evict_device, self.clear),
            (20, 10, 15, 60, 30, 3, 2, 2, 0.2),
        )  # fmt: skip
        operation()

    def compute(self):
        chain = self.draw.choice(TREE)[: self.draw.randint(1, 8)]
        cached = self.rig.pool.match_prefix(chain)
        fresh = self.rig.pool.allocate(len(chain) - len(cached))
        if fresh is not None:
            priority = self.draw.choice((0, 0, 0, 1))
            hint = self.draw.choice((None, None, None, *HINTS))
            new = range(len(cached), len(chain))
            self.rig.register(chain, cached + fresh, new, priority, hint)
            self.now += self.draw.choice((0, 1, 100))
            self.rig.cache.record_time(self.now)
            self.rig.cache.touch(chain)
        self.rig.pool.release(cached + (fresh or []))

    def arrive(self):
        self.number += 1
        chain = self.draw.choice(TREE)[: self.draw.randint(1, 8)]
        self.waiting[self.number] = chain
        asked = self.rig.blocks(chain) if self.rig.cache.asks_store else ()
        self.rig.cache.prepare(self.number, chain, asked)

    def admit(self):
        ready = [each for each in self.waiting if not self.rig.cache.is_preparing(each)]
        if not ready:
            return
        sequence = self.draw.choice(ready)
        chain = self.waiting[sequence]
        cached = self.rig.pool.match_prefix(chain)
        fresh = self.rig.pool.allocate(len(chain) - len(cached))
        if fresh is None:
            self.rig.pool.release(cached)
            return
        del self.waiting[sequence]
        num_loading = self.rig.cache.load(
            sequence, chain[len(cached) :], fresh, is_engine_busy=self.draw.random() < 0.5
        )
        self.loading[sequence] = chain, cached + fresh, len(cached)
        if not num_loading:
            self.go_on(sequence, len(cached))

    def go_on(self, sequence, num_known):
        """Compute what was not loaded, register all, and end."""
        chain, blocks, num_cached = self.loading.pop(sequence)
        for i in range(num_cached, num_known):
            assert self.rig.memories[DEVICE][blocks[i]] == {chain[i]}
        self.rig.register(chain, blocks, range(num_known, len(chain)))
        self.rig.register(chain, blocks, range(num_cached, num_known))
        self.rig.pool.release(blocks)

    def end_copy(self):
        if not self.rig.running:
            return
        copy = self.draw.choice(self.rig.running)
        positions = range(len(copy.blocks))
        num_failed = self.draw.choice((0, 0, 0, 1, len(positions)))
        failed = frozenset(self.draw.sample(positions, min(num_failed, len(positions))))
        self.rig.end(copy, failed)
        if copy.path == (HOST, DEVICE):
            num_loaded = min(failed, default=len(copy.blocks))
            self.go_on(copy.waiting, self.loading[copy.waiting][2] + num_loaded)

    def leave(self):
        if self.waiting:
            sequence = self.draw.choice(list(self.waiting))
            del self.waiting[sequence]
            self.rig.cache.forget(sequence)

    def late(self):
        late = [copy for copy in self.rig.running if copy.limit_s is not None]
        if late:
            self.rig.cache.stop_waiting(self.draw.choice(late))

    def clear(self):
        self.rig.pool.clear()
        self.rig.cache.clear()

    def finish(self):
        """End everything that runs or waits."""
        while self.rig.running or self.waiting or self.loading:
            while self.rig.running:
                self.end_copy()
            self.admit()
            self.rig.begin()
            for sequence in list(self.waiting):
                self.rig.cache.forget(sequence)
        self.rig.settle()


@pytest.mark.parametrize(
    ("segment_blocks", "below"), [(1, DISK), (2, DISK), (4, DISK), (1, REMOTE), (2, REMOTE)]
)
@given(seed=st.integers(0, 2**32))
def test_tiers_hold_what_they_say_after_any_history(segment_blocks, below, seed):
    rig = Rig(num_device=16, num_host=10, num_disk=16, segment_blocks=segment_blocks, below=below)
    history = History(seed, rig)
    for number in range(max(60, NUM_OPERATIONS // 50)):
        history.step()
        if number % 20 == 0:
            rig.check()
    history.finish()
    rig.check()

    assert rig.pool.num_active == 0
    for slot in range(rig.disk.num_slots, 2 * rig.disk.num_slots):  # found in the store
        rig.disk.remove_foreign(slot)
    for tier in (rig.host, rig.disk):
        assert tier.num_used == sum(name in tier for name in ALL_NAMES)
        assert tier.num_kept <= tier.num_slots // 2


@pytest.mark.parametrize(
    ("num_host", "num_disk", "segment_blocks", "below"),
    [(12, 24, 1, DISK), (16, 8, 2, DISK), (20, 16, 4, DISK), (16, 8, 2, REMOTE)],
)
def test_long_history(num_host, num_disk, segment_blocks, below):
    rig = Rig(
        num_device=20,
        below=below,
        num_host=num_host,
        num_disk=num_disk,
        segment_blocks=segment_blocks,
        host_filter=tier_policy.FilterKind.PASS_ALL,
    )
    history = History(20261122, rig)
    for number in range(NUM_OPERATIONS):
        history.step()
        if number % 100 == 0:
            rig.check()
    history.finish()
    rig.check()

    assert rig.pool.num_active == 0
    assert rig.cache.num_copied[HOST, DEVICE] > NUM_OPERATIONS / 200
    assert rig.cache.num_copied[below, HOST] > 0
