"""The scheduler's half of the vLLM tier connector, over a block pool with vLLM's methods and workers without memory."""

import itertools
import types

import pytest

from dynamo.engine.adapters import translation as shared
from dynamo.engine.adapters.vllm import tier_plan, tier_scheduler, translation
from dynamo.kvbm import tier_setup, tiered_cache, tiers
from dynamo.protocols import generate, kv_events

BLOCK, BLOCK_BYTES = 4, 1000
DEVICE, HOST, DISK, REMOTE = kv_events.TIERS


class Pool:
    """vLLM's block pool: ids, users, and what can be found."""

    def __init__(self, num_blocks=16):
        self.num_gpu_blocks = num_blocks
        self.blocks = [types.SimpleNamespace(block_id=i, ref_cnt=0) for i in range(num_blocks)]
        self.by_hash = {}

    def get_num_free_blocks(self):
        return sum(not block.ref_cnt for block in self.blocks)

    def get_cached_block(self, block_hash, kv_cache_group_ids):
        assert kv_cache_group_ids == [0]
        found = self.by_hash.get(block_hash)
        return None if found is None else [self.blocks[found]]

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks):
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0


def name_of(block_hash):
    return int.from_bytes(block_hash[-8:], "big")


class Rig:
    """A scheduler's half with `num_ranks` workers that make each copy at once, but for those in `held`."""

    def __init__(
        self, num_host=8, num_disk=0, num_ranks=1, stored=None, segment_blocks=1, **options
    ):
        self.now = 0.0
        self.num_ranks = num_ranks
        self.scheduler = tier_scheduler.TierScheduler(
            tier_setup.TierConfig(**options), block_size=BLOCK, num_ranks=num_ranks, now=lambda: self.now
        )  # fmt: skip
        self.pool = Pool()
        self.scheduler.bind(self.pool)
        self.num_host = num_host
        self.opened = tier_plan.OpenedStorage(
            block_bytes=BLOCK_BYTES,
            host=tiers.TierSlots(num=num_host),
            disk=tiers.TierSlots(num=num_disk, segment_blocks=segment_blocks, stored=stored or {})
            if num_disk
            else None,
            is_shared=options.get("kvbm_sharing_workers", 1) > 1,
        )
        self.held, self.failing = [], set()
        self.plans = []

    def request(self, name, num_tokens=17, **fields):
        tokens = [hash((name[0], i)) % 997 for i in range(num_tokens)]
        return self.add_request(self.scheduler, name, tokens, BLOCK, **fields)

    @staticmethod
    def add_request(scheduler, name, tokens, block_size, **fields):
        hashes = [
            bytes(24) + (hash(tuple(tokens[:end])) & (2**64 - 1)).to_bytes(8, "big")
            for end in range(block_size, len(tokens) + 1, block_size)
        ]
        defaults = {
            "lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None,
            "priority": 0, "kv_transfer_params": None, "sampling_params": None,
        }  # fmt: skip
        request = types.SimpleNamespace(
            request_id=name, num_tokens=len(tokens), all_token_ids=tokens, block_hashes=hashes,
            **(defaults | fields),
        )  # fmt: skip
        scheduler.add(request)
        return request

    def step(self, scheduled=(), num_tokens=0, *, hold=()):
        """Run a step: `hold` are the paths whose copies do not end in it."""
        plan = self.scheduler.plan(scheduled, num_tokens)
        self.plans.append(plan)
        ended = {}
        for copy in [*self.held, *plan.copies]:
            if copy.path not in hold:
                failed = frozenset(range(len(copy.blocks))) if copy.path in self.failing else ()
                ended[copy.waiting] = tier_plan.EndedCopy(
                    failed=frozenset(failed), seconds=0.001, began_at=7.0, ended_at=7.5
                )
        self.held = [copy for copy in [*self.held, *plan.copies] if copy.path in hold]
        results = [
            tier_plan.TierResults(
                opened=self.opened, num_usable=self.num_host, ended=ended,
                step_s=num_tokens / 1000 or None,
            )
            for _ in range(self.num_ranks)
        ]  # fmt: skip
        joined = results[0]
        for other in results[1:]:
            joined = joined.join(other)
        self.opened = None
        self.scheduler.record(joined)
        return plan

    def compute(self, request):
        """Compute a request's prompt in vLLM's blocks, so that they are found there, and end it."""
        for block, block_hash in enumerate(request.block_hashes):
            self.pool.by_hash[block_hash] = block
        self.step([(request.request_id, request.num_tokens)], request.num_tokens)
        while self.scheduler.has_work:
            self.step()
        return self.scheduler.finish(request.request_id)

    def evict(self):
        self.pool.by_hash.clear()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks


