import asyncio

import msgspec
import pytest
from worker_fakes import make_load

from dynamo.base import errors
from dynamo.protocols import generate
from dynamo.testing import clock
from dynamo.worker import health, inflight

CHECK = health.HealthCheck(wait_s=10, answer_s=3)


class Asked:
    """Takes questions, and answers as it is told."""

    def __init__(self):
        self.clock = clock.VirtualClock()
        self.calls, self.cancelled = [], []
        self.load = make_load(1)
        self.answer = lambda call: None
        self.is_occupied = False
        watched = health.Canary(
            self.handle,
            lambda: [self.load],
            CHECK,
            self.clock,
            is_occupied=lambda: self.is_occupied,
        )
        self.verdict = asyncio.ensure_future(watched.watch())

    def handle(self, call):
        self.calls.append(inflight.decode(call.body))
        call.on_cancel(lambda: self.cancelled.append(call))
        self.answer(call)


@pytest.fixture
async def asked():
    made = Asked()
    yield made
    made.verdict.cancel()


async def test_engine_that_does_not_answer_the_probe_counts_as_dead(asked):
    await asked.clock.advance(12.9)
    was_patient = not asked.verdict.done()
    await asked.clock.advance(0.2)

    assert was_patient
    assert isinstance(asked.verdict.result(), errors.EngineFailed)
    assert len(asked.cancelled) == 1


@pytest.mark.parametrize(
    "answer",
    [
        lambda call: call.send(generate.Output((1,), generate.FinishReason.LENGTH)),
        lambda call: call.fail(errors.Overloaded("full")),
        lambda call: call.finish(),
    ],
)
async def test_any_answer_to_the_probe_shows_a_live_engine(asked, answer):
    asked.answer = answer
    await asked.clock.advance(35)

    assert not asked.verdict.done()
    assert len(asked.calls) == 3


async def test_engine_with_progress_is_not_probed(asked):
    for number in range(10):
        asked.load = make_load(10 + number)
        await asked.clock.advance(5)

    assert not asked.calls


@pytest.mark.parametrize("begins_at", [9, 11])
async def test_engine_may_be_silent_while_it_reads_an_adapter(asked, begins_at):
    await asked.clock.advance(begins_at)
    asked.is_occupied = True
    await asked.clock.advance(100)
    was_alive = not asked.verdict.done()
    asked.is_occupied = False
    await asked.clock.advance(26)  # it stays silent

    assert was_alive
    assert isinstance(asked.verdict.result(), errors.EngineFailed)


async def test_engine_with_progress_during_the_probe_is_alive(asked):
    await asked.clock.advance(11)
    asked.load = make_load(7)
    await asked.clock.advance(5)

    assert len(asked.calls) == 1
    assert not asked.verdict.done()


def with_prompts(metrics, num_tokens):
    stats = msgspec.structs.replace(metrics.worker_stats, active_prefill_tokens=num_tokens)
    return msgspec.structs.replace(metrics, worker_stats=stats)


async def test_prompts_that_arrive_are_no_progress(asked):
    """A worker without another beside it gets requests though its engine hangs."""
    for number in range(14):
        asked.load = with_prompts(make_load(1), 100 * number)
        await asked.clock.advance(1)

    assert isinstance(asked.verdict.result(), errors.EngineFailed)


async def test_prompt_of_which_less_is_left_is_progress(asked):
    for number in range(40):
        asked.load = with_prompts(make_load(1), 10_000 - number)
        await asked.clock.advance(1)

    assert not asked.verdict.done()


async def test_abort_of_the_probe_is_no_progress(asked):
    """Engines count the prompt of a request that has not begun, and of vLLM no more once it is aborted."""

    def count(call):
        asked.load = make_load(2)
        call.on_cancel(lambda: setattr(asked, "load", make_load(1)))

    asked.answer = count
    await asked.clock.advance(13.1)

    assert isinstance(asked.verdict.result(), errors.EngineFailed)


async def test_probe_asks_for_one_token(asked):
    await asked.clock.advance(11)
    (question,) = asked.calls

    assert (question.prompt_len, question.stop_conditions.max_tokens) == (1, 1)
