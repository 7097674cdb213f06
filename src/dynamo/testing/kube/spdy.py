"""SPDY/3.1, the server's side, as far as kubectl port-forward and kubectl exec need it: byte streams in one connection.

All versions of kubectl speak it: newer ones try WebSockets first, and come back to SPDY when these are refused.
The client opens all streams; each has headers, which say what it is for. Bytes to a sink that does not take them are
kept up to a bound, behind which the session ends.
"""

import asyncio
import struct
import zlib
from collections.abc import Callable

from dynamo.runtime.http import exchange as exchanges

_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _PING, _WINDOW_UPDATE = 1, 2, 3, 6, 9
_FIN = 1
_PIECE_BYTES = 2**16
_MAX_WAITING_BYTES = 64 * 2**20
# The dictionary with which headers are compressed (draft-mbelshe-httpbis-spdy-00, 2.6.10.1).
_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow "
    "authorization cache-control connection content-base content-encoding content-language content-length "
    "content-location content-md5 content-range content-type date etag expect expires from host if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma "
    "proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url public set-cookie "
    "keep-alive origin"
)
_TAIL = (
    b"100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    b"203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized"
    b"403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr "
    b"May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,"
    b"image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age="
    b"gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
_DICTIONARY = (
    b"".join(
        struct.pack(">I", len(word)) + word.replace("_", " ").encode() for word in _WORDS.split()
    )
    + _TAIL
)


class SpdyStream:
    """One stream. `sink`, or `on_bytes`, takes the client's bytes, which begin to come after `accept`."""

    def __init__(self, session: "SpdySession", number: int, headers: dict[str, str]) -> None:
        self.headers = headers
        self.sink: asyncio.StreamWriter | None = None
        self.on_bytes: Callable[[bytes], None] | None = None
        self._session = session
        self._number = number

    def accept(self) -> None:
        """Confirm the stream to the client."""
        self._session.accept(self._number)

    def write(self, data: bytes) -> None:
        """Send bytes to the client."""
        self._session.send(self._number, data)

    def end(self, data: bytes = b"") -> None:
        """Send the last bytes to the client."""
        self._session.send(self._number, data, _FIN)

    async def copy_from(self, reader: asyncio.StreamReader) -> None:
        """Send all that a reader gives, and end the stream."""
        while data := await reader.read(_PIECE_BYTES):
            await self._session.send_paced(self._number, data)
        self.end()

    def receive(self, data: bytes, *, is_last: int) -> bool:
        """Pass bytes of the client on; return False if too many wait."""
        if self.on_bytes is not None:
            self.on_bytes(data)
        if self.sink is None or self.sink.is_closing():
            return True
        self.sink.write(data)
        if is_last and self.sink.can_write_eof():
            self.sink.write_eof()
        elif is_last:
            self.sink.close()
        return self.sink.transport.get_write_buffer_size() <= _MAX_WAITING_BYTES


class SpdySession:
    """The streams of one connection. `on_stream` is called for each that the client opens."""

    def __init__(
        self, exchange: exchanges.Exchange, on_stream: Callable[[SpdyStream], None]
    ) -> None:
        self.streams: dict[int, SpdyStream] = {}
        self._exchange = exchange
        self._on_stream = on_stream
        self._received = bytearray()
        self._inflater = zlib.decompressobj(zdict=_DICTIONARY)
        self._deflater = zlib.compressobj(zdict=_DICTIONARY)
        self._is_sending = asyncio.Lock()

    def receive(self, data: bytes) -> None:
        """Take bytes of the connection; they may end anywhere in a frame."""
        self._received += data
        while len(self._received) >= 8:
            first, second = struct.unpack_from(">II", self._received)
            end = 8 + (second & 0xFFFFFF)
            if len(self._received) < end:
                return
            body = bytes(self._received[8:end])
            del self._received[:end]
            if first >> 31:
                self._take_control(first & 0xFFFF, body)
            else:
                stream = self.streams.get(first)
                if stream is not None and not stream.receive(body, is_last=second >> 24 & _FIN):
                    self.close()
                elif body:
                    self._send_control(_WINDOW_UPDATE, struct.pack(">II", first, len(body)))

    def _take_control(self, kind: int, body: bytes) -> None:
        if kind == _SYN_STREAM:
            number = struct.unpack_from(">I", body)[0] & 0x7FFFFFFF
            try:
                stream = SpdyStream(self, number, self._decode_headers(body[10:]))
            except (zlib.error, struct.error, UnicodeDecodeError):
                self.close()  # the compression of all later headers depends on these
                return
            self.streams[number] = stream
            self._on_stream(stream)
        elif kind == _PING:
            self._send_control(_PING, body)
        elif kind == _RST_STREAM:
            stream_or_none = self.streams.pop(struct.unpack_from(">I", body)[0] & 0x7FFFFFFF, None)
            if stream_or_none is not None and stream_or_none.sink is not None:
                stream_or_none.sink.close()

    def _decode_headers(self, data: bytes) -> dict[str, str]:
        plain = self._inflater.decompress(data, 2**20)
        texts, position = [], 4
        for _ in range(2 * struct.unpack_from(">I", plain)[0]):
            (length,) = struct.unpack_from(">I", plain, position)
            texts.append(plain[position + 4 : position + 4 + length].decode())
            position += 4 + length
        return {name.lower(): text for name, text in zip(texts[::2], texts[1::2], strict=True)}

    def accept(self, number: int) -> None:
        """Confirm a stream, without headers."""
        headers = self._deflater.compress(struct.pack(">I", 0))
        headers += self._deflater.flush(zlib.Z_SYNC_FLUSH)
        self._send_control(_SYN_REPLY, struct.pack(">I", number) + headers)

    def send(self, number: int, data: bytes, flags: int = 0) -> None:
        """Send bytes of a stream."""
        self._exchange.write(struct.pack(">II", number, flags << 24 | len(data)) + data)

    async def send_paced(self, number: int, data: bytes) -> None:
        """Send bytes of a stream, as fast as the client reads; it is cut off when too much waits for it."""
        async with self._is_sending:
            self.send(number, data)
            await self._exchange.send(b"")

    def _send_control(self, kind: int, body: bytes) -> None:
        self._exchange.write(struct.pack(">HHI", 0x8003, kind, len(body)) + body)

    def close(self) -> None:
        """End the connection, and what the streams are connected to."""
        for stream in self.streams.values():
            if stream.sink is not None:
                stream.sink.close()
        self._exchange.end()
