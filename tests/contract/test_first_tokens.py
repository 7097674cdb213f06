"""An answer that begins with the token that was drawn where its prompt was computed is the answer of one engine.

Two engines of one process, native ones with the built-in model, or simulated ones; each request is asked of both, as
`disagg` asks.
"""

import asyncio

import msgspec
import pytest
from test_remote_prefill import Side, pair, prompt

import kv_params
from dynamo.base import errors
from dynamo.disagg import prefill_queue
from dynamo.protocols import blocks, generate, kv_transfer
from waiting import PATIENT_S


@pytest.fixture(autouse=True, params=["native", "mocker"])
def kind(request, monkeypatch):
    monkeypatch.setattr(Side, "kind", request.param)
    return request.param


def make(request_id, *, length=100, sampling=None, output=None, eos=(), **conditions):
    conditions = {"max_tokens": 8, "ignore_eos": True} | conditions
    return generate.Request(
        id=request_id,
        model="m",
        token_ids=blocks.pack(prompt(length)),
        stop_conditions=generate.StopConditions(**conditions),
        sampling_options=generate.SamplingOptions(**({"temperature": 0.0} | (sampling or {}))),
        output_options=generate.OutputOptions(**(output or {})),
        eos_token_ids=eos,
    )


class Recorder:
    """All outputs of a request, beside what its side's sink does with them."""

    def __init__(self, side, request_id):
        self.heard, self._id = [], request_id
        self._pass_on = side.sink.outputs
        side.sink.outputs = self.outputs

    def outputs(self, batch):
        self.heard += [item.output for item in batch if item.request_id == self._id]
        self._pass_on(batch)


async def ask(side, request):
    """Its outputs."""
    recorder = Recorder(side, request.id)
    side.sink.begin(request.id)
    side.engine.submit(request)
    async with asyncio.timeout(PATIENT_S):
        await side.sink.ends[request.id]
    return recorder.heard


async def prefilled(left, request):
    asked = prefill_queue.make_prefill_request(
        msgspec.structs.replace(request, id=f"p {request.id}")
    )
    (only,) = await ask(left, asked)
    return msgspec.structs.replace(request, kv_transfer_params=only.kv_transfer_params)


def told(outputs):
    return (
        [token for output in outputs for token in output.token_ids],
        [logprobs.top for output in outputs for logprobs in output.logprobs or ()],
        outputs[-1].finish_reason,
        outputs[-1].stop_reason,
    )


WAYS = {
    "greedy": {},
    "seeded": {"sampling": {"temperature": 1.0, "seed": 3}},
    "cut": {"sampling": {"temperature": 0.9, "seed": 4, "top_k": 20, "top_p": 0.9}},
    "penalties": {"sampling": {"presence_penalty": 1.5, "repetition_penalty": 1.3}},
    "bias": {"sampling": {"logit_bias": {77: 100.0}}},
    "one token": {"max_tokens": 1},
    "a whole block": {"length": 96},
    "one prompt token": {"length": 1},
}
GRAMMAR = {
    "sampling": {"guided_decoding": generate.GuidedDecoding(regex="[a-z]{3,9}")},
    "eos": (2,),
    "ignore_eos": False,
    "max_tokens": 30,
}
native_only = pytest.mark.parametrize("kind", ["native"], indirect=True)


@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
async def test_answer_is_the_same_with_the_first_token_of_the_prefill(fields):
    await check_first_token(fields)


@native_only
async def test_answer_in_a_grammar_is_the_same_with_the_first_token_of_the_prefill(kind):
    await check_first_token(GRAMMAR)


async def check_first_token(fields):
    async with pair() as (left, right):
        request = make("r", **fields)
        expected = await ask(left, request)
        handed = await prefilled(left, request)
        there = await ask(right, handed)

        assert handed.kv_transfer_params.remote.first_token.token_id == expected[0].token_ids[0]
        assert told(there) == told(expected)
        await left.until_idle()
        await right.until_idle()


