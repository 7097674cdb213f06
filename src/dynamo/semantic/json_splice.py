"""Changes of JSON in place: all that is not changed stays as it came, byte for byte.

A typed schema would lose what it does not know, and another encoder would write numbers in another way. So only the
outline of an object is read: where each member begins and ends. The text is known to be valid JSON.
"""  # decider

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from dynamo.base import errors

_SPACE = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*")  # and a byte order mark
# Possessive, so that no string is looked at twice, and one match reaches the next bracket over any number of strings.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,\]}]+")
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+[{}\[\]]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an object, or an item of an array (without a name), by the positions of its bytes."""

    name: str
    start: int  # of the name, or of the item
    value: int  # of the value's first byte
    end: int  # behind the value


def members(data: bytes) -> list[Member]:
    """Return the members of the object, or the items of the array, that `data` is. Raises InvalidRequest."""
    position = _skip(data, 0)
    opening = data[position : position + 1]
    if opening not in (b"{", b"["):
        raise errors.InvalidRequest("expected a JSON object, got another value")
    position = _skip(data, position + 1)
    found: list[Member] = []
    while data[position : position + 1] not in (b"}", b"]", b""):
        start, name = position, ""
        if opening == b"{":
            end = _end_of_value(data, position)
            name = msgspec.json.decode(data[position:end], type=str)
            position = _skip(data, _skip(data, end) + 1)
        end = _end_of_value(data, position)
        found.append(Member(name, start, position, end))
        position = _skip(data, end)
        if data[position : position + 1] == b",":
            position = _skip(data, position + 1)
    return found


def change_object(data: bytes, changes: Mapping[str, bytes | None]) -> bytes:
    """Return the object with these members replaced, added at its end or, for None, removed."""
    found = members(data)
    present = {member.name for member in found}
    pieces, position = [], 0
    for number, member in enumerate(found):
        if member.name not in changes:
            continue
        value = changes[member.name]
        if value is not None:
            pieces += [data[position : member.value], value]
            position = member.end
        elif number + 1 < len(found):
            pieces.append(data[position : member.start])
            position = found[number + 1].start
        else:
            kept = b"".join(pieces) + data[position : member.start]
            # the comma may stand before removed members
            pieces = [kept.rstrip().removesuffix(b",")]
            position = member.end
    closing = data.rindex(b"}")
    pieces.append(data[position:closing])
    joined = b"".join(pieces)
    for name, value in changes.items():
        if name not in present and value is not None:
            joined = joined.rstrip()
            comma = b"" if joined.endswith(b"{") else b","
            joined += comma + msgspec.json.encode(name) + b":" + value
    return joined + data[closing:]


def prepend_item(data: bytes, item: bytes) -> bytes:
    """Return the array with one more item at its beginning."""
    opening = data.index(b"[") + 1
    comma = b"," if members(data) else b""
    return data[:opening] + item + comma + data[opening:]


def replace_item(data: bytes, number: int, item: bytes) -> bytes:
    """Return the array with another item in place of one."""
    member = members(data)[number]
    return data[: member.value] + item + data[member.end :]


def _skip(data: bytes, position: int) -> int:
    match = _SPACE.match(data, position)
    assert match is not None  # it matches nothing, too
    return match.end()


def _end_of_value(data: bytes, position: int) -> int:
    first = data[position : position + 1]
    if first in (b"{", b"["):
        return _end_of_brackets(data, position)
    match = (_STRING if first == b'"' else _SCALAR).match(data, position)
    if match is None:
        raise errors.InvalidRequest("expected valid JSON, got something else")
    return match.end()


def _end_of_brackets(data: bytes, position: int) -> int:
    depth = 0
    while (match := _TO_BRACKET.match(data, position)) is not None:
        position = match.end()
        depth += 1 if data[position - 1] in b"{[" else -1
        if depth == 0:
            return position
    raise errors.InvalidRequest("expected valid JSON, got an open bracket")
