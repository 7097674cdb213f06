"""The request plane's frames: what two processes send each other on one connection, without any I/O.

A frame is a big-endian u32 length and then that many bytes of msgpack: an array that begins with the frame's kind.
One connection carries many streams; the side that opened it (the client) numbers them.

    client → server    Hello · Open · Cancel · Ping
    server → client    Welcome · Step · Reply · Fail · Goodbye · Pong

A stream begins with `Open`. The server answers with any number of `Step` items or `Reply`s, and ends it exactly once:
by naming it in `Step.ended` or by `Fail`. One `Step` frame carries the items of one turn for all streams of the
connection: the cost of many small items, such as tokens, is the number of frames. All items of a connection have one
type, which the decoder is made for; replies are decoded by their readers.

An address may pass to another process while discovery still names the former one. So a client names the instance that
it means with each connection and each stream, and another instance refuses.

`FrameReader` takes bytes as they come and gives frames; what is malformed, too long or of an unknown kind is a
RemoteProtocolError, and nothing else is ever raised.
"""  # decider

import struct
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from dynamo.base import errors
from dynamo.protocols import model_errors  # noqa: F401 (so that each peer knows these errors' codes)

VERSION = 1
MAX_FRAME_BYTES = 32 * 2**20  # DYN_TCP_MAX_MESSAGE_SIZE of the original
MAX_TIMEOUT_S = 1e8
_LENGTH = struct.Struct(">I")
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for a peer's bytes."""
T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The client's first frame."""

    version: int
    peer: str  # a name of the client, for the log
    instance: int = 0  # the instance that is meant; another one refuses; 0: any


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The server's first frame: it speaks this version and serves these endpoints."""

    version: int
    endpoints: tuple[str, ...]


class Open(msgspec.Struct, Generic[T], frozen=True, array_like=True, tag=2):
    """Begin a stream at an endpoint. `body` is the request; the time limit counts from its arrival.

    The client encodes it together with the frame, and the server gets it as msgpack.
    """

    stream: int
    endpoint: str
    body: T
    headers: dict[str, str] = {}
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None
    instance: int = 0  # the instance that is meant, as in `Hello`


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The client waits for this stream no longer, or sends its handler a signal. An unknown stream is no error."""

    stream: int
    # None: cancel; else a number with a meaning that the endpoint defines
    signal: int | None = None


# gc=False: an item holds no cycles, and the collector should not walk the thousands that live for one turn.
class StepItem(msgspec.Struct, Generic[T], frozen=True, array_like=True, gc=False):
    """One item of one stream."""

    stream: int
    item: T


class Step(msgspec.Struct, Generic[T], frozen=True, array_like=True, tag=4, gc=False):
    """The items of one turn for this connection, and the streams that are now complete."""

    items: tuple[StepItem[T], ...]
    ended: tuple[int, ...] = ()


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """An item that its reader decodes."""

    stream: int
    body: msgspec.Raw


class Fail(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The stream has failed; the fields are all that a caller learns of the error."""

    stream: int
    code: str
    message: str
    param: str | None = None  # of a RequestError
    # of an Unavailable or RateLimited
    retry_after_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMEOUT_S)] | None = None

    @classmethod
    def of(cls, stream: int, error: errors.DynamoError) -> "Fail":
        """Make the frame of an error."""
        param = error.param if isinstance(error, errors.RequestError) else None
        retry_after_s = None
        if isinstance(error, errors.Unavailable | errors.RateLimited):
            retry_after_s = min(max(0.0, error.retry_after_s), MAX_TIMEOUT_S)
        # the name of a file may hold what is no text, and a stream without its end would be waited for
        message = str(error).encode(errors="backslashreplace").decode()
        return cls(stream, error.code, message, param, retry_after_s)

    @property
    def error(self) -> errors.DynamoError:
        """The error, of the class that the server raised."""
        return errors.from_wire(
            self.code, self.message, param=self.param, retry_after_s=self.retry_after_s
        )


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The server finishes its open streams and takes no new ones."""

    reason: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The client asks whether the server lives."""

    number: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The server lives."""

    number: int


Frame = Hello | Welcome | Open[Any] | Cancel | Step[Any] | Reply | Fail | Goodbye | Ping | Pong
Decode = Callable[[bytes], Frame]

_encoder = msgspec.msgpack.Encoder()


def encode(frame: Frame) -> bytes:
    """Return a frame with its length. Raises LocalProtocolError if it is too long for any peer."""
    body = _encoder.encode(frame)
    length = len(body)
    if length > MAX_FRAME_BYTES:
        raise errors.LocalProtocolError(
            f"a {type(frame).__name__} frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}"
        )
    return _LENGTH.pack(length) + body


def make_decoder(item_type: Any = Any) -> Decode:
    """Return a function that decodes one frame without its length, with step items of `item_type`.

    The function raises RemoteProtocolError.
    """
    step = Step[item_type]
    kinds: Any = (
        Hello | Welcome | Open[msgspec.Raw] | Cancel | step | Reply | Fail | Goodbye | Ping | Pong
    )
    decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(kinds)

    def decode_frame(body: bytes) -> Frame:
        try:
            return decoder.decode(body)
        except DECODE_ERRORS as error:
            raise errors.RemoteProtocolError(
                f"expected a frame of the request plane: {error}"
            ) from error

    return decode_frame


decode = make_decoder()


class FrameReader:
    """Bytes in, frames out. After an error it must be thrown away with its connection."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES, *, decode: Decode = decode) -> None:
        self._tail = bytearray()  # of what was read: the beginning of a frame
        self._decode = decode
        self.max_frame_bytes = max_frame_bytes  # may be raised once the peer is known

    def feed(self, data: bytes) -> list[Frame]:
        """Return all frames that are complete with `data`. Raises RemoteProtocolError."""
        buffer: bytes | bytearray = data  # nearly always whole frames, which need not be kept
        if self._tail:
            self._tail += data
            buffer = self._tail
        frames: list[Frame] = []
        start, num_bytes = 0, len(buffer)
        while num_bytes - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self.max_frame_bytes:
                raise errors.RemoteProtocolError(
                    f"a frame of {length} bytes was announced; the limit is {self.max_frame_bytes}"
                )
            end = start + _LENGTH.size + length
            if num_bytes < end:
                break
            frames.append(self._decode(bytes(buffer[start + _LENGTH.size : end])))
            start = end
        if start or buffer is data:
            self._tail = bytearray(buffer[start:])
        return frames