async def test_logprobs_come_with_the_token():
    async with pair() as (left, right):
        request = make("r", output={"logprobs": 2})
        expected = await ask(left, request)
        there = await ask(right, await prefilled(left, request))

        assert [o.logprobs[0].logprob for o in there] == pytest.approx(
            [o.logprobs[0].logprob for o in expected], abs=1e-4
        )
        assert [len(output.logprobs[0].top) for output in there] == [2] * 8


async def test_cached_tokens_are_those_of_the_prefill_worker():
    async with pair() as (left, right):
        first = await ask(right, await prefilled(left, make("a")))
        again = await ask(right, await prefilled(left, make("b")))

        assert [output.cached_tokens for output in first] == [0] + [None] * 7
        assert [output.cached_tokens for output in again] == [96] + [None] * 7


async def test_first_token_may_be_the_last(kind):
    async with pair() as (left, right):
        (first, *_) = (await ask(left, make("a")))[0].token_ids
        eos = make("b", eos=(first,), ignore_eos=False)
        stop = make("c", stop_token_ids=(first,))
        not_yet = make("d", stop_token_ids=(first,), min_tokens=2)
        answers = [await ask(right, await prefilled(left, one)) for one in (eos, stop, not_yet)]

        assert [told(answer)[2:] for answer in answers[:2]] == [("eos", None), ("stop", first)]
        if kind == "native":  # the simulated engine has but one token for each place
            assert first not in told(answers[2])[0][:1]
        assert told(answers[2])[0] == told(await ask(left, not_yet))[0]
        assert [report.num_blocks for report in right.reports] == [0, 0, 7]  # nothing to copy
        await left.until_idle()
        await right.until_idle()


async def test_first_token_is_sent_before_the_copy_has_ended():
    async with pair() as (left, right):
        handed = await prefilled(left, make("r"))
        is_told = []
        recorder = Recorder(right, "r")
        right.engine.on_import(lambda report: is_told.append(len(recorder.heard)))
        right.sink.begin("r")
        right.engine.submit(handed)
        await asyncio.wait_for(right.sink.ends["r"], PATIENT_S)

        assert is_told == [1]


async def test_first_token_stays_when_the_copy_fails():
    async with pair(kv_transfer_backends=("tcp",)) as (left, right):
        expected = await ask(left, make("r"))
        handed = await prefilled(left, make("r"))
        await left.engine.stop()
        there = await ask(right, handed)

        assert told(there) == told(expected)
        assert right.reports[0].error is not None


@native_only
async def test_first_token_outside_the_vocabulary_is_refused(kind):
    async with pair() as (left, right):
        handed = await prefilled(left, make("r"))
        first = kv_transfer.FirstToken(10**6)
        wrong = kv_params.with_remote(handed.kv_transfer_params, first_token=first)

        with pytest.raises(errors.RemoteProtocolError, match="first token"):
            right.engine.submit(msgspec.structs.replace(handed, kv_transfer_params=wrong))
        await left.until_idle()


async def test_leases_of_a_leaving_engine_are_read_to_the_end():
    async with pair() as (left, right):
        expected = await ask(left, make("r"))
        handed = await prefilled(left, make("r"))
        await right.engine.disconnect_peer(right.source)
        stopping = asyncio.create_task(left.engine.wait_until_released())
        there = await ask(right, handed)
        await asyncio.wait_for(stopping, PATIENT_S)

        assert told(there) == told(expected)
        assert [report.error for report in right.reports] == [None]
        await left.until_idle()


@pytest.mark.parametrize("is_whole", [True, False], ids=["request", "choice"])
async def test_blocks_are_free_when_an_answer_is_aborted_at_any_point(is_whole):
    async with pair() as (left, right):
        abort = right.engine.abort if is_whole else lambda name: right.engine.abort_choice(name, 0)
        for i in range(12):
            handed = await prefilled(left, make("r"))
            recorder = Recorder(right, "r")
            right.sink.begin("r")
            right.engine.submit(handed)
            for _ in range(i):
                await asyncio.sleep(0)
            num_heard = len(recorder.heard)
            abort("r")
            await asyncio.sleep(0)

            assert len(recorder.heard) == num_heard
        await left.until_idle()
        await right.until_idle()
