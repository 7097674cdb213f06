"""After an outage nobody is believed dead before his time, and nobody alive for ever."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime import discovery
from dynamo.runtime.backends.etcd import discovery as etcd_discovery
from dynamo.runtime.discovery import Delete, Put

KEYS = st.sampled_from("abcd")
LIVING = st.dictionaries(KEYS, st.binary(max_size=1))
PUTS = st.builds(lambda key, value: Put(key=key, value=value), KEYS, st.binary(max_size=1))
DELETES = st.builds(lambda key: Delete(key=key), KEYS)
STEPS = st.lists(st.one_of(LIVING, PUTS, DELETES, st.sampled_from(["begin", "end"])))


def shown_after(*steps):
    """What a view shows after these: a reading (a dict), changes, begin and end of a time of grace."""
    shown = discovery.KeyView()
    judge = etcd_discovery.OutageGrace(shown)
    for step in steps:
        if step in ("begin", "end"):
            getattr(judge, step)()
        elif isinstance(step, dict):
            judge.replace(step)
        else:
            judge.apply([step])
    return shown.get_prefix("")


def test_deleted_key_is_removed_when_there_was_no_outage():
    assert shown_after({"a": b"1", "b": b"2"}, {"a": b"1"}) == {"a": b"1"}
    assert shown_after({"a": b"1"}, Delete(key="a")) == {}


def test_missing_key_is_kept_after_an_outage():
    before = {"a": b"1", "b": b"2"}

    assert shown_after(before, "begin", {"a": b"3"}) == {"a": b"3", "b": b"2"}
    assert shown_after(before, "begin", before, Delete(key="b")) == before


def test_missing_keys_are_removed_at_the_end_of_the_grace_period():
    steps = ({"a": b"1", "b": b"2"}, "begin", {}, Put(key="a", value=b"1"), "end")

    assert shown_after(*steps) == {"a": b"1"}


def test_key_deleted_after_the_grace_period_is_removed_at_once():
    assert shown_after({"a": b"1"}, "begin", {"a": b"1"}, "end", Delete(key="a")) == {}


@given(STEPS)
def test_view_equals_etcd_after_the_grace_period(steps):
    truth = {}
    for step in steps:
        if isinstance(step, dict):
            truth = dict(step)
        elif isinstance(step, Put):
            truth[step.key] = step.value
        elif isinstance(step, Delete):
            truth.pop(step.key, None)

    assert shown_after(*steps, "end") == truth


@given(LIVING, STEPS)
def test_no_key_is_removed_during_the_grace_period(before, steps):
    during = [step for step in steps if step != "end"]

    assert shown_after(before, "begin", *during).keys() >= before.keys()
