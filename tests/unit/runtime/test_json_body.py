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
