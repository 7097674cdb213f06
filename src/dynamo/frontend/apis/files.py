"""OpenAI's files and batches: the input of batches and their output, and the lines of a file that are answered.

Batches are answered beside and behind the requests of other clients.
"""

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
    READ_ERRORS,
    Operation,
    Operations,
    RequestHandlers,
    add_request_id,
)
from dynamo.frontend.batches import journal, lines, runner, upload
from dynamo.frontend.delivery import delivery, sse
from dynamo.runtime.http import exchange, json_body

PATH, BATCHES_PATH = "/v1/files", "/v1/batches"
_MAX_FILES, _MAX_BATCHES, _DEFAULT_BATCHES = 10_000, 100, 20  # of a page, as with OpenAI
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
    client: exchange.Exchange, max_limit: int, default_limit: int
) -> tuple[lines.PageOptions, str | None]:
    """Return what page the query asks for, and of what purpose. Raises InvalidRequest."""
    query = dict(parse_qsl(client.request.query))
    limit, order = query.get("limit", str(default_limit)), query.get("order", "desc")
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= max_limit:
        raise errors.InvalidRequest.of_param(
            "limit", f"expected a number from 1 to {max_limit}, got {limit[:20]!r}"
        )
    if order not in ("asc", "desc"):
        raise errors.InvalidRequest.of_param(
            "order", f"expected 'asc' or 'desc', got {order[:20]!r}"
        )
    options = lines.PageOptions(int(limit), query.get("after"), order == "asc")
    return options, query.get("purpose")


def operations(handlers: RequestHandlers, batches: runner.BatchRunner) -> Sequence[Operation]:
    api = Operations(wrap=answer_from_disk, tag="Files and batches")
    _declare_files(api, batches.journal, handlers)
    _declare_batches(api, handlers, batches)
    return api.entries


def _declare_files(api: Operations, files: journal.BatchJournal, handlers: RequestHandlers) -> None:
    tenant_of, report_ignored = handlers.rights.tenant_of, handlers.pipeline.unknown.report
    one_file = f"{PATH}/{ANY_ID}"

    @api.post(
        PATH,
        "Upload the lines of a batch",
        request=lines.UploadForm,
        request_media_type="multipart/form-data",
        example={"purpose": "batch", "file": "@requests.jsonl"},
        answer=lines.FileObject,
        errors=(400, *ACCESS_ERRORS, 408, 413, 415, 503),
    )
    def keep_upload(client: exchange.Exchange) -> lines.FileObject:
        arrived = client.request.sink
        if not isinstance(arrived, upload.FileUpload):
            raise errors.InvalidRequest("expected a form with a file, got no body", param="file")
        kept_s = arrived.complete()
        report_ignored(client, arrived.ignored_fields)
        return files.add_file(
            arrived.partial,
            tenant=tenant_of(client),
            filename=cast(str, arrived.filename),
            kept_s=kept_s,
        )

    @api.get(PATH, "Files, newest first", answer=lines.FilePage, errors=(400, *_ERRORS))
    def list_files(client: exchange.Exchange) -> lines.FilePage:
        return files.list_files(tenant_of(client), *page_options(client, _MAX_FILES, _MAX_FILES))

    @api.get(one_file, "One of them", answer=lines.FileObject, errors=_ERRORS)
    def show_file(client: exchange.Exchange) -> lines.FileObject:
        return files.find_file(_object_id(client), tenant_of(client))

    @api.declare(
        "DELETE", one_file, "Delete a file", answer=lines.DeletedFile, errors=(*_ERRORS, 409)
    )
    def delete_file(client: exchange.Exchange) -> lines.DeletedFile:
        files.delete_file(_object_id(client), tenant_of(client))
        return lines.DeletedFile(id=_object_id(client))

    @api.get(
        f"{one_file}/content",
        "The content of a file",
        wrap=add_request_id,
        answer="application/octet-stream",
        errors=_ERRORS,
    )
    async def send_content(client: exchange.Exchange) -> None:
        """Send a file piece by piece, as fast as its client reads."""
        file_id, tenant = _object_id(client), tenant_of(client)
        try:
            content = await asyncio.to_thread(files.open_file, file_id, tenant)
        except errors.DynamoError as error:
            delivery.respond_error(client, error, error_dialects.OPENAI)
            return
        with content:
            client.start_stream(200, content_type="application/octet-stream")
            while not client.is_closed and client.request.method != "HEAD":
                piece = await asyncio.to_thread(content.read, _PIECE_BYTES)
                if not piece:
                    break
                await client.send(piece)
        client.end()


def _declare_batches(
    api: Operations, handlers: RequestHandlers, batches: runner.BatchRunner
) -> None:
    rights, unknown = handlers.rights, handlers.pipeline.unknown
    decode = json_body.RequestDecoder(lines.BatchRequest).decode
    answer_and_wake = functools.partial(answer_from_disk, announce=batches.wake)

    @api.post(
        BATCHES_PATH,
        "Answer all lines of a file",
        wrap=lambda answer: handlers.accepted(answer_and_wake(answer)),
        request=lines.BatchRequest,
        request_details={"endpoint": {"enum": list(lines.ENDPOINTS)}},
        example={"input_file_id": "ID", "endpoint": lines.ENDPOINTS[0], "completion_window": "24h"},
        answer=lines.Batch,
        errors=READ_ERRORS,
    )
    def begin_batch(client: exchange.Exchange) -> lines.Batch:
        asked, tenant = unknown.decode_here(client, decode), rights.tenant_of(client)
        return batches.journal.add_batch(asked, tenant, rights.key_name_of(client))

    @api.get(BATCHES_PATH, "Batches, newest first", answer=lines.BatchPage, errors=(400, *_ERRORS))
    def list_batches(client: exchange.Exchange) -> lines.BatchPage:
        options, _ = page_options(client, _MAX_BATCHES, _DEFAULT_BATCHES)
        return batches.journal.list_batches(rights.tenant_of(client), options)

    one_batch = f"{BATCHES_PATH}/{ANY_ID}"

    @api.get(one_batch, "One of them, with its progress", answer=lines.Batch, errors=_ERRORS)
    def show_batch(client: exchange.Exchange) -> lines.Batch:
        return batches.journal.find_batch(_object_id(client), rights.tenant_of(client))

    @api.post(
        f"{one_batch}/cancel",
        "Cancel a batch; what is answered already goes into its files",
        wrap=answer_and_wake,
        answer=lines.Batch,
        errors=(*_ERRORS, 409),
    )
    def cancel_batch(client: exchange.Exchange) -> lines.Batch:
        return batches.journal.cancel_batch(_object_id(client), rights.tenant_of(client))


def _object_id(client: exchange.Exchange) -> str:
    """Return the id in a path such as /v1/files/ID/content."""
    return client.request.path.split("/")[3]
