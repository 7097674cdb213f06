"""An upload: the form of a request (multipart/form-data), with a file that goes to disk while it arrives.

Pieces are written as they come, without a thread: some 64 kB at a time into the page cache take 30 µs.
"""

import contextlib
from typing import BinaryIO

from python_multipart import exceptions, multipart

from dynamo.base import errors
from dynamo.frontend.batches import journal, lines
from dynamo.runtime.http import exchange, parser

_MAX_FIELD_BYTES = 1024
_FORM = "multipart/form-data"
_EXPIRY = "expires_after[seconds]"
_FIELDS = ("purpose", "expires_after[anchor]", _EXPIRY)
_MAX_IGNORED = 100  # names of other fields that are kept
_CHECKED_BYTES = 4 * 2**20  # of an upload, after which its room is looked at again


class FileUpload:
    """One upload, an `exchange.BodySink`."""

    max_bytes = journal.MAX_FILE_BYTES + 2**20  # of the form; with its other fields and boundaries

    def __init__(self, request: exchange.Request, files: journal.BatchJournal) -> None:
        """Raises RequestRefused for a body of another kind, or if nothing can be written."""
        kind, options = multipart.parse_options_header(request.headers.get("content-type"))
        if kind != _FORM.encode() or not options.get(b"boundary"):
            raise parser.RequestRefused(
                415,
                f"expected the header Content-Type: {_FORM} with a boundary, and a file in the body",
            )
        if request.headers.get("content-encoding", "identity") != "identity":
            raise parser.RequestRefused(415, "expected a form without Content-Encoding")
        try:
            self._parser = multipart.MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._add_data,
                    "on_header_begin": self._begin_header,
                    "on_header_field": self._add_header_name,
                    "on_header_value": self._add_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_end": self._end,
                },
                max_size=self.max_bytes,
            )
        except exceptions.FormParserError as error:
            raise parser.RequestRefused(400, f"expected a form ({_FORM}): {error}") from error
        self._files = files
        self._num_unchecked = 0  # bytes
        try:
            files.prepare()
            self.partial = files.new_partial()
            self._file: BinaryIO = journal.open_private(self.partial)
        except (OSError, errors.Unavailable) as error:
            raise parser.RequestRefused(503, str(error)) from error
        self.filename: str | None = None
        self._fields: dict[str, bytes] = {}
        self.ignored_fields: list[str] = []
        self._field = ""  # of the present part
        self._is_complete = False
        self._header_name = self._header_value = b""
        self._disposition = b""

    def write(self, piece: bytes) -> None:
        """Take the next bytes of the form. Raises RequestRefused."""
        try:
            self._parser.write(piece)
        except exceptions.FormParserError as error:
            raise parser.RequestRefused(400, f"expected a form ({_FORM}): {error}") from error
        except OSError as error:
            raise parser.RequestRefused(503, _describe(error)) from error
        self._num_unchecked += len(piece)
        if self._num_unchecked >= _CHECKED_BYTES:
            self._num_unchecked = 0
            self._check_room()

    def _check_room(self) -> None:
        """Raise RequestRefused if all that is being uploaded does not fit beside the files that are kept."""
        num_bytes = 0
        for partial in self.partial.parent.iterdir():
            with contextlib.suppress(FileNotFoundError):
                num_bytes += partial.stat().st_size
        try:
            self._files.check_room(num_bytes)
        except errors.DynamoError as error:
            status = 400 if isinstance(error, errors.RequestError) else 503
            raise parser.RequestRefused(status, str(error)) from error

    def complete(self) -> int:
        """Return how many seconds the file is to be kept, once all of the form is here.

        Raises InvalidRequest, or Unavailable if the last bytes cannot be written.
        """
        if not self._is_complete:
            raise errors.InvalidRequest("expected a complete form, got a part of one", param="file")
        if self.filename is None:
            raise errors.InvalidRequest("expected a part `file` with a filename", param="file")
        purpose = self._fields.get("purpose", b"").decode("utf-8", "replace")
        if purpose != "batch":
            raise errors.InvalidRequest(
                f"expected the purpose batch, the only one that is served, got {purpose[:50]!r}",
                param="purpose",
            )
        seconds = self._fields.get(_EXPIRY, b"%d" % lines.KEPT_S)
        if (
            not seconds.isdigit()
            or len(seconds) > 12
            or not lines.MIN_KEPT_S <= int(seconds) <= lines.KEPT_S
        ):
            raise errors.InvalidRequest(
                f"expected seconds from {lines.MIN_KEPT_S} to {lines.KEPT_S}", param=_EXPIRY
            )
        try:
            self._file.close()
        except OSError as error:
            raise errors.Unavailable(_describe(error)) from error
        return int(seconds)

    def close(self) -> None:
        """Delete what has arrived, unless it was kept. Idempotent."""
        with contextlib.suppress(OSError):  # what could not be written is tried once more
            self._file.close()
        self.partial.unlink(missing_ok=True)

    # What the parser calls, in the order of a form.

    def _begin_part(self) -> None:
        self._disposition = b""

    def _begin_header(self) -> None:
        self._header_name = self._header_value = b""

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value

    def _end_headers(self) -> None:
        _, options = multipart.parse_options_header(self._disposition)
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        if self._field == "file":
            if self.filename is not None:
                raise parser.RequestRefused(400, "expected one file, got two")
            self.filename = options.get(b"filename", b"upload").decode("utf-8", "replace")[:255]
        elif self._field in self._fields:
            raise parser.RequestRefused(400, f"expected one field {self._field}, got two")
        elif self._field in _FIELDS:
            self._fields[self._field] = b""
        elif len(self.ignored_fields) < _MAX_IGNORED:
            self.ignored_fields.append(self._field)

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == "file":
            self._file.write(memoryview(data)[start:end])
        if self._field not in self._fields:
            return
        self._fields[self._field] += data[start:end]
        if len(self._fields[self._field]) > _MAX_FIELD_BYTES:
            raise parser.RequestRefused(
                400, f"expected at most {_MAX_FIELD_BYTES} bytes in the field {self._field}"
            )

    def _end(self) -> None:
        self._is_complete = True


def _describe(error: OSError) -> str:
    return f"the file cannot be written: {error.strerror}"
