"""The loop in a thread of its own, around a runner that computes nothing."""

import queue
import threading

import pytest

from dynamo.engine.native.loop import EngineLoop
from dynamo.engine.native.scheduler import Scheduler, SchedulerLimits
from dynamo.engine.native.sequence import Paging, Sampled
from dynamo.protocols import blocks, generate
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
    def __init__(self):
        self.runner, self.results, self.passes = FakeRunner(), queue.SimpleQueue(), []
        paging = Paging(num_blocks=16, block_size=4, prefix_caching=True)
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, context_length=64)
        self.loop = EngineLoop(Scheduler(paging, limits), self.runner, self.deliver)
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
    running.loop.clear(cleared.set)
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
