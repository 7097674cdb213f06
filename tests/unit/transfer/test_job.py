"""Threads' work as the event loop sees it."""

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dynamo.base import errors
from dynamo.transfer.api import MAX_DEADLINE_S, ThreadJob, TimeLimit
from waiting import PATIENT_S


@pytest.fixture
def threads():
    with ThreadPoolExecutor(1) as made:
        yield made


async def test_result_comes_out(threads):
    job = ThreadJob(threads, lambda limit: 7, deadline_s=PATIENT_S)

    assert await job.outcome == 7
    assert not job.is_running


async def test_error_comes_out(threads):
    def fail(limit):
        raise errors.TransferError("the peer is gone")

    with pytest.raises(errors.TransferError, match="the peer is gone"):
        await ThreadJob(threads, fail, deadline_s=PATIENT_S).outcome


async def test_job_without_a_thread_raises_transfer_error_and_is_not_done_later(
    threads, monkeypatch
):
    finished = []

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    def work(limit):
        limit.remaining_s()
        finished.append("first")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(errors.TransferError, match="no thread can be started"):
            ThreadJob(threads, work, deadline_s=PATIENT_S)
    await ThreadJob(threads, lambda limit: finished.append("next"), deadline_s=PATIENT_S).outcome

    assert finished == ["next"]


async def test_stop_waits_until_the_thread_has_ended(threads):
    begun, left = threading.Event(), []

    def work(limit):
        interrupted = threading.Event()
        with limit.interruptible(interrupted.set):
            begun.set()
            interrupted.wait(PATIENT_S)
        left.append(True)
        limit.remaining_s()

    job = ThreadJob(threads, work, deadline_s=PATIENT_S)
    await asyncio.to_thread(begun.wait, PATIENT_S)

    await job.stop()

    assert left == [True]
    assert isinstance(job.outcome.exception(), errors.TransferError)


async def test_result_that_comes_as_its_caller_is_cancelled_is_discarded(threads):
    discarded, may_end = [], threading.Event()
    job = ThreadJob(
        threads,
        lambda limit: may_end.wait(PATIENT_S),
        deadline_s=PATIENT_S,
        discard=discarded.append,
    )
    caller = asyncio.create_task(job.result())
    job.outcome.add_done_callback(lambda _: caller.cancel())  # before the caller hears of it
    await asyncio.sleep(0)  # the caller waits
    may_end.set()

    with pytest.raises(asyncio.CancelledError):
        await caller

    assert discarded == [True]


def test_result_that_comes_after_the_end_of_its_loop_is_discarded(threads):
    discarded, may_end = [], threading.Event()

    async def begin():
        ThreadJob(
            threads,
            lambda limit: may_end.wait(PATIENT_S),
            deadline_s=PATIENT_S,
            discard=discarded.append,
        )

    asyncio.run(begin())
    may_end.set()
    threads.shutdown()

    assert discarded == [True]


async def test_deadline_holds_while_waiting_for_a_thread(threads):
    release = threading.Event()
    first = ThreadJob(threads, lambda limit: release.wait(PATIENT_S), deadline_s=PATIENT_S)

    with pytest.raises(errors.TransferError, match="other jobs were ahead of it"):
        await ThreadJob(threads, lambda limit: None, deadline_s=0.05).outcome

    release.set()
    await first.outcome


async def test_result_of_a_stopped_job_is_discarded(threads):
    begun, release, discarded = threading.Event(), threading.Event(), []

    def work(limit):
        begun.set()
        release.wait(PATIENT_S)
        return "a route"

    job = ThreadJob(threads, work, deadline_s=PATIENT_S, discard=discarded.append)
    await asyncio.to_thread(begun.wait, PATIENT_S)
    job.outcome.cancel()
    await asyncio.sleep(0)  # its callbacks
    release.set()
    await job.stop()

    assert discarded == ["a route"]


@pytest.mark.parametrize("deadline_s", [0, -1, math.nan, math.inf, MAX_DEADLINE_S + 1])
def test_deadline_is_a_bounded_time(deadline_s):
    with pytest.raises(errors.LocalProtocolError, match="deadline_s"):
        TimeLimit(deadline_s)


def test_remaining_time_shrinks_and_then_raises():
    limit = TimeLimit(1e-9)

    with pytest.raises(errors.TransferError, match="not complete within 1e-09 s"):
        limit.remaining_s()


def test_cancel_interrupts_a_wait_and_forbids_the_next():
    limit, interrupted = TimeLimit(10), []

    with limit.interruptible(lambda: interrupted.append(True)):
        limit.cancel()

    assert interrupted == [True]
    with pytest.raises(errors.TransferError, match="cancelled"):
        limit.remaining_s()
    with pytest.raises(errors.TransferError, match="cancelled"), limit.interruptible(print):
        pytest.fail("it was entered")


def test_cancel_after_the_wait_interrupts_nothing():
    limit, interrupted = TimeLimit(10), []
    with limit.interruptible(lambda: interrupted.append(True)):
        pass

    limit.cancel()

    assert interrupted == []
