"""Both halves of the vLLM tier connector, without vLLM: two tensor-parallel ranks over one object store."""

import importlib.util
import os
import struct
import time
import types

import pytest
import torch
from test_vllm_tiers import Pool, Rig, name_of

from dynamo.engine.adapters.vllm import tier_scheduler, tier_worker
from dynamo.kvbm import tier_setup
from waiting import PATIENT_S

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("obstore") is None, reason="obstore is not installed"
)
BLOCK, NUM_BLOCKS, NUM_RANKS = 128, 16, 2  # an object holds two blocks


class Engine:
    """A scheduler's half, and a worker's half for each rank, whose memory is a tensor of one layer."""

    def __init__(self, directory, now=time.monotonic, **options):
        settings = tier_setup.TierConfig(
            kvbm_object_store=directory.as_uri(),
            kvbm_object_num_blocks=16,
            kvbm_cpu_cache_override_num_blocks=NUM_BLOCKS,
            **options,
        )
        self.scheduler = tier_scheduler.TierScheduler(
            settings, block_size=BLOCK, num_ranks=NUM_RANKS, now=now
        )
        self.pool = Pool(NUM_BLOCKS)
        self.scheduler.bind(self.pool)
        self.memories = [torch.zeros(NUM_BLOCKS, 1024) for _ in range(NUM_RANKS)]
        self.workers = []
        for rank, memory in enumerate(self.memories):
            worker = tier_worker.TierWorker(settings, f"rank{rank}")
            worker.open({"layer": memory}, {"block_size": str(BLOCK), "ranks": f"{rank} of 2"})
            self.workers.append(worker)

    def step(self, scheduled=(), num_tokens=0):
        plan = self.scheduler.plan(scheduled, num_tokens)
        joined = None
        for worker in self.workers:
            worker.start_clock()
            worker.begin_copies(plan)
            worker.end_step(plan)
            worker.take_received()
            results = worker.take_results()
            joined = results if joined is None else joined.join(results)
        self.scheduler.record(joined)

    def request(self, name, num_blocks, **fields):
        """Add a request of so many full blocks, and a token more."""
        tokens = [hash((name[0], i)) % 997 for i in range(num_blocks * BLOCK + 1)]
        return Rig.add_request(self.scheduler, name, tokens, BLOCK, **fields)

    def compute(self, request):
        """Fill vLLM's blocks with the prompt, and let the tiers copy them."""
        for block, block_hash in enumerate(request.block_hashes):
            self.pool.by_hash[block_hash] = block
            for rank, memory in enumerate(self.memories):
                memory[block] = self.content(block_hash, rank)
        self.step([(request.request_id, request.num_tokens)], request.num_tokens)
        self.settle()

    def settle(self):
        until = time.monotonic() + PATIENT_S
        while self.scheduler.has_work:
            assert time.monotonic() < until
            self.step()
            time.sleep(0.001)

    def load(self, request):
        """Load what the tiers have of a request to the last blocks; return how many blocks are right at all ranks."""
        until = time.monotonic() + PATIENT_S
        while (matched := self.scheduler.match(request, 0)[0]) is None:
            assert time.monotonic() < until
            self.step()
        blocks = list(range(NUM_BLOCKS - len(request.block_hashes), NUM_BLOCKS))
        self.scheduler.allocate(request.request_id, blocks, matched)
        self.step()
        self.settle()
        num_loaded = self.scheduler.finish(request.request_id).get("remote", 0) // BLOCK
        for block, block_hash in list(zip(blocks, request.block_hashes, strict=True))[:num_loaded]:
            for rank, memory in enumerate(self.memories):
                assert memory[block].eq(self.content(block_hash, rank)).all()
        return num_loaded

    @staticmethod
    def content(block_hash, rank):
        return float(name_of(block_hash) % 10_007 + rank * 0.5)

    def close(self):
        for worker in self.workers:
            worker.close()


