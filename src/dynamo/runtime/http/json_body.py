"""JSON bodies as typed requests, or as errors that name the field, what was expected there and what came.

A valid body is decoded once, in C. Another one is decoded a second time without types. If it differs only in what does
no harm, it is taken: names that no type has are left out, and noted (`ignored_names`) unless their value is null; 6.0
stands for 6; a byte order mark, which some editors write, is left out. Else the place in the decoder's message is
looked up both in the types (what was expected) and in the value (what came).

`encode_inline` is for answers: events, and other JSON that stands in a line.
"""  # decider

import itertools
import re
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import msgspec

from dynamo.base import errors
from dynamo.runtime.http.exchange import SMALL_BODY_BYTES

T = TypeVar("T", bound=msgspec.Struct)
_PLACE = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`$")
_SEGMENT = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_MAX_SHOWN = 40
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
INSTEAD = "instead"  # key in the metadata of a refused field, of the name that the API has instead
MAX_CONTAINERS = 300_000  # lists and objects of one body; each costs up to 0.3 kB and a microsecond
_COUNT_STEP = 2**20
# Where a list is set, unknown parameters are accepted, and their names are added to it; elsewhere they are refused.
ignored_names: ContextVar[list[str] | None] = ContextVar("ignored_names", default=None)
# What ends a line in a text for clients that use Python's `splitlines` or httpx's `iter_lines`, as LiteLLM does.
_LINE_ENDS = (
    (b"\xc2\x85", rb"\u0085"),
    (b"\xe2\x80\xa8", rb"\u2028"),
    (b"\xe2\x80\xa9", rb"\u2029"),
)
_encode = msgspec.json.Encoder().encode
_STRING_OR_CONTAINER = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]', re.DOTALL)


class RequestDecoder(Generic[T]):
    """Decodes the JSON bodies of one type, and has each request checked by its `check`, if the type has one."""

    def __init__(self, cls: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(cls)
        self._cls = cls
        self._type = msgspec.inspect.type_info(cls)
        self._check: Callable[[T], None] | None = getattr(cls, "check", None)

    def decode(self, body: bytes) -> T:
        """Return the request in this body. Raises InvalidRequest."""
        if len(body) > SMALL_BODY_BYTES:
            check_structure(body)
        try:
            request = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            request = self._convert_adapted(decode_untyped(body), "", error)
        if self._check is not None:
            self._check(request)
        return request

    def convert(self, value: Any, place: str) -> T:
        """Return the request in a decoded value that stands at `place` in the body. Raises InvalidRequest."""
        try:
            request = msgspec.convert(value, self._cls)
        except msgspec.ValidationError as error:
            request = self._convert_adapted(value, place, error)
        if self._check is not None:
            self._check(request)
        return request

    def _convert_adapted(self, value: Any, place: str, error: Exception) -> T:
        """Return the request in a value that is not exactly of the type. Raises InvalidRequest."""
        names: list[str] = []
        adapted = _adapt(self._type, value, place, names)
        accepted = ignored_names.get()
        if names and accepted is None:
            raise _locate(self._type, value, error, place) from error
        try:
            request = msgspec.convert(adapted, self._cls, str_keys=True)
        except msgspec.ValidationError as invalid:
            raise _locate(self._type, adapted, invalid, place) from invalid
        if accepted is not None:
            accepted += names
        return request


def check_structure(*texts: bytes) -> None:
    """Raise InvalidRequest for more lists and objects in JSON than `MAX_CONTAINERS`, before memory is spent on them."""
    num_containers = 0
    for text in texts:
        for start in range(0, len(text), _COUNT_STEP):  # in steps, between which other threads run
            end = start + _COUNT_STEP
            num_containers += text.count(b"[", start, end) + text.count(b"{", start, end)
    if num_containers <= MAX_CONTAINERS:  # those in texts included
        return
    num_containers = 0
    for token in itertools.chain.from_iterable(map(_STRING_OR_CONTAINER.finditer, texts)):
        num_containers += token[0] in (b"[", b"{")
        if num_containers > MAX_CONTAINERS:
            raise errors.InvalidRequest(
                f"the body: expected at most {MAX_CONTAINERS} lists and objects, got more; send less"
            )


def describe(value: Any) -> str:
    """Return a short description of a JSON value, for an error message."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            is_short = isinstance(value, float) or abs(value) < 10**_MAX_SHOWN
            return str(value) if is_short else "a huge number"
        case str():
            shown = value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "…"
            return f"a string ({shown!r})"
        case list():
            return f"a list of {len(value)}"
        case _:
            return "an object"


def decode_untyped(body: bytes) -> Any:
    """Return the JSON value in the body. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body.removeprefix(_BYTE_ORDER_MARK))
    except RecursionError as error:
        raise errors.InvalidRequest("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as malformed:
        if not body.strip():
            raise errors.InvalidRequest("the body is empty; expected a JSON object") from malformed
        raise errors.InvalidRequest(f"the body is no valid JSON: {malformed}") from malformed


def _adapt(expected: msgspec.inspect.Type, value: Any, place: str, names: list[str]) -> Any:
    """Return the value without keys that its type does not have, which are added to `names`, and with 6.0 as 6."""
    if isinstance(value, dict) and (struct := _alternative(expected, msgspec.inspect.StructType)):
        fields = {field.encode_name: field.type for field in struct.fields}
        prefix = f"{place}." if place else ""
        names += [prefix + name for name in value if name not in fields and value[name] is not None]
        return {
            name: _adapt(fields[name], inner, prefix + name, names)
            for name, inner in value.items()
            if name in fields
        }
    if isinstance(value, dict) and (table := _alternative(expected, msgspec.inspect.DictType)):
        return {
            key: _adapt(table.value_type, inner, f"{place}.{key}", names)
            for key, inner in value.items()
        }
    if isinstance(value, list) and (items := _alternative(expected, msgspec.inspect.ListType)):
        return [
            _adapt(items.item_type, inner, f"{place}[{number}]", names)
            for number, inner in enumerate(value)
        ]
    if isinstance(value, float) and value.is_integer():
        return int(value) if _alternative(expected, msgspec.inspect.IntType) else value
    return value


def explain(
    cls: type[msgspec.Struct],
    value: Any,
    error: Exception,
    place: str = "",
    *,
    secrets: Collection[str] = (),
) -> str:
    """Return what is wrong with a value, at `place`, whose conversion to a type ended in this error.

    For what is no body of a request, such as a file of settings. Of fields in `secrets` no value is shown.
    """
    expected = msgspec.inspect.type_info(cls)
    adapted = value if "unknown field" in str(error) else _adapt(expected, value, place, [])
    found = _locate(expected, adapted, error, place)
    is_secret = (found.param or "").rpartition(".")[2] in secrets
    return str(found).partition(", got ")[0] if is_secret else str(found)


def _locate(
    expected: msgspec.inspect.Type, value: Any, error: Exception, prefix: str
) -> errors.InvalidRequest:
    """Return the error for the wrong part of `value`, which stands at `prefix` in the body."""
    place = _PLACE.search(str(error))
    path = list(_SEGMENT.finditer(place["path"])) if place else []
    within, expected, wrong = _follow(expected, value, path)
    param = (prefix + within).lstrip(".")
    return _make_error(param, expected, wrong, is_key=bool(place and place["key"]))


def _follow(
    expected: msgspec.inspect.Type, value: Any, path: list[re.Match[str]]
) -> tuple[str, msgspec.inspect.Type, Any]:
    """Return where this path leads: the place, with the keys that it lacks, type and value; UNSET: an unknown value."""
    place = ""
    for segment in path:
        step, expected, value = _enter(_alternative(expected, _container(segment)), value, segment)
        place += step
    return place, expected, value


def _container(segment: re.Match[str]) -> type[msgspec.inspect.Type]:
    if segment["name"]:
        return msgspec.inspect.StructType
    return msgspec.inspect.ListType if segment["index"] else msgspec.inspect.DictType


def _alternative(expected: msgspec.inspect.Type, kind: type[msgspec.inspect.Type]) -> Any:
    """Return the first of a union's types that is of this kind, or None."""
    options = expected.types if isinstance(expected, msgspec.inspect.UnionType) else (expected,)
    return next((option for option in options if isinstance(option, kind)), None)


def _enter(inner: Any, value: Any, segment: re.Match[str]) -> tuple[str, msgspec.inspect.Type, Any]:
    if name := segment["name"]:
        field = next(field for field in inner.fields if field.encode_name == name)
        return f".{name}", field.type, value[name]
    if index := segment["index"]:
        return f"[{index}]", inner.item_type, value[int(index)]
    struct = _alternative(inner.value_type, msgspec.inspect.StructType)
    if struct is not None and value is not msgspec.UNSET:
        for key, item in value.items():
            try:
                msgspec.convert(item, struct.cls)
            except msgspec.ValidationError:
                return f".{key}", struct, item
    return "", inner.value_type, msgspec.UNSET


def _make_error(
    param: str, expected: msgspec.inspect.Type, wrong: Any, *, is_key: bool
) -> errors.InvalidRequest:
    struct = _alternative(expected, msgspec.inspect.StructType)
    if struct is not None and isinstance(wrong, dict):
        return _make_key_error(param, struct, wrong)
    if isinstance(expected, msgspec.inspect.Metadata) and expected.extra:
        instead = expected.extra[INSTEAD]
        return errors.InvalidRequest.of_param(param, f"this API has {instead} instead")
    if _allows_nothing(expected):
        return errors.InvalidRequest.of_param(param, "not supported; leave it out")
    phrase = _phrase(expected)
    if is_key:
        table = _alternative(expected, msgspec.inspect.DictType)
        phrase = f"keys that are {_phrase(table.key_type)}" if table else "other keys"
    elif wrong is msgspec.UNSET:
        phrase = f"values that are {phrase}"
    else:
        phrase += f", got {describe(wrong)}"
    return errors.InvalidRequest(f"{param or 'the body'}: expected {phrase}", param=param or None)


def _make_key_error(param: str, struct: Any, value: dict[str, Any]) -> errors.InvalidRequest:
    prefix = f"{param}." if param else ""
    names = {field.encode_name for field in struct.fields}
    if unknown := sorted(name for name in value.keys() - names if value[name] is not None):
        listed = ", ".join(f"`{prefix}{name[:_MAX_SHOWN]}`" for name in unknown[:10])
        first = prefix + unknown[0][:_MAX_SHOWN]
        return errors.InvalidRequest(f"Unsupported parameter(s): {listed}", param=first)
    required = [field.encode_name for field in struct.fields if field.required]
    missing = next((prefix + name for name in required if name not in value), param)
    return errors.InvalidRequest.of_param(missing, "required, but missing")


def _allows_nothing(expected: msgspec.inspect.Type) -> bool:
    """Return whether all values of a type ask for nothing: null, false, 0, an empty text or an empty list."""
    match expected:
        case msgspec.inspect.UnionType():
            return all(map(_allows_nothing, expected.types))
        case msgspec.inspect.LiteralType():
            return not any(expected.values)
        case msgspec.inspect.ListType():
            return expected.max_length == 0
        case _:
            return isinstance(expected, msgspec.inspect.NoneType)


def _phrase(expected: msgspec.inspect.Type) -> str:
    """Return a type in words."""
    match expected:
        case msgspec.inspect.UnionType():
            types = (t for t in expected.types if not isinstance(t, msgspec.inspect.NoneType))
            return " or ".join(map(_phrase, types))
        case msgspec.inspect.LiteralType():
            return " or ".join(map(repr, expected.values))
        case msgspec.inspect.FloatType() | msgspec.inspect.IntType():
            return _phrase_number(expected)
        case msgspec.inspect.StrType():
            form = f" like {expected.pattern}" if expected.pattern else ""
            return "a string" + _phrase_length(expected, " characters") + form
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.ListType():
            return "a list" + _phrase_length(expected, "")
        case msgspec.inspect.DictType():
            return "an object" + _phrase_length(expected, " entries")
        case _:
            return "an object"


def _phrase_number(expected: msgspec.inspect.FloatType | msgspec.inspect.IntType) -> str:
    kind = "a number" if isinstance(expected, msgspec.inspect.FloatType) else "a whole number"
    if expected.gt is not None:
        end = f" and at most {expected.le}" if expected.le is not None else ""
        return f"{kind} above {expected.gt}{end}"
    if expected.ge is not None:
        if expected.ge == expected.le:
            return f"{expected.ge}"
        end = f" to {expected.le}" if expected.le is not None else ""
        return f"{kind} from {expected.ge}{end}"
    return kind


def _phrase_length(sized: Any, unit: str) -> str:
    least = f"{sized.min_length} to " if sized.min_length else "at most "
    return "" if sized.max_length is None else f" of {least}{sized.max_length}{unit}"


def encode_inline(data: Any) -> bytes:
    """Return JSON for a part of a line, which no character in it ends."""
    encoded = _encode(data)
    if encoded.isascii():  # mostly so, and quick to find
        return encoded
    for end, escaped in _LINE_ENDS:
        encoded = encoded.replace(end, escaped)
    return encoded