@pytest.fixture
def rig():
    made = Rig()
    made.step()
    return made


def test_request_waits_until_the_workers_have_opened_the_tiers():
    rig = Rig()
    request = rig.request("a")
    assert rig.scheduler.match(request, 0) == (None, False)
    assert rig.scheduler.report() is None
    rig.step()
    assert rig.scheduler.match(request, 0) == (0, False)
    assert rig.scheduler.report().tiers[1].num_blocks == 8


def test_request_does_not_wait_for_workers_that_never_report():
    rig = Rig()
    rig.scheduler.clear()
    for _ in range(tier_scheduler.MAX_UNOPENED):
        assert rig.scheduler.has_work
        assert rig.scheduler.plan((), 0) == tier_plan.TierPlan()

    assert not rig.scheduler.has_work
    assert rig.scheduler.match(rig.request("a"), 0) == (0, False)


def test_blocks_are_offloaded_after_their_step_and_loaded_when_vllm_has_evicted_them(rig):
    rig.compute(rig.request("a"))
    assert [copy.path for copy in rig.plans[1].copies] == [(DEVICE, HOST)] * 2
    rig.evict()
    again = rig.request("a2")
    assert rig.scheduler.match(again, 0) == (16, False)
    rig.scheduler.allocate("a2", [3, 4, 5, 6, 7], 16)
    assert rig.scheduler.sources("a2") == {HOST: 16}
    plan = rig.step([("a2", 17)], 1)

    (load,) = [copy for copy in plan.copies if copy.path == (HOST, DEVICE)]
    assert load.to_slots == (3, 4, 5, 6)
    assert plan.request_by_load == {}  # before the step
    assert rig.scheduler.finish("a2") == {"host": 16}
    assert rig.scheduler.report().counts["matched_tokens"] == 16


def test_blocks_that_follow_those_of_a_load_are_counted_as_missing(rig):
    rig.compute(rig.request("a"))
    rig.evict()
    longer = rig.request("a2", num_tokens=33)
    assert rig.scheduler.match(longer, 0) == (16, False)
    rig.scheduler.allocate("a2", range(9), 16)
    rig.step([("a2", 33)], 17)

    assert rig.scheduler.report().counts["host_lookups"] == 8
    assert rig.scheduler.report().host_hit_rate == 0.5


def test_large_load_runs_beside_the_steps(rig, monkeypatch):
    monkeypatch.setattr(tiered_cache, "QUICK_BYTES", 0)
    monkeypatch.setattr(tiered_cache, "QUICK_SHARE", 0)
    rig.compute(rig.request("a"))
    rig.evict()
    again = rig.request("a2")
    assert rig.scheduler.match(again, 4) == (12, True)  # vLLM has the first block
    rig.scheduler.allocate("a2", [3, 4, 5, 6, 7], 12)
    plan = rig.step(hold=[(HOST, DEVICE)])
    rig.scheduler.allocate("a2", [3, 4, 5, 6, 7], 0)  # as vLLM does when the load has ended

    assert list(plan.request_by_load.values()) == ["a2"]
    assert plan.copies[0].to_slots == (4, 5, 6)
    assert rig.scheduler.has_work
    rig.scheduler.finish("a2")  # aborted meanwhile
    rig.step()
    assert not rig.scheduler.has_work


def test_failed_load_is_no_hit(rig, monkeypatch):
    monkeypatch.setattr(tiered_cache, "QUICK_BYTES", 0)  # those before a step cannot fail
    monkeypatch.setattr(tiered_cache, "QUICK_SHARE", 0)
    rig.compute(rig.request("a"))
    rig.evict()
    rig.failing = {(HOST, DEVICE)}
    again = rig.request("a2")
    num_tokens, _ = rig.scheduler.match(again, 0)
    rig.scheduler.allocate("a2", range(5), num_tokens)
    rig.step([("a2", 17)], 1)

    assert rig.scheduler.match(again, 0) == (
        0,
        False,
    )  # vLLM asks again, and must not wait for ever
    assert rig.scheduler.finish("a2") == {}
    assert rig.scheduler.report().counts["matched_tokens"] == 0
    assert rig.scheduler.report().counts["failed_blocks"] == 4


def test_failed_offload_is_never_found(rig):
    rig.failing = {(DEVICE, HOST)}
    rig.compute(rig.request("a"))
    rig.evict()

    assert rig.scheduler.match(rig.request("a2"), 0) == (0, False)
    assert rig.scheduler.take_events() == []


