"""The suite of tests that every `api.Engine` passes. A test module for an engine imports all of it.

Such a module (`test_engine.py`, `test_engine_vllm.py`) has the fixtures `make_engine` (called without arguments, an
engine that has not started) and `break_down` (called with an engine, it lets the engine die and returns the reason that
the sink should receive, as a regular expression). Where a start is expensive, a `host` of its own takes the place of
the one here: a `Host` with an idle engine and an empty prefix cache.
"""

import asyncio
import collections

import pytest

from dynamo.base import errors
from dynamo.protocols import blocks, generate, kv_events, model_errors
from waiting import PATIENT_S

WORDS = tuple(range(100, 150))


class Sink:
    """Records what an engine sends, and wakes the tests that wait for it."""

    def __init__(self):
        self.batches = []
        self.errors = {}
        self.events = []
        self.events_by_rank = collections.defaultdict(list)
        self.deaths = []
        self._changed = asyncio.Event()

    def outputs(self, batch):
        assert batch
        self.batches.append(list(batch))
        self._changed.set()

    def failed(self, request_id, error):
        self.errors[request_id] = error
        self._changed.set()

    def kv_events(self, events, dp_rank=0):
        assert events
        self.events += events
        self.events_by_rank[dp_rank] += events
        self._changed.set()

    def died(self, error):
        self.deaths.append(error)
        self._changed.set()

    def of(self, request_id, index=0):
        return [
            item.output
            for batch in self.batches
            for item in batch
            if item.request_id == request_id and item.output.index == index
        ]

    def tokens(self, request_id, index=0):
        return [token for output in self.of(request_id, index) for token in output.token_ids]

    async def until(self, condition):
        async with asyncio.timeout(PATIENT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_ended(self, request_id, n=1):
        await self.until(lambda: all(self.has_ended(request_id, i) for i in range(n)))

    def has_ended(self, request_id, index=0):
        outputs = self.of(request_id, index)
        return bool(outputs) and outputs[-1].finish_reason is not None


class Host:
    """An engine that has started, and its sink."""

    def __init__(self, engine, sink, facts):
        self.engine, self.sink, self.facts = engine, sink, facts

    def submit(
        self,
        request_id,
        prompt,
        *,
        n=1,
        eos=(),
        logprobs=None,
        scores=None,
        seed=0,
        salt=None,
        **conditions,
    ):
        self.engine.submit(
            generate.Request(
                id=request_id,
                model="m",
                token_ids=blocks.pack(prompt),
                stop_conditions=generate.StopConditions(**conditions),
                sampling_options=generate.SamplingOptions(n=n, temperature=0.0, seed=seed),
                output_options=generate.OutputOptions(logprobs=logprobs, prompt_logprobs=scores),
                eos_token_ids=eos,
                cache_salt=salt,
            )
        )

    async def answer(self, request_id, prompt, **options):
        self.submit(request_id, prompt, **options)
        await self.sink.until_ended(request_id)
        return self.sink.tokens(request_id)

    @property
    def is_idle(self):
        return not any(
            load.kv_stats.kv_active_blocks or load.worker_stats.num_requests_waiting
            for load in self.engine.load()
        )

    async def until_idle(self):
        async with asyncio.timeout(PATIENT_S):
            while not self.is_idle:
                await asyncio.sleep(0)

    @property
    def num_running(self):
        return sum(load.worker_stats.request_active_slots for load in self.engine.load())


PROMPT = list(range(3, 43))


@pytest.fixture
async def host(make_engine):
    engine, sink = make_engine(), Sink()
    yield Host(engine, sink, await engine.start(sink))
    await engine.stop()

    assert not sink.deaths


async def test_an_answer_has_max_tokens_tokens(host):
    tokens = await host.answer("a", PROMPT, max_tokens=20)
    outputs = host.sink.of("a")

    assert len(tokens) == 20
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == generate.FinishReason.LENGTH


async def test_equal_requests_get_equal_answers_alone_and_together(host):
    alone = await host.answer("alone", PROMPT, max_tokens=12)
    for i in range(6):
        host.submit(f"{i}", PROMPT, max_tokens=12)
    for i in range(6):
        await host.sink.until_ended(f"{i}")

    assert [host.sink.tokens(f"{i}") for i in range(6)] == [alone] * 6


async def test_cached_tokens_are_reported_once_with_the_first_output(host):
    prompt = range(3, 3 + host.facts.kv_block_size * 5 // 2)
    await host.answer("a", prompt, max_tokens=3)
    await host.answer("b", prompt, max_tokens=3)
    told = [output.cached_tokens for output in host.sink.of("a") + host.sink.of("b")]

    assert [cached for cached in told if cached is not None] == [0, 2 * host.facts.kv_block_size]
    assert host.sink.of("a")[0].cached_tokens == 0
    assert host.sink.of("b")[0].cached_tokens == 2 * host.facts.kv_block_size


async def test_the_models_end_token_ends_an_answer(host):
    tokens = await host.answer("free", PROMPT, max_tokens=9)
    ended = await host.answer("a", PROMPT, max_tokens=9, eos=(tokens[4],))

    assert ended == tokens[: tokens.index(tokens[4]) + 1]
    assert host.sink.of("a")[-1].finish_reason == generate.FinishReason.EOS
    assert host.sink.of("a")[-1].stop_reason is None


async def test_ignore_eos_ignores_the_end_token(host):
    tokens = await host.answer("free", PROMPT, max_tokens=9)
    ended = await host.answer("a", PROMPT, max_tokens=9, eos=(tokens[4],), ignore_eos=True)

    assert ended == tokens


async def test_a_stop_token_ends_an_answer_and_is_the_stop_reason(host):
    tokens = await host.answer("free", PROMPT, max_tokens=9)
    ended = await host.answer("a", PROMPT, max_tokens=9, stop_token_ids=(tokens[4],))
    last = host.sink.of("a")[-1]

    assert ended == tokens[: tokens.index(tokens[4]) + 1]
    assert (last.finish_reason, last.stop_reason) == (generate.FinishReason.STOP, tokens[4])


async def test_no_answer_ends_before_min_tokens(host):
    tokens = await host.answer("free", PROMPT, max_tokens=9)
    ended = await host.answer(
        "a", PROMPT, max_tokens=9, min_tokens=6, stop_token_ids=tuple(set(tokens))
    )

    assert 6 <= len(ended) <= 9


async def test_an_answer_ends_at_the_context_length(host):
    prompt = [5 + i % 40 for i in range(500)]
    tokens = await host.answer("a", prompt)

    assert len(tokens) == 12
    assert host.sink.of("a")[-1].finish_reason == generate.FinishReason.LENGTH


async def test_an_answer_of_another_worker_is_resumed(host):
    whole = await host.answer("a", [1, 2, 3], max_tokens=12)
    request = generate.Request(
        id="b",
        model="m",
        token_ids=blocks.pack([1, 2, 3, *whole[:5]]),
        num_resumed=5,
        stop_conditions=generate.StopConditions(max_tokens=7),
        sampling_options=generate.SamplingOptions(temperature=0.0),
    )
    host.engine.submit(request)
    await host.sink.until_ended("b")

    assert host.sink.tokens("b") == whole[5:]


async def test_every_choice_gets_an_answer(host):
    host.submit("a", PROMPT, n=3, max_tokens=5)
    await host.sink.until_ended("a", n=3)
    told = [output.cached_tokens for i in range(3) for output in host.sink.of("a", i)]

    assert [len(host.sink.tokens("a", i)) for i in range(3)] == [5, 5, 5]
    assert [cached for cached in told if cached is not None] == [0]


async def test_more_choices_than_may_run_at_once_are_queued(host):
    host.submit("a", PROMPT, n=20, max_tokens=3)
    await host.sink.until_ended("a", n=20)
    await host.until_idle()

    assert {len(host.sink.tokens("a", i)) for i in range(20)} == {3}


async def test_more_requests_than_slots_and_blocks_are_all_answered(host):
    for i in range(40):
        host.submit(f"{i}", [i + 3, *PROMPT], max_tokens=60)
    for i in range(40):
        await host.sink.until_ended(f"{i}")
    await host.until_idle()

    assert {len(host.sink.tokens(f"{i}")) for i in range(40)} == {60}


async def test_logprobs_come_with_each_token(host):
    await host.answer("a", PROMPT, max_tokens=3, logprobs=2)
    entries = [entry for output in host.sink.of("a") for entry in output.logprobs]

    assert len(entries) == 3
    for entry in entries:
        assert len(entry.top) == 2
        assert entry.top[1].logprob <= entry.top[0].logprob <= 0
        assert entry.logprob <= entry.top[0].logprob


async def test_outputs_have_no_logprobs_unless_requested(host):
    await host.answer("a", PROMPT, max_tokens=3)

    assert {output.logprobs for output in host.sink.of("a")} == {None}


async def test_prompt_logprobs_are_reported_once_even_for_a_cached_prefix(host):
    prompt = WORDS + WORDS[:40]  # more than a step computes
    await host.answer("warm", prompt, max_tokens=1)
    host.submit("a", prompt, n=2, scores=3, max_tokens=2)
    await host.sink.until_ended("a", n=2)
    first, *rest = host.sink.of("a") + host.sink.of("a", 1)

    assert len(first.prompt_logprobs) == len(prompt) - 1
    assert all(len(one.top) == 3 and one.logprob <= 0 for one in first.prompt_logprobs)
    assert not any(output.prompt_logprobs for output in rest)


async def test_a_prompt_of_one_token_has_no_logprobs(host):
    await host.answer("a", (100,), scores=0, max_tokens=1)

    assert host.sink.of("a")[0].prompt_logprobs == ()


async def test_an_aborted_request_sends_no_outputs_and_frees_its_blocks(host):
    host.submit("a", PROMPT, n=2)
    await host.sink.until(lambda: len(host.sink.of("a")) > 2)
    host.engine.abort("a")
    num_batches = len(host.sink.batches)
    await host.until_idle()
    await host.answer("b", PROMPT, max_tokens=3)
    later = [item.request_id for batch in host.sink.batches[num_batches:] for item in batch]

    assert set(later) == {"b"}
    assert host.num_running == 0


async def test_an_aborted_choice_sends_no_outputs_and_the_others_go_on(host):
    host.submit("a", WORDS[:20], n=3, max_tokens=30)
    await host.sink.until(lambda: host.sink.of("a", 1))
    host.engine.abort_choice("a", 1)
    seen = len(host.sink.of("a", 1))
    await host.sink.until(lambda: host.sink.has_ended("a") and host.sink.has_ended("a", 2))
    await host.until_idle()

    assert len(host.sink.of("a", 1)) == seen < 30
    assert len(host.sink.tokens("a")) == len(host.sink.tokens("a", 2)) == 30


async def test_the_first_choice_may_be_aborted_before_its_first_output(host):
    host.submit("a", WORDS[:20], n=3, max_tokens=3)
    host.engine.abort_choice("a", 0)
    await host.sink.until(lambda: host.sink.has_ended("a", 1) and host.sink.has_ended("a", 2))

    assert host.sink.of("a") == []


async def test_a_request_ends_when_all_its_choices_are_aborted(host):
    host.submit("a", WORDS[:20], n=2, max_tokens=1000)
    for index in (0, 1, 1, 7):
        host.engine.abort_choice("a", index)
    host.engine.abort_choice("unknown", 0)
    await host.answer("a", WORDS[:20], max_tokens=2)
    await host.until_idle()

    assert len(host.sink.tokens("a")) == 2


async def test_aborting_an_unknown_or_ended_request_is_no_error(host):
    host.engine.abort("never seen")
    await host.answer("a", PROMPT, max_tokens=1)
    host.engine.abort("a")

    assert len(await host.answer("b", PROMPT, max_tokens=2)) == 2


async def test_many_aborted_requests_leave_no_blocks(host):
    for i in range(100):
        host.submit(f"{i}", [i, *PROMPT], n=1 + i % 3)
        if i % 4 == 0:
            await host.sink.until(lambda i=i: host.sink.of(f"{i}"))
        host.engine.abort(f"{i}")
    await host.until_idle()

    assert len(await host.answer("last", PROMPT, max_tokens=3)) == 3


async def test_a_prompt_as_long_as_the_context_is_refused_with_the_numbers(host):
    with pytest.raises(
        model_errors.ContextTooLong, match=r"512 tokens; at most 511.*context of 512"
    ):
        host.submit("a", [5] * 512)


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ([], {}, "prompt"),
        ([5], {"max_tokens": 0}, "max_tokens"),
        ([5], {"n": 0}, "n"),
        ([5], {"n": 1025}, "n"),
        ([5], {"logprobs": 21}, "logprobs"),
        ([5], {"seed": 2**64}, "seed"),
    ],
)
async def test_an_invalid_request_is_refused_with_the_fields_name(host, prompt, options, param):
    with pytest.raises(errors.InvalidRequest) as refusal:
        host.submit("a", prompt, **options)

    assert refusal.value.param == param
    assert len(await host.answer("a", PROMPT, max_tokens=2)) == 2


