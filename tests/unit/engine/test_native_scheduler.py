"""The scheduler against a runner that computes nothing: a token depends on what lies before it, and on nothing else."""

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.engine.native import scheduler as schedulers
from dynamo.engine.native.scheduler import Scheduler, SchedulerLimits
from dynamo.engine.native.sequence import Paging, Sampled, Sequence
from dynamo.protocols import blocks, generate

VOCABULARY = 5000


def make_request(request_id, prompt, *, n=1, priority=0, eos=(), **conditions):
    return generate.Request(
        id=request_id,
        model="m",
        token_ids=blocks.pack(prompt),
        stop_conditions=generate.StopConditions(**conditions),
        sampling_options=generate.SamplingOptions(n=n),
        priority=priority,
        eos_token_ids=eos,
    )


def next_token(token_ids, index=0):
    return xxhash.xxh3_64_intdigest(blocks.pack([*token_ids, index])) % VOCABULARY


def answer(prompt, length, index=0):
    token_ids = list(prompt)
    for _ in range(length):
        token_ids.append(next_token(token_ids, index))
    return token_ids[len(prompt) :]


class Engine:
    """Steps a scheduler and checks every chunk on the way."""

    def __init__(self, num_blocks=64, block_size=4, budget=16, seqs=8, context=None, caching=True):
        self.budget, self.seqs, self.block_size = budget, seqs, block_size
        capacity = num_blocks * block_size
        self.paging = Paging(num_blocks=num_blocks, block_size=block_size, prefix_caching=caching)
        self.scheduler = Scheduler(
            self.paging,
            SchedulerLimits(
                max_num_seqs=seqs,
                max_num_batched_tokens=budget,
                context_length=min(context or capacity, capacity),
            ),
        )
        self.outputs = {}  # (request id, index) -> tokens
        self.finished = {}  # (request id, index) -> the last output
        self.cached = {}
        self.ended = []
        self.content = {}  # (block, slot) -> the tokens up to it: what the KV cache would hold

    def submit(self, *args, **kwargs):
        self.scheduler.submit(make_request(*args, **kwargs))

    def compute(self, chunk):
        """Write to the cache what the chunk computes; what lies before it must be there."""
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        for position in range(end):
            slot = (sequence.block_ids[position // self.block_size], position % self.block_size)
            prefix = tuple(sequence.token_ids[: position + 1])
            if position >= chunk.start:
                self.content[slot] = prefix
            assert self.content[slot] == prefix
        if chunk.samples:
            return Sampled(token_id=next_token(sequence.token_ids, sequence.index))
        return None

    def step(self):
        chunks = self.scheduler.schedule()
        assert chunks
        assert sum(chunk.num_tokens for chunk in chunks) <= self.budget
        assert len({chunk.sequence for chunk in chunks}) == len(chunks) <= self.seqs
        result = self.scheduler.commit(chunks, [self.compute(chunk) for chunk in chunks])
        for request, output, _ in result.outputs:
            key = (request.id, output.index)
            assert key not in self.finished
            self.outputs.setdefault(key, []).extend(output.token_ids)
            if output.cached_tokens is not None:
                assert request.id not in self.cached
                self.cached[request.id] = output.cached_tokens
            if output.finish_reason is not None:
                self.finished[key] = output
        self.ended += result.ended
        return chunks, result

    def run(self):
        while self.scheduler.has_work:
            self.step()


def chunk_sizes(chunks):
    return {chunk.sequence.request.id: chunk.num_tokens for chunk in chunks}


def test_a_long_prompt_is_cut_to_the_budget():
    engine = Engine(budget=16)
    engine.submit("a", range(1, 41), max_tokens=2)
    sizes = [chunk_sizes(engine.step()[0])["a"] for _ in range(4)]

    assert sizes == [16, 16, 8, 1]
    assert engine.outputs["a", 0] == answer(range(1, 41), 2)


def test_decoding_sequences_do_not_wait_for_a_prompt():
    engine = Engine(budget=16)
    engine.submit("a", [1, 2, 3], max_tokens=9)
    engine.step()
    engine.submit("b", range(1, 41), max_tokens=1)

    assert [chunk_sizes(engine.step()[0]) for _ in range(3)] == [
        {"a": 1, "b": 15},
        {"a": 1, "b": 15},
        {"a": 1, "b": 10},
    ]


def test_a_higher_priority_is_served_first():
    engine = Engine(seqs=1)
    engine.submit("low", [1], max_tokens=1)
    engine.submit("high", [2], max_tokens=1, priority=5)
    engine.run()

    assert list(engine.finished) == [("high", 0), ("low", 0)]


def test_a_cached_prefix_is_not_computed_again():
    engine = Engine(block_size=4)
    engine.submit("a", range(10), max_tokens=1)
    engine.run()
    engine.submit("b", range(10), max_tokens=1)
    chunks, _ = engine.step()

    assert chunk_sizes(chunks) == {"b": 2}
    assert engine.cached == {"a": 0, "b": 8}
    assert engine.outputs["b", 0] == engine.outputs["a", 0]


def test_the_last_prompt_token_is_always_computed():
    engine = Engine(block_size=4)
    engine.submit("a", range(8), max_tokens=1)
    engine.run()
    engine.submit("b", range(8), max_tokens=1)
    engine.run()

    assert engine.cached["b"] == 4


def test_without_prefix_caching_there_are_no_hits_and_no_events():
    engine = Engine(caching=False)
    engine.submit("a", range(8), max_tokens=1)
    _, result = engine.step()
    engine.submit("b", range(8), max_tokens=1)
    engine.run()

    assert engine.cached["b"] == 0
    assert result.block_events == []


def test_choices_share_the_blocks_of_their_prompt():
    engine = Engine(block_size=4, budget=64)
    engine.submit("a", range(9), n=3, max_tokens=2)
    first, _ = engine.step()
    second, _ = engine.step()

    assert [chunk.num_tokens for chunk in first] == [9]
    assert [(chunk.sequence.index, chunk.num_tokens) for chunk in second] == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]
    assert engine.paging.pool.num_active == 2 + 2  # the first choice has ended
    engine.run()
    assert engine.outputs == {("a", i): answer(range(9), 2, i) for i in range(3)}
    assert engine.cached == {"a": 0}


def test_the_newest_sequence_is_preempted_and_its_answer_is_unchanged():
    engine = Engine(num_blocks=6, block_size=4, budget=16)
    engine.submit("old", range(8), max_tokens=12)
    engine.submit("new", range(20, 28), max_tokens=12)
    engine.run()

    assert engine.outputs == {
        ("old", 0): answer(range(8), 12),
        ("new", 0): answer(range(20, 28), 12),
    }
    assert list(engine.finished) == [("old", 0), ("new", 0)]
    assert engine.cached == {"old": 0, "new": 0}


def test_abort_frees_blocks_and_ends_outputs():
    engine = Engine()
    engine.submit("a", range(10), n=2, max_tokens=5)
    engine.submit("b", range(30, 40), max_tokens=5)
    engine.step()
    aborted = engine.scheduler.abort("a")
    engine.run()

    assert [(s.request.id, s.index) for s in aborted] == [("a", 0), ("a", 1)]
    assert list(engine.finished) == [("b", 0)]
    assert engine.paging.pool.num_active == 0
    assert engine.scheduler.abort("a") == []


def test_an_error_fails_only_its_request():
    engine = Engine(budget=64)
    engine.submit("bad", range(9), n=2, max_tokens=5)
    engine.submit("good", range(30, 40), max_tokens=1)
    engine.step()
    chunks = engine.scheduler.schedule()
    error = errors.EngineFailed("no token can be drawn")
    result = engine.scheduler.commit(chunks, [error] * len(chunks))

    assert [(f.request.id, f.error) for f in result.failed] == [("bad", error)]
    assert [s.index for s in result.ended] == [0, 1]
    assert result.outputs == []
    assert engine.paging.pool.num_active == 0
    assert not engine.scheduler.has_work


def finish(**conditions):
    engine = Engine(context=12)
    engine.submit("a", [1, 2, 3], **conditions)
    engine.run()
    last = engine.finished["a", 0]
    return engine.outputs["a", 0], last.finish_reason, last.stop_reason


ANSWER = answer([1, 2, 3], 9)


def test_max_tokens_ends_a_choice():
    assert finish(max_tokens=4) == (ANSWER[:4], generate.FinishReason.LENGTH, None)


def test_the_context_ends_a_choice():
    assert finish() == (ANSWER, generate.FinishReason.LENGTH, None)


def test_the_models_end_token_ends_a_choice():
    assert finish(eos=(ANSWER[2],)) == (ANSWER[:3], generate.FinishReason.EOS, None)


def test_ignore_eos_ignores_the_end_token():
    assert finish(eos=(ANSWER[2],), ignore_eos=True)[1] == generate.FinishReason.LENGTH


def test_a_stop_token_ends_a_choice_and_is_the_stop_reason():
    stopped = finish(stop_token_ids=(ANSWER[1],), ignore_eos=True)

    assert stopped == (ANSWER[:2], generate.FinishReason.STOP, ANSWER[1])


def test_no_token_ends_a_choice_before_min_tokens():
    kept = finish(stop_token_ids=(ANSWER[1],), eos=(ANSWER[2],), min_tokens=4)

    assert kept == (ANSWER, generate.FinishReason.LENGTH, None)


def test_load_counts_sequences_and_blocks():
    engine = Engine(num_blocks=64, block_size=4, seqs=2, budget=64)
    engine.submit("a", range(10), max_tokens=5)
    engine.submit("b", range(10, 20), max_tokens=5)
    engine.submit("c", range(20, 30), max_tokens=5)
    engine.step()
    load = engine.scheduler.load()

    assert (load.worker_stats.request_active_slots, load.worker_stats.num_requests_waiting) == (
        2,
        1,
    )
    assert (load.kv_stats.kv_active_blocks, load.kv_stats.kv_total_blocks) == (6, 64)
    assert load.worker_stats.active_prefill_tokens == 10  # of the one that waits


def test_load_counts_uncomputed_tokens_of_begun_prompts():
    engine = Engine(num_blocks=64, block_size=4, seqs=2, budget=8)
    engine.submit("a", range(10), max_tokens=5)
    engine.submit("b", range(10, 20), max_tokens=5)
    left = []
    for _ in range(4):
        engine.step()
        left.append(engine.scheduler.load().worker_stats.active_prefill_tokens)

    assert left == [12, 4, 0, 0]


def test_load_is_known_without_a_look_at_the_sequences_that_wait(monkeypatch):
    engine, looks = Engine(), []
    for number in range(10):
        engine.submit(str(number), range(20), max_tokens=1, n=100)
    monkeypatch.setattr(schedulers, "_num_uncomputed", looks.append)

    assert engine.scheduler.load().worker_stats.active_prefill_tokens == 20_000
    assert looks == []


def test_choice_that_waits_is_aborted_without_a_look_at_the_others(monkeypatch):
    engine, looks = Engine(), []
    for number in range(10):
        engine.submit(str(number), range(20), max_tokens=1, n=100)
    monkeypatch.setattr(Sequence, "__eq__", lambda *both: looks.append(both))
    engine.scheduler.abort("5")

    assert engine.scheduler.load().worker_stats.num_requests_waiting == 900
    assert looks == []


def test_clear_drops_prefixes_and_running_requests_go_on():
    engine = Engine()
    engine.submit("a", range(10), max_tokens=9)
    engine.step()
    events = engine.scheduler.clear().block_events
    engine.submit("b", range(10), max_tokens=1)
    engine.run()

    assert [type(event).__name__ for event in events] == ["Cleared"]
    assert engine.cached["b"] == 0
    assert engine.outputs["a", 0] == answer(range(10), 9)


def test_prompt_that_was_begun_before_a_clear_is_not_found_after_it():
    engine = Engine(budget=2)
    engine.submit("a", range(10), max_tokens=1)
    engine.step()  # half of a block
    engine.scheduler.clear()
    engine.run()
    engine.submit("b", range(10), max_tokens=1)
    engine.run()

    assert engine.cached["b"] == 0


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=18),
        "max_tokens": st.integers(1, 12),
        "n": st.integers(1, 3),
        "priority": st.integers(0, 1),
        "arrives_at": st.integers(0, 20),
        "aborted_at": st.none() | st.integers(0, 30),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    plan=st.lists(requests, max_size=10),
    num_blocks=st.integers(1, 12),
    seqs=st.integers(3, 5),
    budget=st.integers(5, 20),
    caching=st.booleans(),
)
def test_every_sequence_gets_its_answer_under_random_operations(
    plan, num_blocks, seqs, budget, caching
):
    """`Engine` checks the budget and the content of every block on the way."""
    engine = Engine(num_blocks=num_blocks, budget=budget, seqs=seqs, caching=caching)
    capacity = num_blocks * engine.block_size
    plan = {str(i): spec for i, spec in enumerate(plan) if len(spec["prompt"]) < capacity}
    aborted = set()
    for now in range(40):
        for request_id, spec in plan.items():
            if spec["arrives_at"] == now:
                options = {k: spec[k] for k in ("max_tokens", "n", "priority")}
                engine.submit(request_id, spec["prompt"], **options)
            if spec["aborted_at"] == now:
                aborted |= {s.request.id for s in engine.scheduler.abort(request_id)}
        if engine.scheduler.has_work:
            engine.step()
    engine.run()
    expected = {
        (request_id, index): answer(
            spec["prompt"], min(spec["max_tokens"], capacity - len(spec["prompt"])), index
        )
        for request_id, spec in plan.items()
        if request_id not in aborted
        for index in range(spec["n"])
    }

    got = {key: tokens for key, tokens in engine.outputs.items() if key[0] not in aborted}
    assert got == expected
    assert engine.paging.pool.num_active == 0
    assert engine.scheduler.load().worker_stats.num_requests_waiting == 0
    assert engine.scheduler.load().worker_stats.active_prefill_tokens == 0
