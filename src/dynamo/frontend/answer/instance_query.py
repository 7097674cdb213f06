"""The annotation `query_instance_id`: who would answer, without asking them to.

A gateway before us asks so, and sends the request itself by and by, with the worker's id and the tokens that it was
told. Both are events of a stream that holds nothing else.
"""

from dynamo.frontend.answer import delivery, sse
from dynamo.runtime.http import exchange

NAME = "query_instance_id"


def respond(caller: exchange.Exchange, order: delivery.Order[sse.Shape], instance_id: int) -> None:
    """The whole answer."""
    headers = (("cache-control", "no-cache"), *order.headers)
    caller.start_stream(200, content_type=sse.CONTENT_TYPE, headers=headers)
    found = sse.annotation("worker_instance_id", str(instance_id))
    found += sse.annotation("token_data", order.annotation("token_ids"))
    caller.end(found + sse.DONE)
