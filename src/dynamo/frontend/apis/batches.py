"""OpenAI's batches (`/v1/batches`): the lines of a file, answered beside and behind the requests of other clients."""

from collections.abc import Sequence

from dynamo.frontend.apis import error_dialects, files
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    ANY_ID,
    READ_ERRORS,
    ApiContext,
    Operation,
)
from dynamo.frontend.batches import objects
from dynamo.runtime.http import exchange, json_body

PATH = "/v1/batches"
_MAX_LIMIT = 100
_ERRORS = (*ACCESS_ERRORS, 404, 503)


def operations(context: ApiContext) -> Sequence[Operation]:
    """Return the operations of this API."""
    batches, admission = context.batches, context.admission
    decode = json_body.RequestDecoder(objects.BatchRequest).decode

    def begin_batch(client: exchange.Exchange) -> objects.Batch:
        key = admission.key_of(client)
        asked, tenant = decode(client.request.body), admission.tenant_of(client)
        return batches.journal.add_batch(asked, tenant, key.name if key else None)

    def list_batches(client: exchange.Exchange) -> objects.BatchPage:
        options, _ = files.page_options(client, _MAX_LIMIT)
        return batches.journal.list_batches(admission.tenant_of(client), options)

    def show_batch(client: exchange.Exchange) -> objects.Batch:
        return batches.journal.find_batch(_batch_id(client), admission.tenant_of(client))

    def cancel_batch(client: exchange.Exchange) -> objects.Batch:
        return batches.journal.cancel_batch(_batch_id(client), admission.tenant_of(client))

    answer_begin = files.answer_from_disk(begin_batch, batches.wake)
    return (
        Operation(
            method="POST",
            path=PATH,
            handler=lambda client: (
                answer_begin(client) if context.accept(client, error_dialects.OPENAI) else None
            ),
            summary="Answer all lines of a file",
            tag="Files and batches",
            request=objects.BatchRequest,
            request_details={"endpoint": {"enum": list(objects.ENDPOINTS)}},
            example={
                "input_file_id": "ID",
                "endpoint": objects.ENDPOINTS[0],
                "completion_window": "24h",
            },
            answer=objects.Batch,
            errors=READ_ERRORS,
        ),
        Operation(
            method="GET",
            path=PATH,
            handler=files.answer_from_disk(list_batches),
            summary="Batches, newest first",
            tag="Files and batches",
            answer=objects.BatchPage,
            errors=(400, *_ERRORS),
        ),
        Operation(
            method="GET",
            path=f"{PATH}/{ANY_ID}",
            handler=files.answer_from_disk(show_batch),
            summary="One of them, with its progress",
            tag="Files and batches",
            answer=objects.Batch,
            errors=_ERRORS,
        ),
        Operation(
            method="POST",
            path=f"{PATH}/{ANY_ID}/cancel",
            handler=files.answer_from_disk(cancel_batch, batches.wake),
            summary="Cancel a batch; what is answered already goes into its files",
            tag="Files and batches",
            answer=objects.Batch,
            errors=(*_ERRORS, 409),
        ),
    )


def _batch_id(client: exchange.Exchange) -> str:
    return client.request.path.removeprefix(PATH + "/").partition("/")[0]
