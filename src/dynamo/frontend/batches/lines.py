"""OpenAI's files and batches, in its names (https://platform.openai.com/docs/api-reference/batch), and a batch's lines.

A line of the input file is {"custom_id", "method": "POST", "url", "body"}; its answer in the output file or the error
file has the same custom_id.
"""  # decider

import codecs
import collections
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from dynamo.base import errors
from dynamo.frontend.delivery import sse
from dynamo.protocols import model_errors
from dynamo.runtime.http import json_body

DAY_S = 24 * 3600
KEPT_S = 30 * DAY_S  # how long files are kept by default, as OpenAI keeps those of batches
MIN_KEPT_S = 3600
_RESPONSES = "/v1/responses"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", _RESPONSES)
Purpose = Literal["batch", "batch_output"]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: frozenset[str] = frozenset(("failed", "completed", "expired", "cancelled"))
_MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
_MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was uploaded, or that a batch has written. Times are seconds since 1970."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class FilePage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ExpiryRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a file is kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=MIN_KEPT_S, le=KEPT_S)]


class UploadForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an upload (`multipart/form-data`)."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request to answer all lines of a file."""

    input_file_id: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], msgspec.Meta(max_length=16)] | None = (
        None
    )
    output_expires_after: ExpiryRule | None = None

    def check(self) -> None:
        """Raise InvalidRequest for an endpoint that takes no batches."""
        if self.endpoint not in ENDPOINTS:
            raise errors.InvalidRequest.of_param(
                "endpoint", f"expected one of {', '.join(ENDPOINTS)}, got {self.endpoint[:100]!r}"
            )


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a line of the input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


FILE_GONE = LineError(code="file_not_found", message="the input file is gone")


class LineErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The reasons for which a batch failed."""

    data: list[LineError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many lines a batch has, and how many are answered, and by an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of all answers, without those of lines that failed."""

    input_tokens: int
    input_tokens_details: sse.PromptTokensDetails
    output_tokens: int
    output_tokens_details: sse.CompletionTokensDetails
    total_tokens: int


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    # once it has ended
    model: str | None = None
    usage: BatchUsage | None = None
    metadata: dict[str, Any] | None = None

    def with_status(self, status: Status, now_s: float, **fields: Any) -> "Batch":
        """Return the batch in another status, which it has since now."""
        return msgspec.structs.replace(
            self, status=status, **{f"{status}_at": int(now_s)}, **fields
        )


class BatchPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_fields(data: Sequence[FileObject | Batch], has_more: bool) -> dict[str, Any]:
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return {"data": data, "first_id": first_id, "last_id": last_id, "has_more": has_more}


class PageOptions(NamedTuple):
    """What part of a list is asked for: newest first, unless it is ascending."""

    limit: int = 20
    after: str | None = None
    is_ascending: bool = False


MAX_LINES = 50_000  # of one file, as with OpenAI
MAX_ERRORS = 100  # of a file that are reported
LOW_PRIORITY = 2**20  # as vLLM and OpenAI's body write it: a higher value is served later
_WITHOUT_PRIORITY = frozenset(("/v1/embeddings",))
# there is no worker now, or no room: as long as the batch may take
_RETRIED = frozenset((429, 503, 529))
_FAILED = frozenset((500, 502, 504))  # perhaps because of a worker that died: a few times
MAX_ATTEMPTS = 3
_MAX_PAUSE_S = 30.0


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a batch."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class _ErrorFields(msgspec.Struct, frozen=True):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields = _ErrorFields()


_decode_line = msgspec.json.Decoder(BatchLine).decode
_encode = msgspec.json.Encoder().encode


class LineRequest(NamedTuple):
    """The request of a line, as the frontend's handlers take it."""

    number: int
    custom_id: str
    model: str
    body: bytes


class InvalidLine(Exception):
    """A line is no request of this batch; `args[0]` is the `LineError`."""

    @property
    def reason(self) -> LineError:
        reason: LineError = self.args[0]
        return reason


