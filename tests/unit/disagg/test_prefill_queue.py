"""To whom prompts are given."""

import asyncio

import pytest

import kv_params
from dynamo.base import errors
from dynamo.disagg import prefill_queue
from dynamo.protocols import blocks, generate, model_errors

REQUEST = generate.Request(id="r", model="m", token_ids=blocks.pack([1, 2, 3]))
PARAMS = kv_params.at_remote()
DEADLINE_S = 5


class Stream:
    def __init__(self, worker):
        self.worker, self.is_cancelled = worker, False

    def cancel(self):
        self.is_cancelled = True


class Workers:
    """An endpoint client whose workers answer when they are told to."""

    def __init__(self, *ids):
        self.ids, self.asked, self.streams, self.num_retried = list(ids), [], [], 0
        self.queue = prefill_queue.DirectQueue(lambda: self.ids, self, self.retried)

    def retried(self):
        self.num_retried += 1

    def usable(self, among, tried=()):
        return [i for i in among if i not in tried]

    async def open(self, body, receiver, *, instance_id, timeout_s):
        self.asked.append((instance_id, receiver))
        self.streams.append(Stream(instance_id))
        return self.streams[-1]

    async def begin(self):
        """One more prompt, given to somebody."""
        num = len(self.asked)
        asking = asyncio.ensure_future(self.queue.prefill(REQUEST, timeout_s=DEADLINE_S))
        while len(self.asked) == num:
            await asyncio.sleep(0)
        return asking

    def answer(self, i):
        self.asked[i][1].receive(generate.Output((1,), kv_transfer_params=PARAMS))


async def test_a_prompt_goes_where_the_fewest_are():
    workers = Workers(1, 2)
    asking = [await workers.begin() for _ in range(3)]
    workers.answer(1)
    await asking[1]
    asking.append(await workers.begin())
    for i in (0, 2, 3):
        workers.answer(i)

    assert await asyncio.gather(*asking) == [PARAMS] * 4
    assert [worker for worker, _ in workers.asked] == [1, 2, 1, 2]
    assert all(stream.is_cancelled for stream in workers.streams)


async def test_its_size_is_what_waits_where_the_fewest_do():
    workers, sizes = Workers(1, 2), []
    sizes.append(Workers().queue.size)
    asking = []
    for _ in range(5):
        sizes.append(workers.queue.size)
        asking.append(await workers.begin())
    for i in range(5):
        workers.answer(i)
    await asyncio.gather(*asking)

    assert [*sizes, workers.queue.size] == [None, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("error", [errors.StreamBroken("x"), errors.Overloaded("x")])
async def test_a_prompt_whose_worker_fails_goes_to_another(error):
    workers = Workers(1, 2)
    asking = await workers.begin()
    workers.asked[0][1].ended(error)
    while len(workers.asked) < 2:
        await asyncio.sleep(0)
    workers.answer(1)

    assert await asking == PARAMS
    assert workers.num_retried == 1


async def test_a_prompt_that_fails_everywhere_says_why():
    workers = Workers(1)
    asking = await workers.begin()
    workers.asked[0][1].ended(errors.StreamBroken("it died"))

    with pytest.raises(errors.StreamBroken, match="it died"):
        await asking
    assert workers.queue.size == 0


async def test_a_prompt_that_no_worker_could_ever_compute_is_given_to_nobody_else():
    workers = Workers(1, 2)
    asking = await workers.begin()
    workers.asked[0][1].ended(model_errors.ContextTooLong("too long"))

    with pytest.raises(model_errors.ContextTooLong):
        await asking
    assert len(workers.asked) == 1


async def test_nobody_waits_longer_than_the_time_given():
    workers = Workers(1)

    with pytest.raises(errors.DeadlineExceeded, match=r"0\.01 s"):
        await workers.queue.prefill(REQUEST, timeout_s=0.01)
    assert workers.streams[0].is_cancelled


async def test_without_workers_there_is_nobody():
    with pytest.raises(errors.NoWorkers):
        await Workers().queue.prefill(REQUEST, timeout_s=1)


async def test_an_answer_that_does_not_say_where_the_blocks_are_is_none():
    workers = Workers(1)
    asking = await workers.begin()
    workers.asked[0][1].ended(None)

    with pytest.raises(errors.RemoteProtocolError):
        await asking
