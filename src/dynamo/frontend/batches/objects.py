"""The objects of OpenAI's files and batches API, in its names (https://platform.openai.com/docs/api-reference/batch)."""

from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors

DAY_S = 24 * 3600
KEPT_S = 30 * DAY_S  # how long files are kept by default, as OpenAI keeps those of batches
MIN_KEPT_S = 3600
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
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


class ExpiryRule(msgspec.Struct, frozen=True, kw_only=True):
    """How long a file is kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=MIN_KEPT_S, le=KEPT_S)]


class UploadForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an upload (`multipart/form-data`)."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
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
            raise errors.InvalidRequest(
                f"endpoint: expected one of {', '.join(ENDPOINTS)}, got {self.endpoint[:100]!r}",
                param="endpoint",
            )


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a line of the input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The reasons for which a batch failed."""

    data: list[LineError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many lines a batch has, and how many are answered, and by an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


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
