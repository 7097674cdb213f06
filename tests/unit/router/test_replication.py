"""Which prefixes are copied between workers, and from where: decisions over counts, without clocks."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocols import kv_transfer, model_card
from dynamo.router import replication
from dynamo.router.api import Prompt, Worker
from dynamo.router.worker_load import Capacity, PrefillSpeed, WorkerLoad

A, B, C = Worker(1), Worker(2), Worker(3)
PROMPT = Prompt(num_tokens=100, block_size=10, sequence_hashes=range(100, 110))


def card(*, weights="w", metadata="bWV0YQ==", exports=True):
    data = {kv_transfer.METADATA_KEY: metadata, kv_transfer.PREFIXES_KEY: exports}
    return model_card.ModelCard(
        display_name="m",
        source_path="m",
        context_length=1,
        kv_cache_block_size=10,
        weights=weights,
        runtime_config=model_card.ModelRuntimeConfig(runtime_data=data),
    )


def sources(**cards):
    made = replication.PrefixSources("n/c/e")
    made.set_model_cards({ord(name) - ord("a") + 1: each for name, each in cards.items()})
    return made


def test_worker_with_most_blocks_is_the_source():
    source = sources(a=card(), b=card(), c=card()).find_source(PROMPT, A, {A: 1, B: 4, C: 7})

    assert source == kv_transfer.PrefixSource(
        endpoint="n/c/e", instance_id=3, metadata=base64.b64decode("bWV0YQ=="), num_tokens=70
    )


@pytest.mark.parametrize(
    ("cards", "cached"),
    [
        ({"a": card(), "b": card()}, {A: 3, B: 4}),  # hardly more
        ({"a": card(), "b": card()}, {A: 3}),
        ({"a": card(), "b": card(exports=False)}, {B: 9}),
        ({"a": card(exports=False), "b": card()}, {B: 9}),
        ({"a": card(), "b": card(metadata="&")}, {B: 9}),
        ({"a": card(), "b": card(metadata="é")}, {B: 9}),
        ({"a": card(), "b": card(weights="x")}, {B: 9}),  # another checkpoint
    ],
)
def test_no_source_without_more_blocks_of_the_same_model(cards, cached):
    assert sources(**cards).find_source(PROMPT, A, cached) is None


def test_one_worker_has_no_sources():
    assert not sources(a=card(), b=card(exports=False))
    assert sources(a=card(), b=card())


def loads(**counts):
    return {
        Worker(ord(name) - ord("a") + 1): WorkerLoad(Capacity(), PrefillSpeed(), num_requests=count)
        for name, count in counts.items()
    }


def choose(hot, *, now, cached=None, prompt=PROMPT, worker=A, **counts):
    cached = {A: 6} if cached is None else cached
    return hot.choose_copy(prompt, worker, cached, loads(**(counts or {"a": 5, "b": 1})), now)


def test_prefix_that_makes_a_queue_grow_is_copied_once():
    hot = replication.HotPrefixes()
    early = [choose(hot, now=float(i)) for i in range(3)]
    copy = choose(hot, now=3.0)

    assert early == [None] * 3
    assert (copy.source, copy.target, copy.num_blocks) == (A, B, 6)
    assert "worker 1 alone has; it has 4 requests more than worker 2" in copy.reason
    assert choose(hot, now=4.0) is None
    later = [choose(hot, now=40.0 + i) for i in range(4)]
    assert later[-1] is not None  # it was evicted there, and is hot again


@pytest.mark.parametrize(
    "change",
    [
        {"cached": {A: 6, B: 3}},  # another has half of it
        {"cached": {A: 1}},
        {"a": 3, "b": 1},  # no queue
        {"a": 9},  # no other worker
        {"worker": B},
    ],
)
def test_prefix_is_not_copied_without_need(change):
    hot = replication.HotPrefixes()

    assert [choose(hot, now=0.0, **change) for _ in range(9)] == [None] * 9


def test_rare_prefix_and_too_many_copies_are_left():
    hot = replication.HotPrefixes()
    assert [choose(hot, now=5.0 * i) for i in range(9)] == [None] * 9
    hot.num_copies = replication.MAX_COPIES

    assert [choose(hot, now=50.0) for _ in range(9)] == [None] * 9


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 10), st.integers(0, 10))))
def test_memory_is_bounded_and_no_prefix_is_copied_twice_within_its_rest(arrivals):
    hot, copied_at = replication.HotPrefixes(), {}
    for number, (name, queue, num_blocks) in enumerate(arrivals * 3):
        prompt = Prompt(num_tokens=100, block_size=10, sequence_hashes=[name] * 10)
        now = number * 0.5
        if choose(hot, now=now, prompt=prompt, cached={A: num_blocks}, a=queue, b=0) is not None:
            assert now - copied_at.get(name, -100.0) >= replication.REST_S
            copied_at[name] = now

    assert len(hot._arrivals) <= replication.MAX_PREFIXES
