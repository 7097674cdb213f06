"""The direct prefill queue, and the request and output of a remote prefill."""

import asyncio

import msgspec
import pytest

import kv_params
from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.disagg import prefill_queue
from dynamo.protocols import blocks, generate, kv_transfer, model_errors
from dynamo.testing import clock as virtual

REQUEST = generate.Request(id="r", model="m", token_ids=blocks.pack([1, 2, 3]))
PARAMS = kv_params.at_remote()
DEADLINE_S = 5


class Stream:
    def __init__(self, worker):
        self.worker, self.is_cancelled = worker, False

    def cancel(self):
        self.is_cancelled = True


class Workers:
    """An endpoint client whose workers answer when the test says so."""

    def __init__(self, *ids, clock=None, own_id=0):
        self.ids, self.asked, self.streams, self.num_retried = list(ids), [], [], 0
        self.queue = prefill_queue.DirectQueue(
            lambda: self.ids, self, clock or clocks.SystemClock(), self.retried, own_id=own_id
        )

    @property
    def instances(self):
        return self.ids

    def retried(self):
        self.num_retried += 1

    def usable(self, among, tried=()):
        return [i for i in among if i not in tried]

    async def open(self, body, receiver, *, instance_id, timeout_s, headers, gives_up_early):
        self.asked.append((instance_id, receiver))
        self.streams.append(Stream(instance_id))
        return self.streams[-1]

    async def begin(self):
        """One more prompt, given to a worker."""
        num = len(self.asked)
        asking = asyncio.ensure_future(self.queue.prefill(REQUEST, timeout_s=DEADLINE_S))
        while len(self.asked) == num:
            await asyncio.sleep(0)
        return asking

    def answer(self, i):
        self.asked[i][1].receive(generate.Output((1,), kv_transfer_params=PARAMS))


async def test_prompt_goes_to_the_worker_with_the_fewest():
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


@pytest.mark.parametrize(("own_id", "expected"), [(0, 10), (10, 20), (15, 20), (25, 30), (35, 10)])
async def test_decode_workers_prefer_different_workers_of_those_that_idle(own_id, expected):
    workers = Workers(10, 20, 30, own_id=own_id)
    for i in range(2):
        asking = await workers.begin()
        workers.answer(i)
        await asking

    assert [worker for worker, _ in workers.asked] == [expected, expected]


async def test_size_counts_the_waiting_prompts_of_the_least_loaded_worker():
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
async def test_prompt_of_a_failed_worker_goes_to_another(error):
    workers = Workers(1, 2)
    asking = await workers.begin()
    workers.asked[0][1].ended(error)
    while len(workers.asked) < 2:
        await asyncio.sleep(0)
    workers.answer(1)

    assert await asking == PARAMS
    assert workers.num_retried == 1


async def test_prompt_that_fails_everywhere_raises_the_last_error():
    workers = Workers(1)
    asking = await workers.begin()
    workers.asked[0][1].ended(errors.WorkerDied("it died"))

    with pytest.raises(errors.WorkerDied, match="it died"):
        await asking
    assert workers.queue.size == 0


async def test_prompt_with_which_two_workers_died_goes_to_no_third():
    workers = Workers(1, 2, 3)
    asking = await workers.begin()
    for i in range(2):
        workers.asked[i][1].ended(errors.WorkerDied("x"))
        while len(workers.asked) < 2:
            await asyncio.sleep(0)

    with pytest.raises(model_errors.SuspectRequest, match="2 workers died"):
        await asking
    assert len(workers.asked) == 2


async def test_impossible_prompt_goes_to_no_other_worker():
    workers = Workers(1, 2)
    asking = await workers.begin()
    workers.asked[0][1].ended(model_errors.ContextTooLong("too long"))

    with pytest.raises(model_errors.ContextTooLong):
        await asking
    assert len(workers.asked) == 1


async def test_prompt_fails_after_its_time_limit():
    workers = Workers(1)

    with pytest.raises(errors.DeadlineExceeded, match=r"0\.01 s"):
        await workers.queue.prefill(REQUEST, timeout_s=0.01)
    assert workers.streams[0].is_cancelled


async def test_hung_worker_gets_no_prompt_until_it_answers_a_probe():
    time = virtual.VirtualClock()
    workers = Workers(1, 2, clock=time)
    late = asyncio.ensure_future(workers.queue.prefill(REQUEST, timeout_s=DEADLINE_S))
    await time.advance(DEADLINE_S)
    with pytest.raises(errors.DeadlineExceeded):
        await late
    asking = [await workers.begin() for _ in range(2)]
    asked = [worker for worker, _ in workers.asked]
    probe = workers.asked[1][1]
    probe.ended(None)  # it answers, without blocks to give away
    await time.advance(prefill_queue.PAUSE_S)
    asking.append(await workers.begin())

    assert asked == [1, 1, 2, 2]  # the second time by a probe
    assert workers.asked[4][0] == 1
    for each in asking:
        each.cancel()
    await workers.queue.close()


