"""Pieces travel as they are, and only those of the pool are taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.transfer import messages


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500)), min_size=1))
def test_spans_are_unchanged_by_packing_and_unpacking(spans):
    assert messages.unpack(messages.pack(spans), 1000) == spans


def test_pieces_are_little_endian():
    assert messages.pack([(1, 2)]) == b"\x01" + bytes(7) + b"\x02" + bytes(7)


@pytest.mark.parametrize("body", [b"", b"x" * 15, bytes(16 * (messages.MAX_PIECES + 1))])
def test_malformed_pieces_are_refused(body):
    with pytest.raises(errors.RemoteProtocolError, match="pieces of 16 bytes"):
        messages.unpack(body, 1000)


@pytest.mark.parametrize("span", [(0, 0), (999, 2), (1000, 1), (2**64 - 1, 2**64 - 1)])
def test_pieces_outside_a_pool_are_refused(span):
    with pytest.raises(errors.RemoteProtocolError, match="not within a pool of 1000"):
        messages.unpack(messages.pack([(0, 1000), span]), 1000)