def test_block_that_is_copied_is_not_free_in_vllm(rig):
    request = rig.request("a")
    for block, block_hash in enumerate(request.block_hashes):
        rig.pool.by_hash[block_hash] = block
    rig.step([("a", 17)], 17, hold=[(DEVICE, HOST)])
    assert rig.pool.get_num_free_blocks() == 14  # two copies at once, of one block each
    rig.scheduler.finish("a")
    while rig.scheduler.has_work:
        rig.step()
    assert rig.pool.get_num_free_blocks() == 16


def test_copy_has_ended_when_all_ranks_have_made_it():
    rig = Rig(num_ranks=2)
    rig.step()
    rig.num_ranks = 1  # the other one is slow
    request = rig.request("a")
    rig.pool.by_hash[request.block_hashes[0]] = 0
    rig.step([("a", 4)], 4)
    assert rig.pool.get_num_free_blocks() == 15
    number = rig.plans[-1].copies[0].waiting
    rig.scheduler.record(
        tier_plan.TierResults(num_usable=8, ended={number: tier_plan.EndedCopy(seconds=0.1)})
    )
    assert rig.pool.get_num_free_blocks() == 16


def rig_with_stored_prompt():
    """Return a rig whose disk has the blocks of the requests' prompt from an earlier run."""
    stored = {
        slot: (tiers.CachedBlock(name_of(block_hash), 0, None),)
        for slot, block_hash in enumerate(Rig().request("a").block_hashes)
    }
    return Rig(num_disk=8, stored=stored, kvbm_nvme_path="/x")


def test_disk_is_read_while_the_request_waits_but_not_for_too_long():
    rig = rig_with_stored_prompt()
    rig.step(num_tokens=100)  # 1 ms a token
    params = types.SimpleNamespace(extra_args={tier_plan.IS_TRACED: True})
    request = rig.request("a", sampling_params=params)
    assert rig.scheduler.match(request, 0) == (None, False)
    rig.step(hold=[(DISK, HOST)])
    assert rig.scheduler.match(request, 0) == (None, False)
    rig.now = 1.0
    assert rig.scheduler.match(request, 0) == (0, False)  # computed instead
    rig.step()
    (late,) = rig.scheduler.reads("a")
    assert late.is_late
    assert 0.0 < late.began_at < late.ended_at == 1.0

    assert rig.scheduler.report().counts["late_loads"] == 1
    assert rig.scheduler.match(rig.request("a2"), 0) == (16, False)  # it came after all


def test_request_that_is_aborted_while_the_disk_is_read_keeps_nothing():
    rig = rig_with_stored_prompt()
    rig.step()
    assert rig.scheduler.match(rig.request("a"), 0) == (None, False)
    rig.step(hold=[(DISK, HOST)])
    rig.scheduler.finish("a")
    while rig.scheduler.has_work:
        rig.step()
    host = rig.scheduler.cache.host
    blocks = [host.find(name_of(h)) for h in rig.request("a").block_hashes]

    assert [block.num_users for block in blocks] == [0] * 4
    assert rig.pool.get_num_free_blocks() == 16
    assert rig.scheduler.report().counts["matched_tokens"] == 0


def test_segments_are_written_and_read_after_what_vllm_has_itself():
    rig = Rig(num_host=16, num_disk=4, segment_blocks=2, kvbm_object_store="file:///x")
    rig.step()
    rig.compute(rig.request("a", num_tokens=29))  # seven blocks
    copied = rig.scheduler.report().copied
    rig.evict()
    rig.scheduler.cache.host.clear()
    again = rig.request("a2", num_tokens=29)
    rig.scheduler.match(again, BLOCK)  # vLLM has the first block
    (read,) = rig.step(hold=[(REMOTE, HOST)]).copies

    assert (copied["offload_blocks_d2h"], copied["offload_blocks_h2o"]) == (7, 6)
    assert [block.sequence_hash for block in read.blocks] == [
        name_of(block_hash) for block_hash in again.block_hashes[1:6]
    ]
    assert len(set(read.from_slots)) == 3


def test_tokens_are_counted_for_the_tier_in_which_they_were_found():
    rig = rig_with_stored_prompt()
    rig.step()
    request = rig.request("a")
    rig.scheduler.match(request, 0)
    rig.step()
    num_tokens, _ = rig.scheduler.match(request, 0)
    rig.scheduler.allocate("a", range(5), num_tokens)
    rig.step()

    assert rig.scheduler.reads("a") == ()
    assert rig.scheduler.finish("a") == {"disk": 16}