async def test_a_request_id_in_use_is_refused(host):
    host.submit("a", PROMPT, max_tokens=50)
    with pytest.raises(errors.InvalidRequest, match="'a' runs already"):
        host.submit("a", PROMPT)
    await host.sink.until_ended("a")

    assert len(host.sink.tokens("a")) == 50


def replay(events, known=()):
    """What is known after these events, by a naive model that knows no order but that of a chain."""
    known = dict(known)
    for event in events:
        match event:
            case kv_events.Stored():
                assert event.parent_hash is None or event.parent_hash in known
                for block in event.blocks:
                    assert block.block_hash not in known
                    known[block.block_hash] = block.tokens_hash
            case kv_events.Removed():
                for name in event.block_hashes:
                    del known[name]
            case kv_events.Cleared():
                known = {}
    return known


async def test_kv_events_store_the_blocks_of_prompt_and_answer(host):
    tokens = PROMPT + await host.answer("a", PROMPT, max_tokens=30)
    local = blocks.local_hashes(blocks.pack(tokens[:-1]), host.facts.kv_block_size)
    names = blocks.sequence_hashes(local)
    await host.sink.until(lambda: len(replay(host.sink.events)) == len(names))

    assert replay(host.sink.events) == dict(zip(names, local, strict=True))


async def test_kv_events_never_store_more_blocks_than_the_pool_has(host):
    for i in range(30):
        await host.answer(f"{i}", [i + 3] * 60, max_tokens=20)
    removed = [event for event in host.sink.events if isinstance(event, kv_events.Removed)]

    assert removed
    assert len(replay(host.sink.events)) <= host.facts.total_kv_blocks


