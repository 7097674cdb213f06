"""How a worker's system port answers what an operator tells it: JSON, and the status of what went wrong."""

from collections.abc import Awaitable, Mapping

import msgspec

from dynamo.base import errors
from dynamo.protocols import model_errors
from dynamo.runtime.http import exchange, server


async def reply(request: exchange.Exchange, work: Awaitable[Mapping[str, object]]) -> None:
    """When it is done. 400 names a field that is wrong, 409 says that it does not fit the worker's state."""
    try:
        said = await work
    except errors.DynamoError as error:
        status = _status(error)
        request.respond(status, server.plain_error(status, str(error), request.request.path))
    else:
        request.respond(200, msgspec.json.encode(said))


def _status(error: errors.DynamoError) -> int:
    match error:
        case model_errors.ModelNotFound():
            return 404
        case errors.Conflict():
            return 409
        case errors.RequestError():
            return 400
        case errors.Unavailable():
            return 503
        case _:
            return 500
