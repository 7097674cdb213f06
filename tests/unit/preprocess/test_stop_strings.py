"""Stop strings, compared with a naive search of the whole text after each character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.preprocess import stop_strings

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text, stops):
    for end in range(len(text) + 1):
        found = [one for one in stops if text[:end].endswith(one)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def streamed(pieces, stops):
    watcher, told = stop_strings.StopStrings(stops), ""
    for piece in pieces:
        text, matched = watcher.push(piece)
        told += text
        if matched is not None:
            return told, matched
    return told + watcher.flush(), None


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_any_split_ends_where_a_naive_search_ends(pieces, stops):
    assert streamed(pieces, stops) == naive("".join(pieces), stops)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_held_back_text_is_the_longest_beginning_of_a_stop_string(pieces, stops):
    watcher, told, so_far = stop_strings.StopStrings(stops), "", ""
    for piece in pieces:
        text, matched = watcher.push(piece)
        told, so_far = told + text, so_far + piece
        if matched is not None:
            return
        held = so_far[len(told) :]
        ends = (so_far[i:] for i in range(len(so_far) + 1))

        assert held == next(end for end in ends if any(one.startswith(end) for one in stops))


def test_text_that_cannot_become_a_stop_string_is_returned_at_once():
    watcher = stop_strings.StopStrings(["END"])

    assert watcher.push("hello") == ("hello", None)


def test_held_back_beginning_is_returned_when_no_stop_string_follows():
    watcher = stop_strings.StopStrings(["END"])

    assert watcher.push("the EN") == ("the ", None)
    assert watcher.num_held == 2
    assert watcher.push("emy") == ("ENemy", None)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["bcd", "c"], ("ab", "c")),  # complete first, though it begins later
        (["bc", "abc"], ("", "abc")),  # complete together: the longest
        (["x"], ("abcd", None)),
    ],
)
def test_stop_string_that_is_complete_first_counts(stops, expected):
    assert streamed(["abcd"], stops) == expected
    assert streamed("abcd", stops) == expected