async def test_silent_worker_gets_one_prompt_and_then_probes():
    workers = Workers(1, clock=virtual.VirtualClock())
    first = await workers.begin()
    workers.asked[0][1].ended(errors.StreamBroken("was silent for 3 s"))
    with pytest.raises(errors.StreamBroken):
        await first
    size_meanwhile = workers.queue.size
    workers.asked[1][1].ended(None)  # the probe is answered
    await asyncio.sleep(0)
    await workers.queue.close()

    assert size_meanwhile is None  # so that the next prompt is computed elsewhere at once
    assert [worker for worker, _ in workers.asked] == [1, 1]


async def test_probe_is_repeated_until_it_is_answered_or_the_worker_is_gone():
    time = virtual.VirtualClock()
    workers = Workers(1, clock=time)
    late = asyncio.ensure_future(workers.queue.prefill(REQUEST, timeout_s=DEADLINE_S))
    await time.advance(DEADLINE_S)
    assert isinstance(late.exception(), errors.DeadlineExceeded)
    for _ in range(3):
        await time.advance(prefill_queue.PROBE_S + prefill_queue.PAUSE_S)
    sizes, num_asked = [workers.queue.size], len(workers.asked)
    workers.ids.clear()
    await time.advance(prefill_queue.PROBE_S + prefill_queue.PAUSE_S)
    workers.ids.append(1)
    sizes.append(workers.queue.size)
    await workers.queue.close()

    assert num_asked == 5  # the prompt, and four probes
    assert sizes == [None, 0]


async def test_prompt_fails_without_workers():
    with pytest.raises(errors.NoWorkers):
        await Workers().queue.prefill(REQUEST, timeout_s=1)


async def test_output_without_parameters_is_an_error():
    workers = Workers(1)
    asking = await workers.begin()
    workers.asked[0][1].ended(None)

    with pytest.raises(errors.RemoteProtocolError):
        await asking


async def test_first_end_of_a_prefill_counts():
    receiver = prefill_queue.PrefillReceiver()
    receiver.receive(generate.Output((1,)))  # says nothing
    receiver.receive(generate.Output((1,), kv_transfer_params=PARAMS))
    receiver.ended(errors.WorkerLost("x"))
    receiver.give_up()

    assert await receiver.wait() == PARAMS


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda receiver: receiver.ended(None), errors.RemoteProtocolError),
        (lambda receiver: receiver.ended(errors.WorkerLost("x")), errors.WorkerLost),
        (lambda receiver: receiver.replied(b""), errors.RemoteProtocolError),
        (lambda receiver: receiver.give_up(), errors.Cancelled),
    ],
)
async def test_prefill_that_ends_without_parameters_raises(end, error):
    receiver = prefill_queue.PrefillReceiver()
    end(receiver)

    with pytest.raises(error):
        await receiver.wait()


FULL_REQUEST = generate.Request(
    id="r",
    model="m",
    token_ids=blocks.pack(range(9)),
    stop_conditions=generate.StopConditions(
        max_tokens=50, min_tokens=3, stop=("x",), stop_token_ids=(7,), ignore_eos=True
    ),
    sampling_options=generate.SamplingOptions(temperature=0.7, seed=3, presence_penalty=0.5),
    output_options=generate.OutputOptions(logprobs=2),
    eos_token_ids=(2,),
    thinking=generate.ThinkingLimit(max_tokens=5, close_ids=(4,)),
    annotations=("timing",),
    priority=1,
    num_resumed=2,
    first_choice=1,
)


def test_prefill_request_is_the_request_of_one_token():
    made = prefill_queue.make_prefill_request(FULL_REQUEST)

    expected = msgspec.structs.replace(
        FULL_REQUEST,
        stop_conditions=generate.StopConditions(
            max_tokens=1, min_tokens=1, stop_token_ids=(7,), ignore_eos=True
        ),
        annotations=(),
        kv_transfer_params=kv_transfer.PREFILL_WITH_TOKEN,
    )
    assert made == expected


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 0), (1, 1), (9, 1)])
def test_prefill_request_may_end_where_the_answer_may_end(min_tokens, expected):
    stops = generate.StopConditions(min_tokens=min_tokens)
    made = prefill_queue.make_prefill_request(
        msgspec.structs.replace(FULL_REQUEST, stop_conditions=stops)
    )

    assert made.stop_conditions.min_tokens == expected


def test_prefill_request_of_several_choices_asks_for_no_token():
    options = generate.SamplingOptions(n=2, temperature=0.7, seed=3)
    made = prefill_queue.make_prefill_request(
        msgspec.structs.replace(FULL_REQUEST, sampling_options=options)
    )

    assert made.kv_transfer_params == kv_transfer.PREFILL_ONLY
    assert made.sampling_options == generate.SamplingOptions(temperature=0.0)
    assert (made.token_ids, made.priority) == (FULL_REQUEST.token_ids, 1)
