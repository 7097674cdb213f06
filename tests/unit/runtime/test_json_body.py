"""The bound on the structure of a body, which is counted before memory is spent on it."""

import msgspec
import pytest

from dynamo.base import errors
from dynamo.runtime.http import json_body


class Sample(msgspec.Struct):
    """A request with any content."""

    value: object = None


def test_body_of_many_lists_is_refused_before_it_is_decoded():
    body = b'{"value":[' + b"[]," * json_body.MAX_CONTAINERS + b"[]]}"

    with pytest.raises(errors.InvalidRequest, match=f"at most {json_body.MAX_CONTAINERS} lists"):
        json_body.RequestDecoder(Sample).decode(body)


@pytest.mark.parametrize("end", ['"', '\\""', '\\\\"'])
def test_brackets_within_a_text_do_not_count(end):
    text = "{[" * json_body.MAX_CONTAINERS
    body = ('{"value":"' + text + end + "}").encode()

    decoded = json_body.RequestDecoder(Sample).decode(body)

    assert decoded.value.startswith(text)


def test_unfinished_text_is_an_error_of_the_json():
    body = b'{"value":"' + b"{[" * json_body.MAX_CONTAINERS

    with pytest.raises(errors.InvalidRequest, match="no valid JSON"):
        json_body.RequestDecoder(Sample).decode(body)


def test_check_of_the_type_is_part_of_decoding():
    class Checked(msgspec.Struct):
        """A request that is never right."""

        def check(self):
            raise errors.InvalidRequest("never")

    decoder = json_body.RequestDecoder(Checked)

    with pytest.raises(errors.InvalidRequest, match="never"):
        decoder.decode(b"{}")
    with pytest.raises(errors.InvalidRequest, match="never"):
        decoder.convert({}, "")


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """An object within a request."""

    size: int
    share: float | None = None


class Whole(msgspec.Struct, forbid_unknown_fields=True):
    """A request with objects in it."""

    parts: list[Part]
    first: Part | None = None
    sizes: dict[int, float] = {}


def test_unknown_names_are_noted_where_they_are_accepted():
    body = (
        b'{"parts":[{"size":6.0,"share":2.0,"a":1}],"first":{"size":1,"b":2},"c":3,"sizes":{"5":1}}'
    )
    noted = []
    token = json_body.ignored_names.set(noted)
    try:
        whole = json_body.RequestDecoder(Whole).decode(body)
    finally:
        json_body.ignored_names.reset(token)

    assert sorted(noted) == ["c", "first.b", "parts[0].a"]
    assert whole == Whole([Part(6, 2.0)], Part(1), {5: 1.0})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"parts":[{"size":6.5}]}', r"parts\[0\].size: expected a whole number, got 6.5"),
        (b'{"parts":[{"size":6,"a":1}]}', r"`parts\[0\].a`"),
    ],
)
def test_unknown_names_are_refused_elsewhere(body, message):
    with pytest.raises(errors.InvalidRequest, match=message):
        json_body.RequestDecoder(Whole).decode(body)


def test_byte_order_mark_before_the_body_is_left_out():
    body = b"\xef\xbb\xbf" + b'{"value": 5}'

    assert json_body.RequestDecoder(Sample).decode(body) == Sample(5)
