"""Copies between cache tiers that fail, stall and end late, under many requests: no answer changes, nothing is kept.

32 requests at once on a cache for three of them, so that some are preempted, and every fifth is aborted.
"""

import asyncio
import itertools
import threading
from collections import Counter

import pytest
from test_native_tiers import BLOCK, serving, text, tiers

from checkpoints import make_checkpoint
from dynamo.base import errors
from dynamo.engine.native import scheduler
from dynamo.kvbm import tier_copies, tier_policy, tiered_cache
from dynamo.protocols import kv_events
from waiting import PATIENT_S

DEVICE, HOST, DISK, REMOTE = kv_events.TIERS
PROMPTS = [text(7, 24) + text(100 + n, 20) for n in range(32)]
FREE_S, ANSWER = 10, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("faults"), "qwen3", vocab_size=100)


@pytest.fixture(scope="module")
def expected(model):
    async def run():
        async with serving(model) as served:
            return await asyncio.gather(
                *(served.answer(prompt, max_tokens=ANSWER) for prompt in PROMPTS)
            )

    return asyncio.run(run())


class Faults:
    """Of every four copies on a path, the first fails, the second is late, and the third stalls and fails."""

    def __init__(self, monkeypatch, paths, *, is_quick=False):
        self.num_loaded, self.num_faults, self.is_on = 0, Counter(), False
        numbers, never = {path: itertools.count() for path in paths}, threading.Event()
        real = tier_copies.TierCopies._copy

        def copy(copies, job, generations):
            if self.is_on and job.path in paths:
                match next(numbers[job.path]) % 4:
                    case 0:
                        self.num_faults[job.path] += 1
                        raise errors.TransferError("made to fail")
                    case 1:
                        never.wait(0.05)
                    case 2:
                        self.num_faults[job.path] += 1
                        never.wait(0.3)
                        raise OSError("made to stall")
            if job.path == (HOST, DEVICE):
                self.num_loaded += len(job.blocks)
            return real(copies, job, generations)

        monkeypatch.setattr(tier_copies.TierCopies, "_copy", copy)
        # The engine's own thread makes all loads before its steps, or none.
        monkeypatch.setattr(tiered_cache, "QUICK_BYTES", 2**40 if is_quick else 0)
        monkeypatch.setattr(tiered_cache, "QUICK_SHARE", 0)
        # Copy whatever there is, so that every path has its faults.
        monkeypatch.setattr(tier_policy.LoadCost, "pays", lambda *_: True)
        monkeypatch.setattr(tier_policy.ChurnGuard, "record_evictions", lambda *_: False)
        if DEVICE in paths[0]:  # what the disk has is loaded, however slow the machine reads it
            monkeypatch.setattr(tier_policy.LoadCost, "max_wait_s", lambda *_: PATIENT_S)


@pytest.fixture
def preemptions(monkeypatch):
    """Count the sequences that are preempted."""
    counted, grow = [], scheduler.Scheduler._grow

    def watch(self, sequence):
        before = len(self._waiting)
        has_grown = grow(self, sequence)
        counted.extend([sequence] * (len(self._waiting) - before))
        return has_grown

    monkeypatch.setattr(scheduler.Scheduler, "_grow", watch)
    return counted


@pytest.mark.parametrize(
    ("pair", "is_quick"),
    [
        pytest.param((DEVICE, HOST), False, id="device-host"),
        pytest.param((DEVICE, HOST), True, id="device-host, loaded before steps"),
        pytest.param((HOST, DISK), False, id="host-disk"),
        pytest.param((HOST, REMOTE), False, id="host-remote"),
    ],
)
async def test_all_is_free_and_right_though_copies_fail_stall_and_are_late(
    model, tmp_path, monkeypatch, expected, preemptions, pair, is_quick
):
    paths = pair, pair[::-1]
    faults = Faults(monkeypatch, paths, is_quick=is_quick)
    if REMOTE in pair:
        pytest.importorskip("obstore", reason="obstore is not installed")
        monkeypatch.setattr("dynamo.kvbm.object_storage.SEGMENT_TOKENS", 4 * BLOCK)
        # A host tier of 40 keeps no segment whole until it is written, one of 100 loses none that is to be read.
        below = tiers(60, kvbm_object_store=tmp_path.as_uri(), kvbm_object_num_blocks=900)
    else:
        below = tiers(40, 900, tmp_path)
    async with serving(model, num_gpu_blocks_override=34, **below) as served:
        for prompt in PROMPTS[:12]:
            await served.answer(prompt, max_tokens=ANSWER)
            await served.settle()  # so that its blocks are below before the engine gives them up
        faults.is_on = True
        ids = [served.submit(prompt, max_tokens=ANSWER) for prompt in PROMPTS]
        await asyncio.sleep(0.02)
        aborted = set(ids[::5])
        for request_id in aborted:
            served.engine.abort(request_id)
        async with asyncio.timeout(PATIENT_S):
            await asyncio.gather(*(served.sink.ends[i] for i in ids if i not in aborted))
        answers = [served.sink.tokens.get(request_id) for request_id in ids]
        async with asyncio.timeout(FREE_S):  # promised: nothing is held longer for a copy
            while (load := served.engine.load()[0]).kv_stats.kv_active_blocks:
                await asyncio.sleep(0.01)
        await served.settle()  # the last blocks are still written below host memory

    assert [a for i, a in zip(ids, answers, strict=True) if i not in aborted] == [
        e for i, e in zip(ids, expected, strict=True) if i not in aborted
    ]
    assert load.worker_stats.num_requests_waiting == 0
    assert all(faults.num_faults[path] for path in paths)
    assert preemptions
    num_hits = sum(sum(loaded.values()) for loaded in served.sink.by_tier.values())
    assert num_hits <= faults.num_loaded * BLOCK
