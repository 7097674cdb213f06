"""Which inputs the next batch embeds."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.worker import embedding_host


def drain(queue):
    batches = []
    while batch := queue.take_batch():
        batches.append([tuple(place) for place in batch])
    return batches


def test_calls_take_turns_in_the_queue():
    queue = embedding_host.EmbeddingQueue(max_batch_tokens=20)
    queue.add(1, [5] * 8)
    queue.add(2, [5])

    assert queue.take_batch() == [(1, 7), (2, 0), (1, 6), (1, 5)]


def test_longest_inputs_of_a_call_are_first():
    queue = embedding_host.EmbeddingQueue(max_batch_tokens=100)
    queue.add(1, [3, 9, 5])

    assert queue.take_batch() == [(1, 1), (1, 2), (1, 0)]


def test_input_over_the_budget_is_alone_in_a_batch():
    queue = embedding_host.EmbeddingQueue(max_batch_tokens=10)
    queue.add(1, [50, 4, 4])

    assert drain(queue) == [[(1, 0)], [(1, 2), (1, 1)]]


def test_dropped_call_is_in_no_batch():
    queue = embedding_host.EmbeddingQueue(max_batch_tokens=10)
    queue.add(1, [5, 5])
    queue.add(2, [3])
    queue.drop(1)
    queue.drop(1)

    assert (len(queue), queue.num_tokens) == (1, 3)
    assert drain(queue) == [[(2, 0)]]


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=90), max_size=6), st.integers(1, 60)
)
def test_each_input_is_in_exactly_one_batch(calls, budget):
    queue = embedding_host.EmbeddingQueue(budget)
    for call_id, lengths in enumerate(calls):
        queue.add(call_id, lengths)
    assert queue.num_tokens == sum(map(sum, calls))

    batches = drain(queue)

    taken = sorted(place for batch in batches for place in batch)
    assert taken == [(i, n) for i, lengths in enumerate(calls) for n in range(len(lengths))]
    for batch in batches:
        tokens = sum(calls[call_id][number] for call_id, number in batch)
        assert len(batch) == 1 or tokens <= budget
        assert len(batch) <= embedding_host.MAX_BATCH_INPUTS
    assert (len(queue), queue.num_tokens) == (0, 0)
