"""After an outage nobody is believed dead before his time, and nobody alive for ever."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime import discovery
from dynamo.runtime.discovery import Delete, Put

KEYS = st.sampled_from("abcd")
LIVING = st.dictionaries(KEYS, st.binary(max_size=1))
PUTS = st.builds(lambda key, value: Put(key=key, value=value), KEYS, st.binary(max_size=1))
DELETES = st.builds(lambda key: Delete(key=key), KEYS)
STEPS = st.lists(st.one_of(LIVING, PUTS, DELETES, st.sampled_from(["begin", "end"])))


def shown_after(*steps):
    """What a view shows after these: a reading (a dict), changes, begin and end of a time of grace."""
    shown = discovery.KeyView()
    judge = discovery.KeyRetention(shown, lambda _key, _value: False, 10.0)
    for step in steps:
        if step == "begin":
            judge.begin()
        elif step == "end":
            judge.end(0.0)
        elif isinstance(step, dict):
            judge.replace(step, 0.0)
        else:
            judge.apply([step], 0.0)
    return shown.get_prefix("")


class Owners:
    """What is known of the owner of each key, and a view of the keys, which are all missing in etcd."""

    def __init__(self, **is_alive):
        self.is_alive = is_alive
        self.view = discovery.KeyView()
        self.judge = discovery.KeyRetention(self.view, lambda key, _value: self.is_alive[key], 10.0)
        self.judge.replace(dict.fromkeys(is_alive, b"1"), 0.0)
        self.judge.apply([Delete(key=key) for key in is_alive], 0.0)

    def shown(self, now):
        self.judge.judge(now)
        return {*self.view.get_prefix("")}


def test_key_whose_owner_answers_is_kept_without_end():
    assert Owners(a=True, b=False).shown(1000.0) == {"a"}


def test_key_is_removed_when_its_owner_answers_no_longer():
    owners = Owners(a=True)
    assert owners.shown(100.0) == {"a"}
    owners.is_alive["a"] = False
    assert owners.shown(101.0) == set()


def test_key_of_an_unknown_owner_is_kept_for_a_while():
    owners = Owners(a=None)
    assert owners.shown(9.9) == {"a"}
    assert owners.shown(10.0) == set()


def test_silence_of_an_owner_counts_from_its_last_answer():
    owners = Owners(a=True)
    assert owners.shown(100.0) == {"a"}
    owners.is_alive["a"] = None
    assert owners.shown(109.9) == {"a"}
    assert owners.shown(110.0) == set()


def test_key_that_its_owner_removes_vanishes_though_the_owner_answers():
    owners = Owners(a=True)
    owners.judge.apply([Put(key="a", value=discovery.REMOVED), Delete(key="a")], 1.0)
    assert owners.shown(1.0) == set()


def test_key_that_came_and_went_in_one_batch_is_not_shown():
    view = discovery.KeyView()
    judge = discovery.KeyRetention(view, lambda _key, _value: False, 10.0)
    judge.apply([Put(key="a", value=b"1"), Delete(key="a")], 0.0)
    assert view.get_prefix("") == {}


async def test_owner_that_answers_is_asked_last_where_an_answer_is_not_enough():
    view = discovery.KeyView()
    judge = discovery.KeyRetention(view, lambda _key, _value: True, 10.0, is_answer_enough=False)
    judge.replace({"a": b"1"}, 0.0)
    judge.apply([Delete(key="a")], 1.0)
    judge.judge(1000.0)
    changes = view.watch("")

    assert judge.is_judging
    assert await anext(changes) == Put(key="a", value=b"1", is_confirmed=False)
    judge.apply([Put(key="a", value=b"1")], 1001.0)
    assert await anext(changes) == Put(key="a", value=b"1")
    assert not judge.is_judging
    await changes.aclose()


async def test_key_of_an_unknown_owner_is_reported_as_unconfirmed_until_it_comes_back():
    owners = Owners(a=None)
    changes = owners.view.watch("")
    assert await anext(changes) == Put(key="a", value=b"1", is_confirmed=False)
    owners.judge.apply([Put(key="a", value=b"1")], 1.0)
    assert await anext(changes) == Put(key="a", value=b"1")
    await changes.aclose()


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
