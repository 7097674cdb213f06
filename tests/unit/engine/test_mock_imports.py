"""Imports and leases of the simulated engine, and what a wrong copy does."""

import random

import pytest

import kv_params
from dynamo.engine.mock.answers import TokenCycle
from dynamo.engine.mock.batch import BatchLimits, MockBatch
from dynamo.engine.mock.memory import MockMemory, SimulatedTiersConfig, make_cache
from dynamo.protocols import blocks, generate, kv_transfer

SIZE, NUM_BLOCKS = 4, 32
WORDS = tuple(range(1000, 1007))


class Engine:
    """A batch over memory in which blocks hold their names."""

    def __init__(self):
        cycle = TokenCycle(WORDS)
        self.memory = MockMemory(num_blocks=NUM_BLOCKS, block_size=SIZE, prefix_caching=True)
        self.names = memoryview(bytearray(8 * SIZE * NUM_BLOCKS)).cast("Q")
        self.memory.store_names(self.names, is_exported=True)
        limits = BatchLimits(max_num_seqs=8, max_num_batched_tokens=64, context_length=128)
        self.batch = MockBatch(cycle, self.memory, limits)

    def submit(self, request_id, prompt, params=None, max_tokens=4, n=1, first_token=None):
        self.batch.submit(
            generate.Request(
                id=request_id,
                model="m",
                token_ids=blocks.pack(prompt),
                stop_conditions=generate.StopConditions(max_tokens=max_tokens),
                sampling_options=generate.SamplingOptions(n=n),
                kv_transfer_params=params,
            ),
            first_token,
        )

    def run(self):
        """All outputs until nothing can be computed."""
        outputs = []
        while not self.batch.schedule().is_empty:
            outputs += [output for _, output in self.batch.commit()]
        return outputs

    def tokens(self):
        return [token for output in self.run() for token in output.token_ids]

    def prefill(self, prompt):
        """Where its blocks are."""
        self.submit("p", prompt, kv_transfer.PREFILL_ONLY, max_tokens=1)
        self.run()
        ((_, lease),) = self.batch.take_newly_leased().values()
        return kv_params.at_remote(remote_block_ids=lease.block_ids, remote_hold_id=lease.lease_id)

    def copy(self, source):
        """What begins is done at once; gives the copies, which have not ended."""
        imports = self.batch.take_imports()
        for kv_import in imports:
            for mine, theirs in zip(kv_import.local_blocks, kv_import.remote_blocks, strict=True):
                self.names[mine * SIZE] = source.names[theirs * SIZE]
        return imports


def prompt(length, seed=0):
    return random.Random(seed).choices(range(500), k=length)


def test_choice_takes_part_in_no_step_during_its_import():
    here, there = Engine(), Engine()
    there.submit("alone", prompt(22))
    expected = there.tokens()
    params = there.prefill(prompt(22))
    here.submit("r", prompt(22), params)
    before = here.run()
    (kv_import,) = here.copy(there)
    here.batch.end_import(kv_import.import_id, is_copied=True)
    plan = here.batch.schedule()

    assert before == []
    assert kv_import.num_tokens == 21
    assert plan.num_prompt_tokens == 1  # the last one
    assert [token for _, output in here.batch.commit() for token in output.token_ids] + (
        here.tokens()
    ) == expected


def test_prompt_of_a_failed_import_is_computed():
    here, there = Engine(), Engine()
    here.submit("r", prompt(22), there.prefill(prompt(22)))
    here.run()
    (kv_import,) = here.copy(there)
    here.batch.end_import(kv_import.import_id, is_copied=False)

    assert here.batch.schedule().num_prompt_tokens == 22


def test_import_of_overwritten_blocks_changes_the_answer():
    here, there = Engine(), Engine()
    params = there.prefill(prompt(22))
    there.batch.release_lease(params.remote.remote_hold_id)
    for seed in range(1, 9):  # others take all blocks
        there.submit(f"other {seed}", prompt(40, seed))
    there.run()
    here.submit("alone", prompt(22))
    expected = here.tokens()
    here.batch.clear()
    here.submit("r", prompt(22), params)
    here.run()
    (kv_import,) = here.copy(there)
    here.batch.end_import(kv_import.import_id, is_copied=True)

    assert here.tokens() != expected


def test_prefix_is_imported_beside_blocks_that_others_have_used():
    """Those are computed here, so what they held before is no sign of a wrong copy."""
    here, there = Engine(), Engine()
    params = there.prefill(prompt(22))
    there.submit("alone", prompt(22))
    expected = there.tokens()
    for seed in range(1, 9):  # others take all blocks
        here.submit(f"other {seed}", prompt(40, seed))
    here.run()
    block_ids = params.remote.remote_block_ids[:2]
    prefix = kv_params.with_remote(params, is_prefix=True, remote_block_ids=block_ids)
    here.submit("r", prompt(22), prefix)
    here.run()
    (kv_import,) = here.copy(there)
    here.batch.end_import(kv_import.import_id, is_copied=True)

    assert here.tokens() == expected


