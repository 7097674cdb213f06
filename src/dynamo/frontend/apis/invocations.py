"""SageMaker's `POST /invocations`: one path for several APIs, which a request's fields tell apart, as with vLLM."""

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.frontend.apis import error_dialects
from dynamo.frontend.apis.operation import GENERATION_ERRORS, HELLO, Operation
from dynamo.frontend.delivery import delivery
from dynamo.runtime.http import exchange, json_body

_PATH_BY_FIELD = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "text_1": "/v1/score",
    "query": "/v1/rerank",
    "queries": "/v1/score",
}


class Invocation(msgspec.Struct, frozen=True):
    """A request of one of several APIs; the first of the fields after the model that is there says of which."""

    model: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    text_1: Any = None
    query: Any = None
    queries: Any = None


_decode = json_body.RequestDecoder(Invocation).decode


def operations(apis: Sequence[Operation]) -> Sequence[Operation]:
    """Return the operation, which gives each request to the one of these that its fields name."""
    by_path = {entry.path: entry for entry in apis if entry.method == "POST"}
    targets = {field: by_path[path] for field, path in _PATH_BY_FIELD.items()}

    async def invoke(client: exchange.Exchange) -> None:
        try:
            request = await exchange.decode_apart(client.request.body, _decode)
        except errors.InvalidRequest:
            field = "messages"  # where it is decoded again, the error says what is wrong
        else:
            field = next((name for name in targets if getattr(request, name) is not None), "")
        if field:
            pending = targets[field].handler(client)
            if pending is not None:
                await pending
            return
        error = errors.InvalidRequest(f"expected one of the fields {', '.join(targets)}, got none")
        delivery.respond_error(client, error, error_dialects.OPENAI)

    return (
        Operation(
            method="POST",
            path="/invocations",
            handler=invoke,
            summary="A request of one of these APIs, as SageMaker sends it",
            tag="OpenAI",
            request=Invocation,
            request_rules=({"anyOf": [entry.request for entry in targets.values()]},),
            body_factor=max(entry.body_factor for entry in targets.values()),
            answer=dict[str, Any],
            events=dict[str, Any],
            ends_with_done=True,
            errors=GENERATION_ERRORS,
            example={"messages": HELLO, "max_tokens": 60},
        ),
    )
