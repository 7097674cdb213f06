"""The simulated engine's steps, without time."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.engine.mock.answers import TokenCycle
from dynamo.engine.mock.batch import BatchLimits, MockBatch
from dynamo.engine.mock.memory import MockChoice, MockMemory
from dynamo.protocols import blocks, generate

WORDS = tuple(range(1000, 1007))


def make_batch(
    num_blocks=64, block_size=4, seqs=8, budget=16, context=10**6, caching=True, **limits
):
    cycle = TokenCycle(WORDS)
    memory = MockMemory(num_blocks=num_blocks, block_size=block_size, prefix_caching=caching)
    limits = BatchLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        context_length=min(context, num_blocks * block_size),
        **limits,
    )
    return MockBatch(cycle, memory, limits)


def make_request(request_id, prompt, *, n=1, logprobs=None, eos=(), **conditions):
    return generate.Request(
        id=request_id,
        model="m",
        token_ids=blocks.pack(prompt),
        stop_conditions=generate.StopConditions(**conditions),
        sampling_options=generate.SamplingOptions(n=n),
        output_options=generate.OutputOptions(logprobs=logprobs),
        eos_token_ids=eos,
    )


def run(batch):
    outputs = {}
    while batch.has_work:
        plan = batch.schedule()
        assert plan.num_prompt_tokens or plan.num_decoding
        for request_id, output in batch.commit():
            outputs.setdefault((request_id, output.index), []).append(output)
    return outputs


def test_prompt_takes_as_many_steps_as_its_chunks():
    batch = make_batch(budget=16)
    batch.submit(make_request("a", range(40), max_tokens=2))
    plans = []
    while batch.has_work:
        plans.append(batch.schedule())
        batch.commit()

    assert [(plan.num_prompt_tokens, plan.num_decoding) for plan in plans] == [
        (16, 0),
        (16, 0),
        (8, 0),
        (0, 1),
    ]


def test_answer_repeats_the_cycle_from_a_position_set_by_the_prompt():
    batch = make_batch()
    batch.submit(make_request("a", [1], max_tokens=9))
    batch.submit(make_request("b", [1], max_tokens=9))
    batch.submit(make_request("c", [2, 2], max_tokens=9))
    tokens = {key[0]: [o.token_ids[0] for o in outputs] for key, outputs in run(batch).items()}
    start = WORDS.index(tokens["a"][0])

    assert tokens["a"] == [WORDS[(start + i) % 7] for i in range(9)]
    assert tokens["b"] == tokens["a"]
    assert sorted(set(tokens["c"])) == list(WORDS)


@pytest.mark.parametrize(
    ("conditions", "tokens", "reason"),
    [
        ({}, [5, 6, 7, 2], generate.FinishReason.EOS),
        ({"max_tokens": 2}, [5, 6], generate.FinishReason.LENGTH),
    ],
)
def test_echo_answers_with_the_prompt_and_a_token_that_ends_it(conditions, tokens, reason):
    batch = make_batch(echoes=True)
    batch.submit(make_request("a", [5, 6, 7], eos=(2, 3), **conditions))
    outputs = run(batch)["a", 0]

    assert [output.token_ids[0] for output in outputs] == tokens
    assert outputs[-1].finish_reason is reason


def test_echo_of_a_resumed_answer_continues_the_prompt():
    batch = make_batch(echoes=True)
    resumed = msgspec.structs.replace(make_request("a", [5, 6, 7, 5], eos=(2,)), num_resumed=1)
    batch.submit(resumed)

    assert [output.token_ids[0] for output in run(batch)["a", 0]] == [6, 7, 2]


def test_all_tokens_are_equally_likely():
    batch = make_batch()
    batch.submit(make_request("a", [1], max_tokens=1, logprobs=2))
    (entry,) = run(batch)["a", 0][0].logprobs

    assert entry.logprob == pytest.approx(-1.9459, abs=1e-4)
    assert [top.token_id for top in entry.top] == [1000, 1001]


@pytest.mark.parametrize(
    ("preempts_newest", "order"), [(True, ["old", "new"]), (False, ["new", "old"])]
)
def test_newest_choice_is_preempted_when_blocks_run_out_and_the_oldest_in_fifo_mode(
    preempts_newest, order
):
    batch = make_batch(num_blocks=6, budget=16, preempts_newest=preempts_newest)
    batch.submit(make_request("old", range(8), max_tokens=12))
    batch.submit(make_request("new", range(20, 28), max_tokens=12))
    ended = []
    while batch.has_work:
        batch.schedule()
        ended += [item.request_id for item in batch.commit() if item.output.finish_reason]

    assert ended == order


def test_unchunked_prompt_waits_for_a_step_with_room():
    batch = make_batch(budget=16, chunked_prefill=False)
    batch.submit(make_request("a", range(10), max_tokens=2))
    batch.submit(make_request("b", range(20, 30), max_tokens=2))
    plans = []
    while batch.has_work:
        plan = batch.schedule()
        plans.append((plan.num_prompt_tokens, plan.num_decoding))
        batch.commit()

    assert plans == [(10, 0), (10, 1), (0, 1)]


def test_cached_part_of_an_unchunked_prompt_needs_no_room():
    batch = make_batch(budget=16, chunked_prefill=False)
    batch.submit(make_request("warm", range(14), max_tokens=1))
    run(batch)
    batch.submit(make_request("a", range(12, 24), max_tokens=1))
    batch.submit(make_request("b", range(14), max_tokens=1))

    assert batch.schedule().num_prompt_tokens == 12 + 2


def test_choices_of_a_request_share_its_prompt():
    batch = make_batch(budget=64)
    batch.submit(make_request("a", range(9), n=3, max_tokens=3))
    plans = []
    while batch.has_work:
        plans.append(batch.schedule().num_prompt_tokens)
        batch.commit()

    assert plans == [9 + 1 + 1, 0, 0]


def test_equal_prompts_of_one_step_are_computed_once():
    batch = make_batch(budget=64)
    batch.submit(make_request("a", range(10), max_tokens=1))
    batch.submit(make_request("b", range(10), max_tokens=1))

    assert batch.schedule().num_prompt_tokens == 10 + 2
    assert [item.output.cached_tokens for item in batch.commit()] == [0, 8]


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=18),
        "max_tokens": st.integers(1, 12),
        "n": st.integers(1, 3),
        "arrives_at": st.integers(0, 20),
        "aborted_at": st.none() | st.integers(0, 30),
    }
)


@settings(max_examples=250, deadline=None)
@given(
    plan=st.lists(requests, max_size=10),
    num_blocks=st.integers(1, 12),
    seqs=st.integers(3, 5),
    budget=st.integers(5, 20),
    caching=st.booleans(),
    chunked=st.booleans(),
    newest=st.booleans(),
)
def test_every_choice_gets_its_answer_after_any_history(
    plan, num_blocks, seqs, budget, caching, chunked, newest
):
    capacity = num_blocks * 4 if chunked else min(num_blocks * 4, budget)
    batch = make_batch(
        num_blocks=num_blocks,
        seqs=seqs,
        budget=budget,
        context=capacity,
        caching=caching,
        chunked_prefill=chunked,
        preempts_newest=newest,
    )
    plan = {str(i): spec for i, spec in enumerate(plan) if len(spec["prompt"]) < capacity}
    aborted, outputs, now = set(), {}, 0
    while now <= 30 or batch.has_work:
        step = batch.schedule()
        assert step.num_prompt_tokens + step.num_decoding <= budget
        for request_id, spec in plan.items():  # requests come and go in the middle of a step
            if spec["arrives_at"] == now:
                options = {key: spec[key] for key in ("max_tokens", "n")}
                batch.submit(make_request(request_id, spec["prompt"], **options))
            if spec["aborted_at"] == now and request_id in batch:
                batch.abort(request_id)
                aborted.add(request_id)
        for request_id, output in batch.commit():
            assert request_id not in aborted
            outputs.setdefault((request_id, output.index), []).append(output)
        now += 1
    ended = {key: got for key, got in outputs.items() if key[0] not in aborted}
    lengths = {
        (request_id, index): min(spec["max_tokens"], capacity - len(spec["prompt"]))
        for request_id, spec in plan.items()
        if request_id not in aborted
        for index in range(spec["n"])
    }

    assert {key: len(got) for key, got in ended.items()} == lengths
    for got in ended.values():
        places = [WORDS.index(output.token_ids[0]) for output in got]
        assert places == [(places[0] + i) % 7 for i in range(len(places))]
        assert [bool(o.finish_reason) for o in got] == [False] * (len(got) - 1) + [True]
    assert batch.load().kv_stats.kv_active_blocks == 0
    assert batch.load().worker_stats.num_requests_waiting == 0


def test_load_counts_prompt_tokens_to_compute():
    batch = make_batch(budget=16)
    batch.submit(make_request("a", range(40), max_tokens=2))
    batch.submit(make_request("b", range(100, 110), max_tokens=2))
    left = [batch.load().worker_stats.active_prefill_tokens]
    while batch.has_work:
        batch.schedule()
        batch.commit()
        left.append(batch.load().worker_stats.active_prefill_tokens)

    assert left[:3] == [50, 34, 18]
    assert left[-1] == 0


def test_choice_that_waits_is_aborted_without_a_look_at_the_others(monkeypatch):
    batch, looks = make_batch(), []
    for number in range(10):
        batch.submit(make_request(str(number), range(8), n=100, max_tokens=1))
    monkeypatch.setattr(MockChoice, "__eq__", lambda *both: looks.append(both))
    batch.abort("5")

    assert batch.load().worker_stats.num_requests_waiting == 900
    assert looks == []


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_resumed_answer_continues_at_its_position(cut):
    batch = make_batch()
    batch.submit(make_request("a", [1, 2, 3], n=2, max_tokens=9))
    whole = [output.token_ids[0] for output in run(batch)["a", 1]]
    resumed = msgspec.structs.replace(
        make_request("b", [1, 2, 3, *whole[:cut]], max_tokens=9 - cut),
        num_resumed=cut,
        first_choice=1,
    )
    batch.submit(resumed)

    assert [output.token_ids[0] for output in run(batch)["b", 0]] == whole[cut:]
