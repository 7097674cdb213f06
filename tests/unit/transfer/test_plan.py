"""Plans move each byte to where it belongs: compared with copying token by token by the definition of the layout."""

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.transfer import plan
from dynamo.transfer.descriptors import Layout, Order

SHAPE = Layout(
    num_blocks=8, block_size=3, num_layers=2, num_kv_heads=4, head_dim=2, dtype="float16"
)
BLOCKS = st.lists(st.integers(0, 7), unique=True, min_size=1)


def layout(**changes):
    return msgspec.structs.replace(SHAPE, **changes)


def head_at(layout, layer, block, token, which, head):
    """Where one head of one token begins; `which` is 0 for keys, 1 for values."""
    order = [layer, block] if layout.order is Order.LAYER_MAJOR else [block, layer]
    sizes = [layout.num_layers, layout.num_blocks]
    if layout.order is Order.BLOCK_MAJOR:
        sizes.reverse()
    index = order[0] * sizes[1] + order[1]
    index = (index * layout.block_size + token) * 2 + which
    index = index * len(layout.heads) + head - layout.heads.start
    return index * layout.head_bytes


def copy_naively(target, source, here, there, pairs):
    shared = set(here.heads) & set(there.heads)
    for layer in range(here.num_layers):
        for local, remote in pairs:
            for token in range(here.block_size):
                for which in (0, 1):
                    for head in shared:
                        to = head_at(here, layer, local, token, which, head)
                        of = head_at(there, layer, remote, token, which, head)
                        size = here.head_bytes
                        target[to : to + size] = source[of : of + size]


@given(
    BLOCKS,
    BLOCKS,
    st.sampled_from(Order),
    st.sampled_from(Order),
    st.sampled_from([(1, 0), (2, 0), (2, 1), (4, 2)]),
    st.sampled_from([(1, 0), (2, 0), (2, 1), (4, 2)]),
)
def test_every_byte_goes_where_the_layouts_say(local, remote, order, other, ranks, others):
    here = layout(order=order, tp_size=ranks[0], tp_rank=ranks[1])
    there = layout(num_blocks=9, order=other, tp_size=others[0], tp_rank=others[1])
    pairs = list(zip(local, remote, strict=False))
    source = random.Random(1).randbytes(there.num_bytes)
    moved, expected = bytearray(here.num_bytes), bytearray(here.num_bytes)
    if not set(here.heads) & set(there.heads):
        with pytest.raises(errors.TransferError, match="no heads of our rank"):
            plan.make(here, there, *zip(*pairs, strict=True))
        return

    made = plan.make(here, there, *zip(*pairs, strict=True))
    pieces = list(made.pattern().pieces())
    for to, of, length in pieces:
        moved[to : to + length] = source[of : of + length]
    copy_naively(expected, source, here, there, pairs)

    assert moved == expected
    assert len(pieces) == made.num_pieces
    assert sum(length for _, _, length in pieces) == made.num_bytes


@given(BLOCKS, BLOCKS)
def test_runs_cover_the_pairs_and_are_maximal(local, remote):
    pairs = list(zip(local, remote, strict=False))

    runs = list(plan.merge(*zip(*pairs, strict=True)))

    unfolded = [(a + i, b + i) for a, b, num_blocks in runs for i in range(num_blocks)]
    assert unfolded == pairs
    assert not any((a + n, b + n) == (c, d) for (a, b, n), (c, d, _) in itertools.pairwise(runs))


@pytest.mark.parametrize(
    ("order", "other", "num_pieces"),
    [
        (Order.LAYER_MAJOR, Order.LAYER_MAJOR, 2 * 2),
        (Order.BLOCK_MAJOR, Order.BLOCK_MAJOR, 2),
        (Order.LAYER_MAJOR, Order.BLOCK_MAJOR, 4 * 2),
    ],
)
def test_adjacent_blocks_become_one_copy_if_adjacent_in_both_pools(order, other, num_pieces):
    made = plan.make(layout(order=order), layout(order=other), [0, 1, 2, 6], [3, 4, 5, 7])

    assert made.num_pieces == len(list(made.pattern().pieces())) == num_pieces


def test_no_blocks_are_no_copies():
    made = plan.make(SHAPE, SHAPE, [], [])

    assert list(made.pattern().pieces()) == []
    assert made.num_bytes == made.num_pieces == 0


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"block_size": 4}, {"num_layers": 3}])
def test_layout_differences_are_named_for_both_sides(change):
    ((name, value),) = change.items()

    with pytest.raises(errors.TransferError, match=f"{name} is .* here and {value} at prefill-0"):
        plan.check_fit(SHAPE, layout(**change), "prefill-0")


def test_pools_of_other_sizes_orders_and_ranks_fit():
    there = layout(num_blocks=5, order=Order.BLOCK_MAJOR, tp_size=2, tp_rank=1)

    plan.check_fit(SHAPE, there, "prefill-0")
