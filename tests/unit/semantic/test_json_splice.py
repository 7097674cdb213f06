import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.semantic import json_splice

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=5), VALUES, max_size=6),
    st.text(max_size=5),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
def test_changed_object_has_the_new_value_and_all_others(fields, name, indent, removes):
    data = json.dumps(fields, indent=indent).encode()

    changed = json_splice.change_object(data, {name: None if removes else b'"new"'})

    expected = {key: value for key, value in fields.items() if key != name}
    assert json.loads(changed) == (expected if removes else {**fields, name: "new"})


def test_bytes_of_other_members_stay_as_they_came():
    data = b'{ "a" : 1.50,\n"model":"x" , "b":{"c":[1e3,"\\u00e9\\"}"]} }'

    changed = json_splice.change_object(data, {"model": b'"y"'})

    assert changed == b'{ "a" : 1.50,\n"model":"y" , "b":{"c":[1e3,"\\u00e9\\"}"]} }'


def test_every_member_of_a_repeated_name_is_changed():
    assert json_splice.change_object(b'{"m":1,"m":2}', {"m": b"3"}) == b'{"m":3,"m":3}'


@pytest.mark.parametrize(
    ("data", "left"),
    [
        (b'{"a":1, "x":2, "y":3 }', b'{"a":1 }'),
        (b'{"x":2,"y":3,"a":1}', b'{"a":1}'),
        (b'{"x":2,"a":1,"x":3,"y":4}', b'{"a":1}'),
        (b'{"x":2,"y":3}', b"{}"),
    ],
)
def test_neighbours_are_removed_with_their_commas(data, left):
    assert json_splice.change_object(data, {"x": None, "y": None}) == left


def test_item_is_put_before_those_of_an_array():
    assert json_splice.prepend_item(b"[1]", b"0") == b"[0,1]"
    assert json_splice.prepend_item(b"[ ]", b"0") == b"[0 ]"


def test_text_without_an_object_is_refused():
    with pytest.raises(errors.InvalidRequest):
        json_splice.members(b'"text"')


def test_item_of_an_array_is_replaced():
    assert json_splice.replace_item(b"[1, [2], 3]", 1, b"4") == b"[1, 4, 3]"


@pytest.mark.parametrize("data", [b'{"a":[', b'{"a":', b'{"a'])
def test_text_that_ends_early_is_refused(data):
    with pytest.raises(errors.InvalidRequest):
        json_splice.members(data)


def test_strings_between_two_brackets_are_passed_over_together(monkeypatch):
    looks = []
    find_end = json_splice._end_of_value
    monkeypatch.setattr(
        json_splice, "_end_of_value", lambda *where: looks.append(where) or find_end(*where)
    )
    strings = ['"{', "\\", "]"] * 1000
    data = json.dumps({"a": strings, "model": "x"}).encode()

    assert json.loads(json_splice.change_object(data, {"model": b'"y"'})) == {
        "a": strings,
        "model": "y",
    }
    assert len(looks) == 4