def test_reads_for_a_traced_request_are_reported_with_their_times():
    rig = rig_with_stored_prompt()
    rig.step()
    params = types.SimpleNamespace(extra_args={tier_plan.IS_TRACED: True})
    request = rig.request("a", sampling_params=params)
    rig.scheduler.match(request, 0)
    rig.step()
    num_tokens, _ = rig.scheduler.match(request, 0)
    rig.scheduler.allocate("a", range(5), num_tokens)
    rig.step()

    assert [
        (read.tier, read.to, read.num_blocks, read.num_bytes, read.began_at, read.ended_at)
        for read in rig.scheduler.reads("a")
    ] == [
        (DISK, HOST, 4, 4 * BLOCK_BYTES, 7.0, 7.5),
        (HOST, DEVICE, 4, 4 * BLOCK_BYTES, 7.0, 7.5),
    ]
    rig.scheduler.finish("a")
    assert rig.scheduler.reads("a") == ()


def test_events_name_tokens_adapter_and_salt_and_only_blocks_of_text(rig):
    lora = types.SimpleNamespace(lora_name="poet", lora_int_id=1)
    salted = rig.request("s", num_tokens=9, cache_salt="mine", lora_request=lora)
    rig.compute(salted)
    rig.compute(rig.request("p", num_tokens=9, mm_features=["image"]))
    first, second = rig.scheduler.take_events()

    assert [first.tier, second.tier] == [HOST, HOST]
    assert [first.origin.parent, second.origin.parent] == [None, first.name]
    assert list(first.origin.token_ids) == salted.all_token_ids[:4]
    assert (first.origin.extra_keys, second.origin.extra_keys) == (("poet", "mine"), ("poet",))
    rig.compute(rig.request("q", num_tokens=33))
    assert [event.name for event in rig.scheduler.take_events() if event.origin is None][:2] == [
        second.name,
        first.name,
    ]


def test_blocks_of_an_adapter_are_not_where_another_of_its_name_would_find_them():
    lora = types.SimpleNamespace(lora_name="poet", lora_int_id=1)
    alone = Rig(num_disk=8)
    alone.step()
    alone.compute(alone.request("a", lora_request=lora))
    sharing = Rig(kvbm_sharing_workers=2)
    sharing.step()
    sharing.compute(sharing.request("a", lora_request=lora))

    assert [use.used_blocks for use in alone.scheduler.report().tiers[1:]] == [4, 0]
    assert sharing.scheduler.report().tiers[1].used_blocks == 0
    assert sharing.scheduler.match(sharing.request("a2", lora_request=lora), 0) == (0, False)


def test_reloaded_adapter_finds_no_block_of_the_former_one_of_its_name():
    former, reloaded = (
        types.SimpleNamespace(lora_name="poet", lora_int_id=number) for number in (1, 2)
    )
    rig = Rig()
    rig.step()
    rig.compute(rig.request("a", lora_request=former))
    rig.evict()

    assert rig.scheduler.match(rig.request("a2", lora_request=reloaded), 0) == (0, False)
    assert rig.scheduler.match(rig.request("a3", lora_request=former), 0) == (16, False)


def test_clearing_drops_every_tier_and_tells_the_workers(rig):
    rig.compute(rig.request("a"))
    rig.scheduler.clear()
    assert rig.scheduler.has_work
    assert rig.step().is_disk_cleared
    rig.evict()

    assert not rig.scheduler.has_work
    assert rig.scheduler.match(rig.request("a2"), 0) == (0, False)


def test_clearing_before_the_tiers_are_open_drops_what_an_earlier_run_has_left():
    stored = Rig().request("a").block_hashes
    names = [name_of(block_hash) for block_hash in stored]
    blocks = {i: (tiers.CachedBlock(name, 0, None),) for i, name in enumerate(names)}
    rig = Rig(num_disk=8, stored=blocks, kvbm_nvme_path="/x")
    rig.scheduler.clear()
    assert rig.scheduler.has_work
    assert not rig.step().is_disk_cleared  # the workers open the tiers in this step
    assert rig.scheduler.has_work
    assert rig.step().is_disk_cleared

    assert not rig.scheduler.has_work
    assert rig.scheduler.match(rig.request("a2"), 0) == (0, False)
    assert rig.scheduler.report().tiers[2].used_blocks == 0


def test_prompt_that_a_peer_has_computed_is_left_to_the_peer(rig):
    rig.compute(rig.request("a"))
    rig.evict()
    params = {"do_remote_prefill": True}

    assert rig.scheduler.match(rig.request("a2", kv_transfer_params=params), 0) == (0, False)
    unknown = types.SimpleNamespace(**vars(rig.request("a3")) | {"request_id": "?"})
    assert rig.scheduler.match(unknown, 0) == (0, False)


