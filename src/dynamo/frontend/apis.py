"""The APIs that generate text: how to read a request, prepare it, and shape its answer."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dynamo.frontend import identity, metrics
from dynamo.frontend.answer import (
    chat_shape,
    completion_shape,
    delivery,
    message_shape,
    sse,
    stream_delivery,
    typed_delivery,
)
from dynamo.preprocess import preprocessor
from dynamo.protocols import (
    anthropic,
    anthropic_blocks,
    anthropic_errors,
    openai_chat,
    openai_completions,
    openai_errors,
    openai_fields,
)
from dynamo.runtime.http import exchange

REQUEST_ID_HEADERS = ("x-request-id", "x-dynamo-request-id")
R = TypeVar("R", bound=openai_fields.GenerationFields)
S = TypeVar("S", bound=sse.Shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Api(Generic[R, S]):
    """One way to ask for text."""

    endpoint: str  # the label in metrics
    decode: Callable[[bytes], R]
    prepare: Callable[
        [preprocessor.Preprocessor, R, str], Awaitable[Sequence[preprocessor.Prepared]]
    ]
    shape: Callable[[R, identity.Identity], S]
    stream: Callable[
        [exchange.Exchange, delivery.Order[S], metrics.RequestMeter], delivery.Delivery
    ]
    dialect: delivery.Dialect = openai_errors
    id_headers: Sequence[str] = REQUEST_ID_HEADERS


async def prepare_chat(
    preparer: preprocessor.Preprocessor, request: openai_chat.ChatRequest, request_id: str
) -> Sequence[preprocessor.Prepared]:
    """The one prompt of a chat."""
    return (await preparer.chat(request, request_id),)


async def _prepare_completion(
    preparer: preprocessor.Preprocessor,
    request: openai_completions.CompletionRequest,
    request_id: str,
) -> Sequence[preprocessor.Prepared]:
    return await preparer.completion(request, request_id)


CHAT = Api(
    endpoint="chat_completions",
    decode=openai_chat.decode,
    prepare=prepare_chat,
    shape=chat_shape.ChatShape,
    stream=stream_delivery.StreamDelivery,
)
COMPLETIONS = Api(
    endpoint="completions",
    decode=openai_completions.decode,
    prepare=_prepare_completion,
    shape=completion_shape.CompletionShape,
    stream=stream_delivery.StreamDelivery,
)
MESSAGES = Api(
    endpoint="messages",
    decode=lambda body: anthropic_blocks.chat_of(anthropic.decode(body)),
    prepare=prepare_chat,
    shape=lambda request, who: message_shape.MessageShape(
        who.request_id, who.model, shows_thoughts=request.template_args[anthropic_blocks.THINKING]
    ),
    stream=typed_delivery.TypedDelivery,
    dialect=anthropic_errors,
    id_headers=(*REQUEST_ID_HEADERS, "request-id"),
)
