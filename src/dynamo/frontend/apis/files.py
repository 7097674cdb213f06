"""OpenAI's files (`/v1/files`): the input of batches and their output."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import parse_qsl

from dynamo.base import errors
from dynamo.frontend.apis import error_dialects
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    ANY_ID,
    ApiContext,
    Operation,
    add_request_id,
)
from dynamo.frontend.batches import journal, objects, upload
from dynamo.frontend.delivery import delivery, sse
from dynamo.runtime.http import exchange

PATH = "/v1/files"
_MAX_LIMIT = 10_000  # OpenAI's
_PIECE_BYTES = 256 * 2**10
_ERRORS = (*ACCESS_ERRORS, 404, 503)


def answer_from_disk(
    answer: Callable[[exchange.Exchange], Any], announce: Callable[[], None] = lambda: None
) -> exchange.Handler:
    """Return a handler that answers by the object that `answer` returns in a thread, and then calls `announce`."""

    async def handle(client: exchange.Exchange) -> None:
        try:
            body = sse.encode(await asyncio.to_thread(answer, client))
        except errors.DynamoError as error:
            delivery.respond_error(client, error, error_dialects.OPENAI)
        else:
            client.respond(200, body)
            announce()

    return add_request_id(handle)


def page_options(
    client: exchange.Exchange, max_limit: int
) -> tuple[journal.PageOptions, str | None]:
    """Return what page the query asks for, and of what purpose. Raises InvalidRequest."""
    query = dict(parse_qsl(client.request.query))
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= max_limit:
        raise errors.InvalidRequest(
            f"limit: expected a number from 1 to {max_limit}, got {limit[:20]!r}", param="limit"
        )
    if order not in ("asc", "desc"):
        raise errors.InvalidRequest(
            f"order: expected 'asc' or 'desc', got {order[:20]!r}", param="order"
        )
    options = journal.PageOptions(int(limit), query.get("after"), order == "asc")
    return options, query.get("purpose")


def operations(context: ApiContext) -> Sequence[Operation]:
    """Return the operations of this API."""
    files, tenant_of = context.batches.journal, context.admission.tenant_of

    def keep_upload(client: exchange.Exchange) -> objects.FileObject:
        arrived = client.request.sink
        if not isinstance(arrived, upload.FileUpload):
            raise errors.InvalidRequest("expected a form with a file, got no body", param="file")
        kept_s = arrived.complete()
        return files.add_file(
            arrived.partial,
            tenant=tenant_of(client),
            filename=cast(str, arrived.filename),
            kept_s=kept_s,
        )

    def list_files(client: exchange.Exchange) -> objects.FilePage:
        return files.list_files(tenant_of(client), *page_options(client, _MAX_LIMIT))

    def show_file(client: exchange.Exchange) -> objects.FileObject:
        return files.find_file(_file_id(client), tenant_of(client))

    def delete_file(client: exchange.Exchange) -> objects.DeletedFile:
        files.delete_file(_file_id(client), tenant_of(client))
        return objects.DeletedFile(id=_file_id(client))

    return (
        Operation(
            method="POST",
            path=PATH,
            handler=answer_from_disk(keep_upload),
            summary="Upload the lines of a batch",
            tag="Files and batches",
            request=objects.UploadForm,
            request_media_type="multipart/form-data",
            example={"purpose": "batch", "file": "@requests.jsonl"},
            answer=objects.FileObject,
            errors=(400, *ACCESS_ERRORS, 408, 413, 415, 503),
        ),
        Operation(
            method="GET",
            path=PATH,
            handler=answer_from_disk(list_files),
            summary="Files, newest first",
            tag="Files and batches",
            answer=objects.FilePage,
            errors=(400, *_ERRORS),
        ),
        Operation(
            method="GET",
            path=f"{PATH}/{ANY_ID}",
            handler=answer_from_disk(show_file),
            summary="One of them",
            tag="Files and batches",
            answer=objects.FileObject,
            errors=_ERRORS,
        ),
        Operation(
            method="DELETE",
            path=f"{PATH}/{ANY_ID}",
            handler=answer_from_disk(delete_file),
            summary="Delete a file",
            tag="Files and batches",
            answer=objects.DeletedFile,
            errors=(*_ERRORS, 409),
        ),
        Operation(
            method="GET",
            path=f"{PATH}/{ANY_ID}/content",
            handler=add_request_id(functools.partial(_send_content, context)),
            summary="The content of a file",
            tag="Files and batches",
            answer="application/octet-stream",
            errors=_ERRORS,
        ),
    )


async def _send_content(context: ApiContext, client: exchange.Exchange) -> None:
    """Send a file piece by piece, as fast as its client reads."""
    read = functools.partial(
        context.batches.journal.read_file, _file_id(client), context.admission.tenant_of(client)
    )
    try:
        piece = await asyncio.to_thread(read, 0, _PIECE_BYTES)
    except errors.DynamoError as error:
        delivery.respond_error(client, error, error_dialects.OPENAI)
        return
    client.start_stream(200, content_type="application/octet-stream")
    offset = 0
    while piece and not client.is_closed:
        await client.send(piece)
        offset += len(piece)
        piece = await asyncio.to_thread(read, offset, _PIECE_BYTES)
    client.end()


def _file_id(client: exchange.Exchange) -> str:
    return client.request.path.removeprefix(PATH + "/").partition("/")[0]