@pytest.fixture
def start(tmp_path):
    started = []

    def start(**options):
        for engine in started:
            engine.close()
        started.append(Engine(tmp_path, **options))
        started[-1].step()
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def objects_of(directory, rank):
    """Return the objects of a rank, in the order of their age."""
    found = [p for p in directory.glob(f"*/rank{rank}/**/*") if p.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def object_with(directory, rank, block_hash):
    """Return the object of a rank that has a block; its age may be that of the object before it."""
    content = struct.pack("<f", Engine.content(block_hash, rank)) * 64
    return next(path for path in objects_of(directory, rank) if content in path.read_bytes())


def test_restart_finds_objects_that_the_ranks_have_written_in_another_order(start, tmp_path):
    engine = start(now=lambda: 0.0)  # no read comes too late
    for name in ("a", "b", "c"):
        engine.compute(engine.request(name, 4))
    for age, path in enumerate(objects_of(tmp_path, 1)):
        os.utime(path, (2_000_000_000 - age, 2_000_000_000 - age))
    engine = start(now=lambda: 0.0)

    assert [engine.load(engine.request(name, 4)) for name in ("a", "b", "c")] == [4, 4, 4]


def test_object_that_one_rank_lacks_is_lost_alone(start, tmp_path):
    engine = start(now=lambda: 0.0)  # no read comes too late
    for name in ("a", "b", "c"):
        request = engine.request(name, 4)
        engine.compute(request)
    lost = object_with(tmp_path, 1, request.block_hashes[-1])
    lost.unlink()
    engine = start(now=lambda: 0.0)
    found = [engine.load(engine.request(name, 4)) for name in ("a", "b", "c")]
    engine.compute(engine.request("c2", 4))

    assert (sum(found), sorted(found)) == (10, [2, 4, 4])
    assert lost.exists()  # it was stored again, from all ranks
    engine = start(now=lambda: 0.0)
    assert [engine.load(engine.request(name, 4)) for name in ("a", "b", "c")] == [4, 4, 4]


def test_object_of_a_slot_that_is_written_anew_is_removed_at_every_rank(start, tmp_path):
    engine = start()
    for name in ("a", "b", "c", "d"):  # eight objects, as many as there are slots
        engine.compute(engine.request(name, 4))
    for age, path in enumerate(objects_of(tmp_path, 1)):
        os.utime(path, (2_000_000_000 - age, 2_000_000_000 - age))
    engine = start()
    engine.compute(engine.request("e", 4))
    names = [{(p.parent.name, p.name) for p in objects_of(tmp_path, rank)} for rank in (0, 1)]

    assert names[0] == names[1]
    assert len(names[0]) == 8


@pytest.mark.parametrize(("is_lost", "num_found"), [(False, 4), (True, 0)])
def test_object_that_another_worker_stores_meanwhile_is_found_if_all_ranks_have_it(
    tmp_path, is_lost, num_found
):
    first, second = Engine(tmp_path), Engine(tmp_path, now=lambda: 0.0)  # no answer comes too late
    for engine in (first, second):
        engine.step()
    second.scheduler.cache.cost.record_step(BLOCK, 1e6)  # computing takes longer than any answer
    first.compute(first.request("a", 4))
    for path in objects_of(tmp_path, 1) if is_lost else ():
        path.unlink()  # all: two that are written within a tick of the disk's clock have no order
    num_loaded = second.load(second.request("a", 4))
    for engine in (first, second):
        engine.close()

    assert num_loaded == num_found


def test_blocks_of_an_adapter_are_not_asked_for(start):
    engine = start()
    request = engine.request(
        "a", 4, lora_request=types.SimpleNamespace(lora_name="x", lora_int_id=1)
    )

    assert engine.scheduler.match(request, 0) == (0, False)
    assert engine.scheduler.report().counts["store_questions"] == 0


def test_blocks_that_were_cleared_before_the_first_step_are_not_found(start, tmp_path):
    engine = start()
    engine.compute(engine.request("a", 4))
    engine = start()
    engine.scheduler.clear()
    engine.settle()

    assert engine.load(engine.request("a", 4)) == 0
