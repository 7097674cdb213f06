"""Stored responses stay within bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import config as configuration
from dynamo.base import errors
from dynamo.frontend import config
from dynamo.frontend.processes import response_store


def kept(size, tenant=""):
    return response_store.StoredResponse(b"x" * (size // 2), b"y" * (size - size // 2), tenant)


def test_least_recently_used_response_is_dropped_first():
    store = response_store.ResponseStore(max_items=2, max_bytes=100)
    store.put("a", kept(1))
    store.put("b", kept(1))
    store.find("a", "")
    store.put("c", kept(1))

    assert [store.find(name, "") is not None for name in "abc"] == [True, False, True]


def test_large_response_displaces_as_many_as_needed():
    store = response_store.ResponseStore(max_items=9, max_bytes=10)
    for name in "abc":
        store.put(name, kept(3))
    store.put("d", kept(6))

    assert [store.find(name, "") is not None for name in "abcd"] == [False, False, True, True]


def test_too_large_response_displaces_none():
    store = response_store.ResponseStore(max_items=9, max_bytes=10)
    store.put("a", kept(10))
    store.put("b", kept(11))

    assert store.find("a", "")
    assert store.find("b", "") is None


@pytest.mark.parametrize("limits", [{"max_items": 3}, {"max_bytes": 15}])
def test_tenant_that_has_the_most_loses_its_own_oldest(limits):
    store = response_store.ResponseStore(**{"max_items": 9, "max_bytes": 99} | limits)
    store.put("a", kept(5, "ann"))
    for name in "bcde":
        store.put(name, kept(5, "bob"))
    store.put("f", kept(5, "cy"))

    held = [name for name in "abcdef" if store.find_any(name) is not None]
    assert held == ["a", "e", "f"]
    assert [store.find("a", "bob"), store.find("a", "ann")] == [None, kept(5, "ann")]


def test_remove_returns_whether_the_response_was_stored():
    store = response_store.ResponseStore(max_items=9, max_bytes=10)
    store.put("a", kept(10))

    assert store.remove("a")
    assert not store.remove("a")
    assert store.find("a", "") is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"), st.integers(0, 12), st.booleans(), st.sampled_from("xyz")
        )
    ),
    st.integers(0, 4),
)
def test_store_never_exceeds_its_limits(steps, max_items):
    store = response_store.ResponseStore(max_items=max_items, max_bytes=10)
    for name, size, is_kept, tenant in steps:
        if is_kept:
            store.put(name, kept(size, tenant))
        else:
            store.remove(name)
        held = [one for name in "abcdef" if (one := store.find_any(name))]

        assert len(store) == len(held) <= max_items
        assert sum(one.num_bytes for one in held) <= 10


@pytest.mark.parametrize("flag", ["--response-store-items", "--response-store-mb"])
def test_fewer_responses_than_none_are_refused_at_the_start(flag):
    with pytest.raises(errors.ConfigError, match=f"{flag}: expected at least 0, got -1"):
        configuration.load(config.FrontendConfig, prog="x", argv=[flag, "-1"], environ={})