async def test_clearing_drops_prefixes_and_running_requests_go_on(host):
    expected = await host.answer("a", PROMPT, max_tokens=30)
    host.submit("b", PROMPT, max_tokens=30)
    await host.engine.clear_kv_blocks()
    await host.sink.until_ended("b")
    await host.engine.clear_kv_blocks()
    await host.answer("c", PROMPT, max_tokens=1)

    assert host.sink.tokens("b") == expected
    assert host.sink.of("c")[0].cached_tokens == 0


async def test_clearing_sends_a_cleared_event(host):
    await host.answer("a", PROMPT, max_tokens=1)
    await host.sink.until(lambda: replay(host.sink.events))
    await host.engine.clear_kv_blocks()
    await host.sink.until(lambda: not replay(host.sink.events))

    assert host.sink.events[-1] == kv_events.Cleared()


async def test_an_idle_engine_has_no_load(host):
    await host.answer("a", PROMPT, max_tokens=4)
    await host.until_idle()
    loads = host.engine.load()

    assert [load.worker_stats.data_parallel_rank for load in loads] == list(
        range(host.facts.data_parallel_size)
    )
    for load in loads:
        assert load.worker_stats.request_active_slots == 0
        assert load.worker_stats.num_requests_waiting == 0
        assert load.kv_stats.kv_total_blocks == host.facts.total_kv_blocks


async def test_stopping_drops_requests_without_an_error(make_engine):
    engine, sink = make_engine(), Sink()
    host = Host(engine, sink, await engine.start(sink))
    host.submit("a", PROMPT)
    await sink.until(lambda: sink.of("a"))
    await engine.stop()
    num_batches = len(sink.batches)
    await engine.stop()
    await asyncio.sleep(0)

    assert len(sink.batches) == num_batches
    assert not sink.has_ended("a")
    assert not sink.errors
    assert not sink.deaths


async def test_the_death_of_an_engine_is_reported_once(make_engine, break_down):
    engine, sink = make_engine(), Sink()
    host = Host(engine, sink, await engine.start(sink))
    reason = break_down(engine)
    host.submit("a", PROMPT)
    host.submit("b", PROMPT)
    await sink.until(lambda: sink.deaths)
    with pytest.raises(errors.EngineFailed, match=reason) as refusal:
        host.submit("c", PROMPT)
    await engine.clear_kv_blocks()
    await engine.stop()

    assert sink.deaths == [refusal.value]
    assert not sink.batches
