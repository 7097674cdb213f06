"""Streamed answers: one server-sent event for each output of the engine. `deliver` is the hot path of the frontend.

Nothing is sent before the first output, so a request that fails early still gets the status of its error.
"""

from collections.abc import Sequence
from typing import Any

from dynamo.base import errors
from dynamo.frontend import metrics
from dynamo.frontend.delivery import choices, delivery, sse
from dynamo.preprocess.parsers import parser
from dynamo.protocols import generate, kv_transfer
from dynamo.runtime.http import exchange

METRICS = "llm_metrics"  # the annotation before each chunk
LINES_TYPE = "application/x-ndjson"
_NOT_AT_START = (METRICS, kv_transfer.REPORT_ANNOTATION)  # the latter is for the worker


class StreamDelivery(delivery.Delivery):
    """A stream of chunks, as chats and completions have it."""

    __slots__ = ("_begun", "_formatter", "_has_continuous_usage", "_has_metrics", "_has_stops", "_has_usage",
                 "_num_reasoning", "_num_tokens", "_piece_templates", "_templates")  # fmt: skip

    last_event = sse.DONE

    def __init__(
        self,
        client: exchange.Exchange,
        prepared: delivery.PreparedRequest[sse.ChunkFormatter],
        meter: metrics.RequestMeter,
    ) -> None:
        super().__init__(client, prepared, meter)
        self._formatter = prepared.formatter
        self._has_usage = prepared.request.include_usage
        self._has_continuous_usage = prepared.request.has_continuous_usage
        self._has_stops = bool(prepared.prompts[0].request.stop_conditions.stop)
        self._has_metrics = METRICS in prepared.annotations
        self._num_tokens = self._num_reasoning = 0  # delivered by `_deliver_rare`, of all choices
        # None until a choice has begun, and always if its chunks carry more than text
        self._templates: list[sse.Template | None] = [None] * len(self.choices)
        self._begun: set[int] = set()  # choices with a first chunk
        # of the other pieces: by choice, kind, and the number of a call
        self._piece_templates: dict[tuple[int, type, int], sse.Template | None] = {}

    def deliver(self, output: generate.Output, first: int = 0) -> None:
        number = first + output.index
        choice = self.choices[number]
        if choice.finish_reason is not None:
            return  # ended by a stop string, which the engine does not know yet
        self.count_tokens(choice, len(output.token_ids))
        template = self._templates[number]
        if template is None or output.finish_reason is not None:
            self._deliver_rare(choice, output)
            return
        text = choice.push(output)
        if choice.text.stop_reason is not None:
            choice.finish_reason = generate.FinishReason.STOP
            head, tail = template
            event = head + sse.encode_inline(text) + tail if text else b""
            self._end_choice(choice, event)
        elif text:
            head, tail = template
            self.client.write(head + sse.encode_inline(text) + tail)

    def deliver_all(self, outputs: Sequence[generate.Output], first: int = 0) -> None:
        """Take outputs that came together; those of a plain text are measured and written together."""
        template, choice = self._templates[first], self.choices[first]
        if template is None or self._has_stops or len(self.choices) > 1 or choice.is_over:
            super().deliver_all(outputs, first)
            return
        middle = [output for output in outputs if output.finish_reason is None]
        if middle:
            self.count_tokens(choice, sum([len(output.token_ids) for output in middle]))
            events: list[bytes] = []
            for text in map(choice.push, middle):
                if text:
                    events += (template.head, sse.encode_inline(text), template.tail)
            self.client.write(b"".join(events))
        for output in outputs[len(middle) :]:
            self.deliver(output)

    def _deliver_rare(self, choice: choices.Choice, output: generate.Output) -> None:
        """Deliver a first output, a last one, or one that carries more than text."""
        self.record_cached(choice, output)
        if choice.token_ids is not None:
            choice.token_ids += output.token_ids
        num_tokens, num_reasoning = choice.text.num_tokens, choice.num_reasoning_tokens
        text, reports = choice.read(output)
        self._num_tokens += choice.text.num_tokens - num_tokens
        self._num_reasoning += choice.num_reasoning_tokens - num_reasoning
        pieces = choice.take_pieces(text)
        is_over = choice.is_over
        is_first = choice.index not in self._begun
        event = b""
        if pieces or reports or (is_first and is_over):
            event = self._piece_events(choice, pieces, reports)
        if event and self._has_metrics:
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
        """Return an event for each piece; the first of them has the reports."""
        is_first = choice.index not in self._begun
        if is_first:
            self._begin(choice)
        elif choice.has_only_pieces and not self._has_continuous_usage:
            events = b"".join([self._piece_event(choice.index, piece) for piece in pieces])
            self._use_template(choice)
            return events
        formatter, extra, events = self._formatter, self._extra(), b""
        for piece in pieces or ("",):
            part = sse.ChoicePart(
                choice.index,
                piece,
                reports,
                is_first=is_first,
                token_ids=choice.take_token_ids(),
                prompt_token_ids=self.prepared.prompt_token_ids_of(choice) if is_first else None,
            )
            events += sse.event({**formatter.chunk(part), **extra})
            is_first, reports = False, None
        self._use_template(choice)
        return events

    def _use_template(self, choice: choices.Choice) -> None:
        """Use a template for all that is to come of a choice, if its chunks differ only in their text from now on."""
        if (
            choice.is_plain
            and not choice.is_over
            and not self._has_continuous_usage
            and not self._has_metrics
        ):
            self._templates[choice.index] = self._template_of(choice.index, "")

    def _template_of(
        self, index: int, piece: choices.Piece, number: int = 0
    ) -> sse.Template | None:
        """Return the template for pieces of a choice like this one; `number` is that of its call, if it is of one."""
        key = index, type(piece), number
        if key not in self._piece_templates:
            new = sse.make_template(self._formatter, index, self._extra(), piece)
            self._piece_templates[key] = new
        return self._piece_templates[key]

    def _piece_event(self, index: int, piece: choices.Piece) -> bytes:
        """Return the event for a piece of a choice that has begun, by the template for pieces of its kind."""
        number, text = 0, piece
        if isinstance(piece, choices.Call):
            number, text = piece.number, piece.arguments
        elif isinstance(piece, parser.Reasoning):
            text = piece.text
        template = None
        if not isinstance(piece, choices.Call) or not piece.is_start:
            template = self._template_of(index, piece, number)
        if template is None:
            chunk = self._formatter.chunk(sse.ChoicePart(index, piece))
            return sse.event({**chunk, **self._extra()})
        return template.head + sse.encode_inline(text) + template.tail

    def usage(self) -> sse.Usage:
        # asked for each token, and no template is used
        if self._has_continuous_usage or self._has_metrics:
            return self.make_usage(self._num_tokens, self._num_reasoning)
        return super().usage()

    def _extra(self, *, is_last: bool = False) -> dict[str, Any]:
        """Return the fields of a chunk beside its choices. With include_usage, `usage` is null until the end."""
        extra = self.extra_fields(is_last=is_last)
        if self._has_usage:
            extra["usage"] = self.usage() if self._has_continuous_usage else None
        return extra

    def _metrics_event(self, num_tokens: int) -> bytes:
        usage = self.usage()
        counts = {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "chunk_tokens": num_tokens,
        }
        return sse.annotation(METRICS, sse.encode(counts).decode())

    def _begin(self, choice: choices.Choice) -> None:
        """Start the stream, unless another choice has, and note that this choice has begun."""
        if not self._begun:
            if not self.client.is_streaming:  # it is if the client was told that it waits
                self.client.start_stream(
                    200,
                    content_type=sse.CONTENT_TYPE,
                    headers=(("cache-control", "no-cache"), *self.prepared.headers),
                )
            for name in self.prepared.annotations:
                if name not in _NOT_AT_START:
                    value = self.prepared.annotation_value(name)
                    self.client.write(sse.annotation(name, value))
        self._begun.add(choice.index)

    def _end_choice(self, choice: choices.Choice, event: bytes) -> None:
        reason = sse.finish_reason(choice)
        last = sse.ChoicePart(
            choice.index,
            finish_reason=reason,
            token_ids=choice.take_token_ids(),
            stop_token=choice.stop_token,
            stop_string=choice.text.stop_reason,
        )
        chunk = self._formatter.chunk(last)
        event += sse.event({**chunk, **self._extra(is_last=True)})
        if not self.settle(choice):
            self.client.write(event)
            return
        if self._has_usage:
            event += sse.event(self._formatter.usage_chunk(self.usage()))
        self.client.end(event + self.last_event)
        self.complete()


