"""Leases and imports of one pool, as a scheduler sees them."""

import dataclasses
import math

import pytest

import kv_params
from dynamo.kvbm import pool as pools
from dynamo.kvbm import sharing
from dynamo.protocols import generate, kv_transfer

SIZE = 4
LOGPROBS = generate.TokenLogprobs(-0.5)


def request(*, n=1, logprobs=None, prompt_logprobs=None):
    return generate.Request(
        id="r",
        model="m",
        token_ids=b"",
        sampling_options=generate.SamplingOptions(n=n),
        output_options=generate.OutputOptions(logprobs=logprobs, prompt_logprobs=prompt_logprobs),
    )


@dataclasses.dataclass
class Sequence:
    block_ids: list
    num_tokens: int
    num_computed: int = 0
    remote: kv_transfer.RemoteBlocks | None = None
    request: generate.Request = dataclasses.field(default_factory=request)


def remote(num_blocks):
    return kv_params.at_remote(remote_block_ids=tuple(range(100, 100 + num_blocks))).remote


def shared(num_blocks=16, **options):
    pool = pools.BlockPool(num_blocks)
    return pool, sharing.SharedBlocks(pool, SIZE, **options)


def test_import_copies_the_blocks_that_the_cache_lacks():
    _, blocks = shared(first_block=50)
    sequence = Sequence([3, 4, 5], num_tokens=10, num_computed=4, remote=remote(3))

    assert blocks.begin_import(sequence)
    (kv_import,) = blocks.take_imports()
    assert (kv_import.local_blocks, kv_import.remote_blocks) == ((54, 55), (101, 102))
    assert kv_import.num_tokens == 5  # all but the last, and those that are known


def test_ended_import_returns_its_sequence_once():
    _, blocks = shared()
    sequence = Sequence([3], num_tokens=4, remote=remote(1))
    blocks.begin_import(sequence)
    (kv_import,) = blocks.take_imports()

    assert blocks.end_import(kv_import.import_id, is_copied=True) is sequence
    assert blocks.end_import(kv_import.import_id, is_copied=True) is None


def test_sequence_imports_only_once():
    _, blocks = shared()
    sequence = Sequence([3], num_tokens=4, remote=remote(1))
    blocks.begin_import(sequence)

    assert not blocks.begin_import(sequence)
    assert len(blocks.take_imports()) == 1


@pytest.mark.parametrize(
    "sequence",
    [
        Sequence([1, 2], num_tokens=8, num_computed=7, remote=remote(2), request=request(prompt_logprobs=0)),
        Sequence([1, 2], num_tokens=8, remote=remote(1)),
    ],
    ids=["prompt to be scored", "too few remote blocks"],
)  # fmt: skip
def test_useless_blocks_are_not_copied_but_their_lease_is_released(sequence):
    _, blocks = shared()

    assert not blocks.begin_import(sequence)
    (kv_import,) = blocks.take_imports()
    assert kv_import.local_blocks == kv_import.remote_blocks == ()


def test_leased_blocks_outlive_their_sequence_until_the_lease_is_released():
    pool, blocks = shared()
    ids = pool.allocate(3)
    lease = blocks.lease_blocks(ids)
    pool.release(ids)
    during = pool.num_active
    blocks.release_lease(lease.lease_id)
    blocks.release_lease(lease.lease_id)

    assert (during, pool.num_active) == (3, 0)


def test_pools_of_one_region_share_ids_and_give_positions_in_the_region():
    ids = iter(range(1, 9))
    (first_pool, first), (second_pool, second) = (
        shared(first_block=start, ids=ids) for start in (0, 16)
    )
    leases = [
        first.lease_blocks(first_pool.allocate(1)),
        second.lease_blocks(second_pool.allocate(1)),
    ]

    assert leases == [(1, (0,), False), (2, (16,), False)]


@pytest.mark.parametrize(
    ("made", "has_logprobs", "is_used"),
    [
        (request(), False, True),
        (request(logprobs=1), True, True),
        (request(), True, False),
        (request(logprobs=1), False, False),
        (request(n=2), False, False),
        (request(prompt_logprobs=0), False, False),
    ],
)
def test_first_token_is_used_if_it_has_all_that_was_requested(made, has_logprobs, is_used):
    first = kv_transfer.FirstToken(4, LOGPROBS if has_logprobs else None)
    source = kv_params.at_remote(first_token=first).remote

    assert sharing.usable_first_token(made, source) == (first if is_used else None)


def test_without_a_first_token_none_is_used():
    assert sharing.usable_first_token(request(), remote(1)) is None
    assert sharing.usable_first_token(request(), None) is None


@pytest.mark.parametrize(
    ("copy_limit_s", "is_prefix", "limit_s"),
    [(None, False, math.inf), (0.2, False, 1.0), (3.0, False, 3.0), (0.2, True, 0.2)],
)
def test_copy_of_a_whole_prompt_is_borne_for_a_while_in_any_case(copy_limit_s, is_prefix, limit_s):
    _, blocks = shared()
    source = kv_params.at_remote(copy_limit_s=copy_limit_s, is_prefix=is_prefix).remote
    blocks.begin_import(Sequence([3], num_tokens=4, remote=source))
    (kv_import,) = blocks.take_imports()

    assert kv_import.limit_s(patience_s=1.0) == limit_s


MB = 2**20


def test_probe_is_small_and_as_quick_as_the_copy_that_failed():
    record = sharing.LinkRecord()
    assert record.due_probe is None
    record.note_failed_copy(16 * MB, 32.0)

    assert record.due_probe == (MB // 4, 0.5)
    record.note_passed_probe()
    assert record.due_probe is None


def test_probe_of_a_short_prompt_is_the_whole_copy_and_has_time_on_a_busy_machine():
    record = sharing.LinkRecord()
    record.note_failed_copy(1000, 0.001)

    assert record.due_probe == (1000, 0.2)


def test_probes_grow_while_copies_fail_after_them_and_shrink_after_a_copy():
    record, sizes = sharing.LinkRecord(), []
    for _ in range(4):
        record.note_failed_copy(64 * MB, 1.0)
        sizes.append(record.due_probe.num_bytes)
        record.note_failed_copy(64 * MB, 1.0)  # another one that ran beside the first
        record.note_passed_probe()
    record.note_copy()
    record.note_failed_copy(64 * MB, 1.0)

    assert sizes == [MB // 4, MB, 4 * MB, 4 * MB]
    assert record.due_probe.num_bytes == MB // 4