def test_first_token_fills_a_block_that_others_have_used_where_its_prompt_was_computed():
    here, there = Engine(), Engine()
    for seed in range(1, 9):  # others take all blocks
        there.submit(f"other {seed}", prompt(40, seed))
    there.run()
    params = there.prefill(prompt(23))
    here.submit("alone", prompt(23))
    first, *expected = here.tokens()
    here.batch.clear()
    token = kv_transfer.FirstToken(first)
    params = kv_params.with_remote(params, first_token=token)
    here.submit("r", prompt(23), params, first_token=token)
    here.run()
    (kv_import,) = here.copy(there)
    here.batch.end_import(kv_import.import_id, is_copied=True)

    assert here.tokens() == expected


def test_aborted_import_frees_its_blocks_when_the_copy_ends():
    here, there = Engine(), Engine()
    here.submit("r", prompt(22), there.prefill(prompt(22)))
    here.run()
    (kv_import,) = here.copy(there)
    here.batch.abort("r")
    during = here.memory.pool.num_active
    here.batch.end_import(kv_import.import_id, is_copied=True)

    assert during == 6
    assert here.memory.pool.num_active == 0
    assert here.run() == []


def test_blocks_of_several_choices_are_imported_though_the_first_is_aborted_while_it_waits():
    here, there = Engine(), Engine()
    here.submit("r", prompt(22), there.prefill(prompt(22)), n=3)
    here.batch.abort_choice("r", 0)
    here.run()
    (kv_import,) = here.copy(there)
    here.batch.end_import(kv_import.import_id, is_copied=True)

    assert len(here.tokens()) == 2 * 4


@pytest.mark.parametrize("abort", ["abort", "abort_choice"])
def test_blocks_are_free_when_a_request_for_them_is_aborted_before_its_answer_is_sent(abort):
    engine = Engine()
    engine.submit("first", prompt(22))
    engine.run()
    engine.submit("x", prompt(22), kv_transfer.EXPORT_CACHED, max_tokens=1)
    num_leased = engine.memory.pool.num_active
    getattr(engine.batch, abort)("x", *([0] if abort == "abort_choice" else []))

    assert num_leased == 5
    assert (engine.batch.take_outputs(), engine.batch.take_newly_leased()) == ([], {})
    assert engine.memory.pool.num_active == 0


def test_leased_blocks_are_free_after_release():
    there = Engine()
    params = there.prefill(prompt(22))
    during = there.memory.pool.num_active
    there.batch.release_lease(params.remote.remote_hold_id)
    there.batch.release_lease(params.remote.remote_hold_id)

    assert during == 6
    assert there.memory.pool.num_active == 0


def test_choices_wait_for_the_import_of_their_prompt():
    here, there = Engine(), Engine()
    params = there.prefill(prompt(22))
    here.batch.submit(
        generate.Request(
            id="r",
            model="m",
            token_ids=blocks.pack(prompt(22)),
            stop_conditions=generate.StopConditions(max_tokens=2),
            sampling_options=generate.SamplingOptions(n=3),
            kv_transfer_params=params,
        )
    )
    before = here.run()
    (kv_import,) = here.copy(there)
    here.batch.end_import(kv_import.import_id, is_copied=True)
    plan = here.batch.schedule()

    assert before == []
    assert (
        plan.num_prompt_tokens == 1 + 2 * 2
    )  # the last block, which is not full, is nobody else's


def test_prefix_that_is_loaded_for_another_worker_is_no_hit_of_a_prompt_here():
    engine = Engine()
    engine.memory.tiers = tiers = make_cache(
        engine.memory.pool,
        SimulatedTiersConfig(
            num_host_blocks=NUM_BLOCKS,
            num_disk_blocks=0,
            host_bytes_per_s=1e9,
            disk_bytes_per_s=1e9,
            block_size=SIZE,
            block_bytes=8,
        ),
    )

    def settle():
        while copies := tiers.take_copies():
            for copy in copies:
                engine.batch.end_tier_copy(copy, 0.001)

    engine.submit("a", prompt(22))
    engine.run()
    settle()
    pool = engine.memory.pool
    pool.release(pool.allocate(NUM_BLOCKS))  # and so evicts all
    engine.submit("x", prompt(22), kv_transfer.EXPORT_CACHED, max_tokens=1)
    settle()
    ((_, output),) = engine.batch.take_outputs()

    assert output.cached_tokens == 20
    assert engine.batch.load().kv_stats.gpu_prefix_cache_hit_rate == 0.0
