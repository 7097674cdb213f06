"""Imports and leases in the native scheduler: sequences that wait for a copy, and blocks kept for one."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native_scheduler import Engine, answer, make_request, next_token

import kv_params
from dynamo.kvbm import tiered_cache, tiers
from dynamo.protocols import blocks, kv_events, kv_transfer


def place(num_blocks, first=None):
    return kv_params.at_remote(
        first_token=None if first is None else kv_transfer.FirstToken(first),
        remote_block_ids=tuple(range(100, 100 + num_blocks)),
    )


class Pulling(Engine):
    """As `Engine`, with copies that the test ends."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.imports = []

    def submit_with(self, params, *args, **kwargs):
        request = make_request(*args, **kwargs)
        self.scheduler.submit(msgspec.structs.replace(request, kv_transfer_params=params))

    def submit_remote(self, request_id, prompt, *, has_token=False, **kwargs):
        """With its first token, which is told by then."""
        first = next_token(list(prompt)) if has_token else None
        if has_token:
            self.outputs[request_id, 0] = [first]
        params = place(-(-len(prompt) // self.block_size), first)
        self.submit_with(params, request_id, prompt, **kwargs)

    def step(self):
        chunks = self.scheduler.schedule()
        self.imports += self.scheduler.take_imports()
        result = self.scheduler.commit(chunks, [self.compute(chunk) for chunk in chunks])
        for request, output, lease in result.outputs:
            self.outputs.setdefault((request.id, output.index), []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finished[request.id, output.index] = output
                self.lease = lease
        return chunks

    def end(self, kv_import, *, is_copied):
        """Write what the peer holds, as the copy would."""
        prompt = make_prompt(kv_import)
        if is_copied:
            is_whole = kv_import.remote.first_token is not None
            need = -(-(len(prompt) - (not is_whole)) // self.block_size)
            for i, block in enumerate(kv_import.local_blocks, need - len(kv_import.local_blocks)):
                for slot in range(self.block_size):
                    end = i * self.block_size + slot + 1
                    self.content[block, slot] = tuple(prompt[:end])
        self.scheduler.end_import(kv_import.import_id, is_copied=is_copied)


def make_prompt(kv_import):
    return blocks.unpack(kv_import.request.token_ids)


def test_other_sequences_go_on_while_a_prompt_is_imported():
    engine = Pulling()
    engine.submit("a", [1], max_tokens=50)
    engine.submit_remote("b", range(20), max_tokens=2)
    sizes = [{c.sequence.request.id: c.num_tokens for c in engine.step()} for _ in range(5)]

    assert sizes == [{"a": 1}] * 5
    assert [len(kv_import.local_blocks) for kv_import in engine.imports] == [5]
    assert engine.scheduler.load().worker_stats.num_requests_waiting == 1


def test_last_token_of_an_imported_prompt_is_computed():
    engine = Pulling()
    engine.submit_remote("a", range(20), max_tokens=3)
    assert not engine.step()
    assert not engine.scheduler.has_work
    engine.end(engine.imports[0], is_copied=True)
    (chunk,) = engine.step()
    engine.run()

    assert (chunk.start, chunk.num_tokens) == (19, 1)
    assert engine.outputs["a", 0] == answer(range(20), 3)


def test_prompt_with_a_first_token_is_imported_whole_and_that_token_is_computed():
    engine = Pulling()
    engine.submit_remote("a", range(20), has_token=True, max_tokens=3)
    engine.step()
    (kv_import,) = engine.imports
    engine.end(kv_import, is_copied=True)
    (chunk,) = engine.step()
    engine.run()

    assert kv_import.num_tokens == 20
    assert (chunk.start, chunk.num_tokens) == (20, 1)
    assert engine.outputs["a", 0] == answer(range(20), 3)


def test_blocks_of_several_choices_are_imported_though_the_first_is_aborted_while_it_waits():
    """Else its lease at the other engine would last until its time is over."""
    engine = Pulling()
    engine.submit_with(place(5), "a", range(20), n=3, max_tokens=2)
    engine.scheduler.abort_choice("a", 0)
    engine.step()
    (kv_import,) = engine.imports
    engine.end(kv_import, is_copied=False)
    engine.run()

    assert [len(engine.outputs["a", index]) for index in (1, 2)] == [2, 2]


def test_several_choices_ignore_the_first_token():
    engine = Pulling()
    engine.submit_with(place(5, first=99), "a", range(20), n=2, max_tokens=2)
    engine.step()
    engine.end(engine.imports[0], is_copied=False)
    engine.run()

    assert engine.outputs["a", 0] == answer(range(20), 2)
    assert engine.outputs["a", 1] == answer(range(20), 2, 1)


def test_prompt_of_a_failed_import_is_computed():
    engine = Pulling()
    engine.submit_remote("a", range(20), max_tokens=3)
    engine.step()
    engine.end(engine.imports[0], is_copied=False)
    engine.run()

    assert engine.outputs["a", 0] == answer(range(20), 3)


def test_only_uncached_blocks_are_imported():
    engine = Pulling()
    engine.submit("a", range(8), max_tokens=1)
    engine.run()
    engine.submit_remote("b", range(20), max_tokens=1)
    engine.submit_remote("c", range(9), max_tokens=1)
    engine.step()

    assert [kv_import.remote_blocks for kv_import in engine.imports] == [(102, 103, 104), ()]
    assert ("c", 0) in engine.finished


def test_blocks_of_an_aborted_sequence_stay_allocated_until_its_import_ends():
    engine = Pulling()
    engine.submit_remote("a", range(20), max_tokens=1)
    engine.step()
    engine.scheduler.abort("a")
    during = engine.paging.pool.num_active
    engine.submit_remote("a", range(50, 70), max_tokens=1)  # the id is in use again
    engine.end(engine.imports[0], is_copied=True)
    engine.step()
    engine.end(engine.imports[1], is_copied=True)
    engine.run()

    assert during == 5
    assert engine.outputs["a", 0] == answer(range(50, 70), 1)
    assert engine.paging.pool.num_active == 0


def test_leased_blocks_stay_allocated_until_the_lease_is_released():
    engine = Pulling()
    engine.submit_with(kv_transfer.PREFILL_ONLY, "a", range(10), max_tokens=1)
    engine.run()
    active = engine.paging.pool.num_active
    engine.scheduler.release_lease(engine.lease.lease_id)
    engine.scheduler.release_lease(engine.lease.lease_id)

    assert len(engine.lease.block_ids) == active == 3
    assert engine.paging.pool.num_active == 0


def test_sequence_that_waits_for_leased_blocks_runs_when_they_are_released():
    engine = Pulling(num_blocks=4)
    engine.submit_with(kv_transfer.PREFILL_ONLY, "a", range(16), max_tokens=1)
    engine.step()
    engine.submit("b", range(20, 34), max_tokens=1)
    assert not engine.step()
    engine.scheduler.release_lease(engine.lease.lease_id)
    engine.run()

    assert engine.outputs["b", 0] == answer(range(20, 34), 1)


remote_requests = st.fixed_dictionaries(
    {
        "prompt": st.integers(0, 2).flatmap(
            lambda head: st.integers(1, 20).map(lambda n: [head] * 6 + list(range(n)))
        ),
        "max_tokens": st.integers(1, 8),
        "n": st.integers(1, 2),
        "arrives_at": st.integers(0, 10),
        "aborted_at": st.none() | st.integers(0, 14),
        "copy_takes": st.integers(0, 6),
        "is_copied": st.booleans(),
        "is_remote": st.booleans(),
        "has_token": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    plan=st.lists(remote_requests, max_size=8),
    num_blocks=st.integers(8, 16),
    seqs=st.integers(2, 5),
    caching=st.booleans(),
)
def test_every_answer_comes_however_its_import_ends(plan, num_blocks, seqs, caching):
    engine = Pulling(num_blocks=num_blocks, seqs=seqs, caching=caching)
    aborted, ends_at = set(), {}
    for now in range(200):
        for i, spec in enumerate(plan):
            if spec["arrives_at"] == now:
                fields = {"max_tokens": spec["max_tokens"], "n": spec["n"]}
                if spec["is_remote"]:
                    may_begin = spec["n"] == 1 < spec["max_tokens"]  # else it is over, or unused
                    fields["has_token"] = spec["has_token"] and may_begin
                submit = engine.submit_remote if spec["is_remote"] else engine.submit
                submit(str(i), spec["prompt"], **fields)
            if spec["aborted_at"] == now:
                aborted |= {s.request.id for s in engine.scheduler.abort(str(i))}
        engine.step()
        for kv_import in engine.imports:
            spec = plan[int(kv_import.request.id)]
            if ends_at.setdefault(kv_import.import_id, now + spec["copy_takes"]) == now:
                engine.end(kv_import, is_copied=spec["is_copied"])
    expected = {
        (str(i), index): answer(
            spec["prompt"], min(spec["max_tokens"], 4 * num_blocks - len(spec["prompt"])), index
        )
        for i, spec in enumerate(plan)
        if str(i) not in aborted
        for index in range(spec["n"])
    }

    assert {key: got for key, got in engine.outputs.items() if key[0] not in aborted} == expected
    assert engine.paging.pool.num_active == 0
    assert not engine.scheduler.has_work


def test_prefix_that_is_loaded_for_another_worker_is_no_hit_of_a_prompt_here():
    engine = Pulling(num_blocks=16)
    pool = engine.paging.pool
    engine.paging.tiers = cache = tiered_cache.TieredCache(
        pool, tiers.Tier(kv_events.HOST, 16, pool.events), None, block_size=4, block_bytes=8
    )

    def settle():
        while copies := cache.take_copies():
            for copy in copies:
                engine.scheduler.end_tier_copy(copy, seconds=0.001)

    engine.submit("a", range(22), max_tokens=2)
    engine.run()
    settle()
    pool.release(pool.allocate(16))  # and so evicts all
    engine.submit_with(kv_transfer.EXPORT_CACHED, "x", range(22), max_tokens=1)
    settle()
    (answered,) = engine.scheduler.take_exports().outputs

    assert answered.output.cached_tokens == 20
    assert engine.scheduler.load().kv_stats.gpu_prefix_cache_hit_rate == 0.0
