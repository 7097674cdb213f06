"""The loop in a thread of its own, around a runner that computes nothing."""

import queue
import threading

import pytest

from dynamo.engine.native.loop import EngineLoop
from dynamo.engine.native.scheduler import Scheduler, SchedulerLimits
from dynamo.engine.native.sequence import Paging, Sampled
from dynamo.kvbm import tier_policy, tiered_cache, tiers
from dynamo.protocols import blocks, generate, kv_events
from waiting import PATIENT_S


class FakeRunner:
    """Draws the length of the sequence as its next token; can be held before a step."""

    def __init__(self):
        self.may_run = threading.Event()
        self.may_run.set()
        self.is_held = threading.Event()
        self.forgotten = []
        self.threads = set()

    def run(self, chunks):
        self.threads.add(threading.current_thread().name)
        self.is_held.set()
        assert self.may_run.wait(PATIENT_S)
        return [Sampled(token_id=len(c.sequence.token_ids)) if c.samples else None for c in chunks]

    def forget(self, sequence):
        self.forgotten.append(sequence.request.id)


class Running:
    def __init__(self, runner=None, paging=None, copies=None):
        self.runner, self.results, self.passes = runner or FakeRunner(), queue.SimpleQueue(), []
        paging = paging or Paging(num_blocks=16, block_size=4, prefix_caching=True)
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, context_length=64)
        scheduler = Scheduler(paging, limits)
        self.loop = EngineLoop(scheduler, self.runner, self.deliver, [].extend, copies=copies)
        self.thread = threading.Thread(target=self.loop.run, name="engine")

    def deliver(self, result):
        self.passes.append(self.loop.load.last_passes[-1])
        self.results.put(result)

    def submit(self, request_id, prompt=(1, 2, 3), max_tokens=2):
        conditions = generate.StopConditions(max_tokens=max_tokens)
        packed = blocks.pack(prompt)
        self.loop.submit(
            generate.Request(id=request_id, model="m", token_ids=packed, stop_conditions=conditions)
        )

    def run_commands(self):
        """Run the commands so far without the thread."""
        while not self.loop._commands.empty():
            self.loop._commands.get()()

    def next(self):
        return self.results.get(timeout=PATIENT_S)


@pytest.fixture
def running():
    running = Running()
    running.thread.start()
    yield running
    running.runner.may_run.set()
    running.loop.stop()
    running.thread.join(PATIENT_S)

    assert not running.thread.is_alive()


def test_each_step_is_one_delivery(running):
    running.submit("a")
    results = [running.next(), running.next()]

    assert [r.outputs[0].output.token_ids for r in results] == [(3,), (4,)]
    assert running.runner.forgotten == ["a"]
    assert running.runner.threads == {"engine"}


def test_a_request_that_arrives_during_a_step_joins_the_next(running):
    running.runner.may_run.clear()
    running.submit("a", max_tokens=3)
    assert running.runner.is_held.wait(PATIENT_S)
    running.submit("b", max_tokens=2)
    running.submit("c", max_tokens=2)
    running.runner.may_run.set()
    steps = [[output.request.id for output in running.next().outputs] for _ in range(3)]

    assert steps == [["a"], ["a", "b", "c"], ["a", "b", "c"]]


def test_an_abort_frees_its_blocks_before_the_next_step(running):
    running.runner.may_run.clear()
    running.submit("a", max_tokens=50)
    assert running.runner.is_held.wait(PATIENT_S)
    running.loop.abort("a")
    cleared = threading.Event()
    running.loop.clear(lambda fault: cleared.set())
    running.runner.may_run.set()
    assert cleared.wait(PATIENT_S)
    running.submit("b", max_tokens=1)
    results = [running.next() for _ in range(3)]

    assert [[output.request.id for output in r.outputs] for r in results] == [["a"], [], ["b"]]
    assert running.runner.forgotten == ["a", "b"]
    assert running.loop.load.kv_stats.kv_active_blocks == 0


def test_the_load_is_updated_before_delivery(running):
    running.submit("a", max_tokens=1)
    running.next()

    assert running.loop.load.worker_stats.request_active_slots == 0


def test_each_pass_is_told_with_what_it_computed(running):
    running.submit("a", prompt=range(5), max_tokens=3)
    for _ in range(3):
        running.next()

    assert [(p.num_prompt_tokens, p.num_kv_tokens) for p in running.passes] == [
        (5, 0),
        (0, 6),
        (0, 7),
    ]
    assert all(each.wall_s > 0 for each in running.passes)


class SlowCopies:
    """The part of `tier_copies.TierCopies` that a step uses: no copy ends, and those in `late` have become late."""

    def __init__(self, log):
        self.log, self.begun, self.late = log, [], []

    def begin(self, copy):
        self.log.append(copy.path)
        self.begun.append(copy)

    def look(self):
        return {}

    def take_late(self):
        late, self.late = self.late, []
        return late


class LoggingRunner(FakeRunner):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def run(self, chunks):
        self.log.append("step")
        return super().run(chunks)


def make_paging(prompt, in_host, on_disk):
    """Return block tables whose tiers have these blocks of a prompt, by position."""
    paging = Paging(num_blocks=16, block_size=4, prefix_caching=True)
    local = blocks.local_hashes(blocks.pack(prompt), 4)
    names = blocks.sequence_hashes(local)
    chain = [
        tiers.CachedBlock(*fields) for fields in zip(names, local, (None, *names[:-1]), strict=True)
    ]
    host, disk = (
        tiers.Tier(tier, 8, paging.pool.events) for tier in (kv_events.HOST, kv_events.DISK)
    )
    host.restore({i: (chain[i],) for i in in_host})
    disk.restore({i: (chain[i],) for i in on_disk})
    paging.tiers = tiered_cache.TieredCache(paging.pool, host, disk, block_size=4, block_bytes=1)
    return paging


def test_load_from_host_memory_begins_before_the_step_in_which_the_disk_is_found_late(monkeypatch):
    monkeypatch.setattr(tiered_cache, "QUICK_BYTES", 0)
    monkeypatch.setattr(tiered_cache, "QUICK_SHARE", 0)
    monkeypatch.setattr(tier_policy.LoadCost, "pays", lambda *_: True)
    log = []
    copies = SlowCopies(log)
    running = Running(LoggingRunner(log), make_paging(range(13), [0], [1, 2]), copies)
    running.submit("decoding", max_tokens=9)
    running.submit("waiting", prompt=range(13))
    running.run_commands()
    running.loop.step()
    copies.late = list(copies.begun)
    running.loop.step()

    read, load = (kv_events.DISK, kv_events.HOST), (kv_events.HOST, kv_events.DEVICE)
    assert log == [read, "step", load, "step"]