def test_wish_to_keep_blocks_reaches_the_tiers(rig):
    hint = generate.Request(
        id="a", model="m", token_ids=b"", cache_hint=generate.CacheHint(ttl_s=300, is_pinned=True)
    )
    support = shared.GuidedSupport()
    sampling = types.SimpleNamespace(**translation.sampling_fields(hint, 0, support))
    request = rig.request("a", sampling_params=sampling)
    rig.compute(request)

    assert rig.scheduler.cache.host.num_kept == 4


def test_first_match_waits_for_what_other_workers_have_stored():
    rig = Rig(kvbm_sharing_workers=2)
    rig.step()
    request = rig.request("a")
    assert rig.scheduler.match(request, 0) == (None, False)
    stored = {
        8 + i: tiers.CachedBlock(name_of(block_hash), 0, None)
        for i, block_hash in enumerate(request.block_hashes)
    }
    changes = tiers.SharedChanges(stored=stored, removed=[], is_cleared=False)
    rig.step()
    rig.scheduler.record(tier_plan.TierResults(num_usable=8, changes={HOST: changes}))

    assert rig.scheduler.match(request, 0) == (16, True)


def test_memory_that_others_share_is_loaded_beside_the_steps():
    """A block may vanish from it, and what vLLM does after a load that failed before a step is not safe."""
    rig = Rig(kvbm_sharing_workers=2)
    rig.step()
    rig.compute(rig.request("a"))
    rig.evict()
    again, other = rig.request("a2"), rig.request("b")
    rig.step()
    assert rig.scheduler.match(other, 0) == (
        0,
        False,
    )  # nothing to load: vLLM allows no other answer
    assert rig.scheduler.match(again, 0) == (16, True)
    rig.scheduler.allocate("a2", [3, 4, 5, 6, 7], 16)

    assert list(rig.step().request_by_load.values()) == ["a2"]


def test_origins_are_bounded(rig, monkeypatch):
    monkeypatch.setattr(rig.scheduler, "_max_origins", 3)
    rig.compute(rig.request("a", num_tokens=33))

    assert (
        rig.scheduler.report().copied["offload_blocks_d2h"] == 3
    )  # vLLM's hash of the others is forgotten


def test_ranks_agree_on_the_least_that_both_have():
    blocks = [(tiers.CachedBlock(i, 0, None),) for i in range(3)]
    ours = tier_plan.OpenedStorage(
        block_bytes=1,
        host=tiers.TierSlots(num=5),
        disk=tiers.TierSlots(num=9, stored=dict(enumerate(blocks))),
    )
    theirs = tier_plan.OpenedStorage(
        block_bytes=1,
        host=tiers.TierSlots(num=7),
        disk=tiers.TierSlots(num=8, stored={0: blocks[0], 1: blocks[2]}),
    )
    first = tier_plan.TierResults(opened=ours, num_usable=5, step_s=0.1)
    joined = first.join(tier_plan.TierResults(opened=theirs, num_usable=4, step_s=0.3))

    assert (joined.opened.host.num, joined.opened.disk.num) == (5, 8)
    assert joined.opened.disk.stored == {0: blocks[0]}
    assert (joined.num_usable, joined.step_s) == (4, 0.3)
    assert first.join(tier_plan.TierResults()).opened is ours


def test_slowest_rank_sets_the_time_of_a_copy():
    quick, slow = tier_plan.EndedCopy(seconds=0.1), tier_plan.EndedCopy(seconds=0.3)
    unknown = tier_plan.EndedCopy(failed=frozenset((2,)))

    assert quick.join(slow).seconds == 0.3
    assert quick.join(unknown) == tier_plan.EndedCopy(num_ranks=2, failed=frozenset((2,)))


def test_blocks_of_answers_are_offloaded_as_they_fill(rig):
    request = rig.request("a", num_tokens=9)
    for block, block_hash in enumerate(request.block_hashes):
        rig.pool.by_hash[block_hash] = block
    rig.step([("a", 9)], 9)
    longer = rig.request("a", num_tokens=13)
    request.block_hashes.append(longer.block_hashes[2])
    request.all_token_ids[:] = longer.all_token_ids
    rig.scheduler.add(request)
    rig.pool.by_hash[request.block_hashes[2]] = 2
    for num_computed in itertools.chain((10, 12), [13] * 6):
        rig.step([("a", num_computed)], 1)

    assert rig.scheduler.report().tiers[1].used_blocks == 3
