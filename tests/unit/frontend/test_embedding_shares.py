"""Who embeds what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.frontend.apis import embeddings
from dynamo.preprocess import options
from dynamo.protocols import model_card

PLAIN = model_card.EmbeddingFacts(dimensions=8)
ANY = model_card.EmbeddingFacts(dimensions=8, can_shorten=True)
SOME = model_card.EmbeddingFacts(dimensions=8, can_shorten=True, lengths=(2, 4))


def test_small_request_goes_to_one_worker():
    assert embeddings.split_inputs([5, 6, 7], num_workers=4) == [[0, 1, 2]]


def test_large_request_is_split_by_length():
    assert embeddings.split_inputs([100, 900, 800, 90], num_workers=2) == [[0, 1], [2, 3]]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=50), st.integers(0, 8))
def test_each_input_is_in_exactly_one_share(lengths, num_workers):
    shares = embeddings.split_inputs(lengths, num_workers)

    assert sorted(n for share in shares for n in share) == list(range(len(lengths)))
    assert 1 <= len(shares) <= max(1, num_workers)
    assert all(shares)


@pytest.mark.parametrize(
    ("facts", "asked"),
    [(PLAIN, None), (PLAIN, 8), (ANY, 1), (ANY, 7), (ANY, 8), (SOME, 2), (SOME, 8)],
)
def test_supported_dimensions_are_accepted(facts, asked):
    options.check_dimensions(asked, facts)


@pytest.mark.parametrize(
    ("facts", "asked", "message"),
    [
        (PLAIN, 4, "expected 8 or nothing, as this model's vectors cannot be shortened, got 4"),
        (ANY, 9, "expected from 1 to 8, got 9"),
        (SOME, 3, "expected one of 2, 4, got 3"),
    ],
)
def test_anything_else_is_refused_by_name(facts, asked, message):
    with pytest.raises(errors.InvalidRequest, match=message) as caught:
        options.check_dimensions(asked, facts)

    assert caught.value.param == "dimensions"
