"""A streamed answer of the APIs whose events have types and an order: messages and responses.

Their requests have one prompt and one choice. As in `stream_delivery`, nothing is sent before the first output, and a
piece of text costs one template.
"""

from typing import Protocol

from dynamo.base import errors
from dynamo.frontend import metrics
from dynamo.frontend.answer import choices, delivery, sse
from dynamo.protocols import generate, openai_usage
from dynamo.runtime.http import exchange


class TypedShape(sse.Shape, Protocol):
    """One whose stream is a play: it begins, speaks and ends. Each gives the events to send."""

    def begin(self, usage: openai_usage.Usage) -> bytes:
        """Before any piece."""
        ...

    def piece(self, piece: choices.Piece) -> bytes:
        """More of the answer, never empty."""
        ...

    def end(self, finish_reason: str, stop_string: str | None, usage: openai_usage.Usage) -> bytes:
        """After all pieces; `stop_string` is the one that ended it."""
        ...

    def error(self, error: errors.DynamoError) -> bytes:
        """Instead of the end."""
        ...


class TypedDelivery(delivery.Delivery):
    """Writes events as outputs come."""

    def __init__(
        self,
        client: exchange.Exchange,
        order: delivery.Order[TypedShape],
        meter: metrics.RequestMeter,
    ) -> None:
        super().__init__(client, order, meter)
        self._shape = order.shape
        (self._choice,) = self.choices
        self._has_begun = False

    def deliver(self, output: generate.Output, first: int = 0) -> None:
        choice = self._choice
        if choice.finish_reason is not None:
            return  # ended by a stop string, which the engine has not heard yet
        self.count_tokens(choice, len(output.token_ids))
        events = b"" if self._has_begun else self._begin(output)
        text, _ = choice.read(output)
        for piece in choice.pieces(text):
            events += self._shape.piece(piece)
        if choice.is_over:
            self.settle(choice)
            self.client.end(events + self._end())
        else:
            self.client.write(events)

    def error_event(self, error: errors.DynamoError) -> bytes:
        return self._shape.error(error)

    def _begin(self, output: generate.Output) -> bytes:
        self._has_begun = True
        self.note_cached(self._choice, output)
        headers = (("cache-control", "no-cache"), *self.order.headers)
        self.client.start_stream(200, content_type=sse.CONTENT_TYPE, headers=headers)
        return self._shape.begin(self.usage())

    def _end(self) -> bytes:
        reason = sse.finish_reason(self._choice)
        return self._shape.end(reason, self._choice.text.stop_reason, self.usage())