def parse(row: bytes, number: int, endpoint: str, max_body_bytes: int) -> BatchLine:
    """Return the request in this row, the first of which has the number 1. Raises InvalidLine."""
    if len(row) > max_body_bytes:
        message = f"expected at most {max_body_bytes} bytes, got more"
        raise _invalid("line_too_large", message, number)
    try:
        json_body.check_structure(row)
        line = _decode_line(row.removeprefix(codecs.BOM_UTF8))
    except (
        errors.InvalidRequest,
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:
        message = f"expected a JSON object with custom_id, method, url and body: {error}"
        raise _invalid("invalid_json_line", message, number) from error
    if line.url != endpoint:
        message = f"expected the url {endpoint}, which the batch names, got {line.url[:100]!r}"
        raise _invalid("mismatched_url", message, number, "url")
    if line.body.get("stream"):
        message = "expected no stream, because an answer goes to a file: leave `stream` out"
        raise _invalid("invalid_request", message, number, "body.stream")
    return line


def _invalid(code: str, message: str, number: int, param: str | None = None) -> InvalidLine:
    return InvalidLine(LineError(code=code, message=message, line=number, param=param))


class FileCheck:
    """The check of a whole file, row by row: each is a request, and no custom_id comes twice."""

    def __init__(self, endpoint: str, max_body_bytes: int) -> None:
        self.num_lines = 0
        self.errors: list[LineError] = []
        self._endpoint = endpoint
        self._max_body_bytes = max_body_bytes
        self._number_by_id: dict[str, int] = {}

    def add(self, row: bytes, number: int) -> None:
        self.num_lines += 1
        try:
            line = parse(row, number, self._endpoint, self._max_body_bytes)
            first = self._number_by_id.setdefault(line.custom_id, number)
            if first != number:
                message = (
                    f"expected a custom_id of its own, got {line.custom_id[:100]!r} of line {first}"
                )
                raise _invalid("duplicate_custom_id", message, number, "custom_id")
        except InvalidLine as error:
            self.errors.append(error.reason)

    @property
    def is_over(self) -> bool:
        """Return whether the file is refused whatever follows."""
        return len(self.errors) >= MAX_ERRORS or self.num_lines > MAX_LINES

    def result(self) -> list[LineError]:
        """Return what is wrong with the file; nothing if its lines can be answered."""
        if not self.num_lines:
            return [LineError(code="empty_file", message="expected a line at least, got none")]
        if self.num_lines > MAX_LINES:
            message = f"expected at most {MAX_LINES} lines, got more: use several batches"
            return [LineError(code="too_many_lines", message=message)]
        return self.errors


def request_body(line: BatchLine) -> bytes:
    """Return the JSON body of the line's request, which waits behind requests of clients that look on.

    A response is stored only if the line says so: the output file has it, and a batch could displace all others.
    """
    if line.url in _WITHOUT_PRIORITY:
        return _encode(line.body)
    body = line.body | {"priority": LOW_PRIORITY}
    if line.url == _RESPONSES and body.get("store") is None:
        body["store"] = False
    return _encode(body)


MODEL_MISSING = model_errors.ModelNotFound.code
# Of requests that may be the reason why a worker died: asked again and again, they could end all of them.
STATUS_BY_CODE = {model_errors.SuspectRequest.code: 400, errors.WorkerDied.code: 500}


def error_code(status: int, body: bytes) -> str:
    """Return the code of an error; "" for other answers, and for an error without one."""
    if status < 400:
        return ""
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.code or ""
    except msgspec.DecodeError:
        return ""


def pause_s(status: int, num_attempts: int) -> float | None:
    """Return the seconds until the line is asked again after so many attempts of a status; None if its answer stands.

    What lacks a model that may come (again) counts as 503.
    """
    if status in _RETRIED or (status in _FAILED and num_attempts < MAX_ATTEMPTS):
        return min(0.25 * 2.0 ** min(num_attempts, 10), _MAX_PAUSE_S)
    return None


def answer_row(line_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """Return the row of an answer with this status and JSON body, for the output file or the error file."""
    response = {"status_code": status, "request_id": line_id, "body": msgspec.Raw(body)}
    row = {"id": line_id, "custom_id": custom_id, "response": response, "error": None}
    return sse.encode_line(row)


class _AnswerBody(msgspec.Struct, frozen=True):
    model: str = ""
    usage: dict[str, Any] | None = None


class _LineResponse(msgspec.Struct, frozen=True):
    body: _AnswerBody = _AnswerBody()


class _AnswerRow(msgspec.Struct, frozen=True):
    response: _LineResponse = _LineResponse()


_decode_answer = msgspec.json.Decoder(_AnswerRow).decode
_COUNTED_TOKENS = (
    ("input", "prompt", "cached_tokens"),
    ("output", "completion", "reasoning_tokens"),
)


def model_of(row: bytes) -> str:
    """Return the name of the model in the row of an answer that is no error."""
    return _decode_answer(row).response.body.model


def summarize(rows: Iterable[bytes]) -> dict[str, Any]:
    """Return the model of all answers that are no errors, if it is one, and their usage, as the fields of a batch.

    Responses count tokens by names of their own.
    """
    counts, models = collections.Counter[str](), set()
    for row in rows:
        body = _decode_answer(row).response.body
        models.add(body.model)
        usage = body.usage or {}
        for name, other_name, detail in _COUNTED_TOKENS:
            prefix = name if f"{name}_tokens" in usage else other_name
            counts[name] += usage.get(f"{prefix}_tokens", 0)
            counts[detail] += (usage.get(f"{prefix}_tokens_details") or {}).get(detail, 0)
    usage_sum = BatchUsage(
        input_tokens=counts["input"],
        input_tokens_details=sse.PromptTokensDetails(cached_tokens=counts["cached_tokens"]),
        output_tokens=counts["output"],
        output_tokens_details=sse.CompletionTokensDetails(
            reasoning_tokens=counts["reasoning_tokens"]
        ),
        total_tokens=counts["input"] + counts["output"],
    )
    return {"model": models.pop() if len(models) == 1 else None, "usage": usage_sum}


def expired_row(line_id: str, custom_id: str) -> bytes:
    """Return the row of a line that was not answered before its batch expired."""
    error = {
        "code": "batch_expired",
        "message": "the batch expired before this line was answered: ask for it in another batch",
    }
    row = {"id": line_id, "custom_id": custom_id, "response": None, "error": error}
    return sse.encode_line(row)
