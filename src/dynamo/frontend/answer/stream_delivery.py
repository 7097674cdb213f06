"""A streamed answer: one server-sent event for each output of the engine. `deliver` is the hot path of the frontend."""

from collections.abc import Sequence
from typing import Any

from dynamo.frontend import metrics
from dynamo.frontend.answer import choices, delivery, sse
from dynamo.protocols import generate, kv_transfer
from dynamo.runtime.http import exchange

METRICS = "llm_metrics"  # the annotation that comes before each chunk
_ELSEWHERE = (
    METRICS,
    kv_transfer.REPORT_ANNOTATION,
)  # not told before the answer; the latter is the worker's


class StreamDelivery(delivery.Delivery):
    """Writes events as outputs come. Nothing is sent before the first of them, so an early failure has its status."""

    last_word = sse.DONE

    def __init__(
        self,
        client: exchange.Exchange,
        order: delivery.Order[sse.ChunkShape],
        meter: metrics.RequestMeter,
    ) -> None:
        super().__init__(client, order, meter)
        self._shape = order.shape
        self._has_usage = order.request.include_usage
        self._has_usage_so_far = order.request.has_continuous_usage
        self._tells_metrics = METRICS in order.annotations
        # None until a choice has begun, and for ever if its chunks carry more than text
        self._templates: list[sse.Template | None] = [None] * len(self.choices)
        self._begun: set[int] = set()

    def deliver(self, output: generate.Output, first: int = 0) -> None:
        number = first + output.index
        choice = self.choices[number]
        if choice.finish_reason is not None:
            return  # ended by a stop string, which the engine has not heard yet
        self.count_tokens(choice, len(output.token_ids))
        template = self._templates[number]
        if template is None or output.finish_reason is not None:
            self._deliver_more(choice, output)
            return
        text = choice.push(output)
        if choice.text.stop_reason is not None:
            choice.finish_reason = generate.FinishReason.STOP
            head, tail = template
            event = head + sse.encode(text) + tail if text else b""
            self._end_choice(choice, event)
        elif text:
            head, tail = template
            self.client.write(head + sse.encode(text) + tail)

    def _deliver_more(self, choice: choices.Choice, output: generate.Output) -> None:
        """A first output, a last one, or one that carries more than text."""
        self.note_cached(choice, output)
        text, reports = choice.read(output)
        pieces = choice.pieces(text)
        is_over = choice.is_over
        is_first = choice.index not in self._begun
        event = b""
        if pieces or reports or (is_first and is_over):
            event = self._piece_events(choice, pieces, reports)
        if event and self._tells_metrics:
            event = self._metrics_event(len(output.token_ids)) + event
        if is_over:
            self._end_choice(choice, event)
        elif event:
            self.client.write(event)

    def _piece_events(
        self,
        choice: choices.Choice,
        pieces: Sequence[choices.Piece],
        reports: list[choices.TokenReport] | None,
    ) -> bytes:
        """An event for each piece; the first of them has the reports."""
        is_first = choice.index not in self._begun
        if is_first:
            self._begin(choice)
        shape, extra, found = self._shape, self._extra(), b""
        for piece in pieces or ("",):
            chunk = shape.chunk(choice.index, piece, reports=reports, is_first=is_first)
            found += sse.event({**chunk, **extra})
            is_first, reports = False, None
        if self._may_hurry(choice):
            self._templates[choice.index] = sse.template(shape, choice.index, extra)
        return found

    def _may_hurry(self, choice: choices.Choice) -> bool:
        """Do its chunks, from now on, differ by their text only?"""
        return (
            choice.is_plain
            and not choice.is_over
            and not self._has_usage_so_far
            and not self._tells_metrics
        )

    def _extra(self, *, is_last: bool = False) -> dict[str, Any]:
        """What a chunk carries beside its choice. With include_usage, every one but the last says that it has none."""
        extra = self.extra_fields(is_last=is_last)
        if self._has_usage:
            extra["usage"] = self.usage() if self._has_usage_so_far else None
        return extra

    def _metrics_event(self, num_tokens: int) -> bytes:
        usage = self.usage()
        told = {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "chunk_tokens": num_tokens,
        }
        return sse.annotation(METRICS, sse.encode(told).decode())

    def _begin(self, choice: choices.Choice) -> None:
        """Before the first event of a choice, and maybe of the whole answer."""
        if not self._begun:
            self.client.start_stream(
                200,
                content_type=sse.CONTENT_TYPE,
                headers=(("cache-control", "no-cache"), *self.order.headers),
            )
            for name in self.order.annotations:
                if name not in _ELSEWHERE:
                    self.client.write(sse.annotation(name, self.order.annotation(name)))
        self._begun.add(choice.index)

    def _end_choice(self, choice: choices.Choice, event: bytes) -> None:
        reason = sse.finish_reason(choice)
        chunk = self._shape.chunk(choice.index, None, finish_reason=reason)
        event += sse.event({**chunk, **self._extra(is_last=True)})
        if not self.settle(choice):
            self.client.write(event)
            return
        if self._has_usage:
            event += sse.event(self._shape.usage_chunk(self.usage()))
        self.client.end(event + self.last_word)