class EventDelivery(delivery.Delivery):
    """A stream of typed events in an order, as messages and responses have it: one prompt, one choice."""

    __slots__ = ("_choice", "_formatter", "_has_begun")

    content_type = sse.CONTENT_TYPE

    def __init__(
        self,
        client: exchange.Exchange,
        prepared: delivery.PreparedRequest[sse.EventFormatter],
        meter: metrics.RequestMeter,
    ) -> None:
        super().__init__(client, prepared, meter)
        self._formatter = prepared.formatter
        (self._choice,) = self.choices
        self._has_begun = False

    def deliver(self, output: generate.Output, first: int = 0) -> None:
        choice = self._choice
        if choice.finish_reason is not None:
            return  # ended by a stop string, which the engine does not know yet
        self.count_tokens(choice, len(output.token_ids))
        events = b"" if self._has_begun else self._begin(output)
        text, _ = choice.read(output)
        for piece in choice.take_pieces(text):
            events += self._formatter.piece(piece)
        if choice.is_over:
            self.settle(choice)
            reason, stop_string = sse.finish_reason(choice), choice.text.stop_reason
            self.client.end(events + self._formatter.end(reason, stop_string, self.usage()))
            self.complete()
        else:
            self.client.write(events)

    def error_event(self, error: errors.DynamoError) -> bytes:
        return self._formatter.error(error)

    def _begin(self, output: generate.Output) -> bytes:
        self._has_begun = True
        self.record_cached(self._choice, output)
        headers = (("cache-control", "no-cache"), *self.prepared.headers)
        self.client.start_stream(200, content_type=self.content_type, headers=headers)
        return self._formatter.begin(self.usage())


class LineDelivery(EventDelivery):
    """The same as lines of JSON, as Ollama has it."""

    __slots__ = ()

    content_type = LINES_TYPE
