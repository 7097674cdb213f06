"""The queue of grammars for an engine of another project, over a process whose trials end when the test says so."""

import asyncio

import pytest

from dynamo.base import errors
from dynamo.engine import trials
from dynamo.protocols import generate

LIMITS = trials.TrialLimits(cpu_s=1, memory=2**20, wall_s=1)


class Process:
    """A process of trials: each ends with `verdict` once `is_ready` is set."""

    def __init__(self, verdict):
        self.tried, self.verdict = [], verdict
        self.is_ready = asyncio.Event()
        self.has_ended = False

    async def attempt(self, guided):
        self.tried.append(guided)
        await self.is_ready.wait()
        return self.verdict

    def close(self):
        self.has_ended = True


def begin(verdict, monkeypatch):
    process = Process(verdict)
    monkeypatch.setattr(trials, "TrialProcess", lambda *_, **__: process)
    return trials.GrammarTrials("a.module", (), LIMITS), process


def number(i):
    return generate.GuidedDecoding(regex=f"{i}+", param="guided_regex")


async def end(checks, process):
    await asyncio.sleep(0)
    process.is_ready.set()
    return await asyncio.gather(*checks, return_exceptions=True)


@pytest.mark.parametrize("ended_by", [None, 9], ids=["good", "killed"])
async def test_choices_and_requests_with_one_grammar_share_a_trial(ended_by, monkeypatch):
    queue, process = begin(trials.Verdict(ended_by=ended_by), monkeypatch)
    checks = [asyncio.create_task(queue.check(number(0))) for _ in range(128)]
    results = await end(checks, process)
    await queue.close()

    assert {type(result) for result in results} == {
        type(None) if ended_by is None else errors.Overloaded
    }
    assert process.tried == [number(0)]


async def test_grammars_that_wait_are_bounded(monkeypatch):
    queue, process = begin(trials.Verdict(), monkeypatch)
    numbers = range(trials.MAX_WAITING + 1)
    checks = [asyncio.create_task(queue.check(number(i))) for i in numbers]
    results = await end(checks, process)
    await queue.close()

    assert isinstance(results.pop(), errors.Overloaded)
    assert results == [None] * trials.MAX_WAITING


async def test_failed_trial_is_the_error_of_all_that_wait_for_it_and_is_tried_again(monkeypatch):
    queue, process = begin(trials.Verdict(), monkeypatch)
    failure = errors.EngineFailed("the process has ended")

    async def fail(guided):
        raise failure

    monkeypatch.setattr(process, "attempt", fail)
    checks = [asyncio.create_task(queue.check(number(0))) for _ in range(2)]
    results = await end(checks, process)
    monkeypatch.undo()
    await queue.check(number(0))
    await queue.close()

    assert results == [failure, failure]


async def test_process_that_cannot_start_fails_the_requests(monkeypatch):
    def start(*_, **__):
        raise OSError("no memory")

    monkeypatch.setattr(trials, "TrialProcess", start)
    queue = trials.GrammarTrials("a.module", (), LIMITS)
    with pytest.raises(errors.EngineFailed, match="no memory"):
        await queue.check(number(0))
