"""An answer of vectors on its way from workers to a client.

The inputs of a request are dealt out in *shares*, one for each worker that is asked. What a worker replies is encoded
as it comes, a batch at a time, so that a large answer never holds up the streams of others for long. The answer ends
exactly once: complete, failed, or abandoned by the client; whatever still runs at a worker is then cancelled.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamo.base import errors
from dynamo.frontend import metrics
from dynamo.frontend.answer import delivery, sse
from dynamo.protocols import embed, generate, openai_embeddings
from dynamo.runtime import requests
from dynamo.runtime.http import exchange

_decode = msgspec.msgpack.Decoder(embed.Vectors).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOrder:
    """What a client asked for."""

    model: str
    num_inputs: int
    num_tokens: int
    dimensions: int  # of each vector
    is_base64: bool
    headers: exchange.Headers = ()


class EmbeddingAnswer:
    """Gathers the vectors of one request."""

    def __init__(
        self, client: exchange.Exchange, order: EmbeddingOrder, meter: metrics.RequestMeter
    ) -> None:
        self._client = client
        self.order = order
        self._meter = meter
        self._objects: list[msgspec.Raw | None] = [None] * order.num_inputs
        self._num_left = order.num_inputs
        self._streams: list[requests.Stream] = []
        self.is_over = False  # nothing more is to be asked of workers
        client.on_disconnect(self._abandon)

    def opened(self, stream: requests.Stream) -> None:
        """A worker has a share."""
        self._streams.append(stream)
        if self.is_over:
            stream.cancel()

    def add(self, numbers: Sequence[int], data: bytes) -> None:
        """Vectors of these inputs. Raises RemoteProtocolError if they are not what was asked for."""
        size = self.order.dimensions * embed.FLOAT_BYTES
        if len(data) != len(numbers) * size:
            raise errors.RemoteProtocolError(
                f"expected {len(numbers)} vectors of {size} bytes from the worker, got {len(data)} bytes"
            )
        for place, number in enumerate(numbers):
            if self._objects[number] is not None:
                raise errors.RemoteProtocolError(f"the worker sent vector {number} twice")
            self._objects[number] = self._object(number, data[place * size : (place + 1) * size])
            self._num_left -= 1
        if not self._num_left:
            self._respond()

    def has(self, numbers: Sequence[int]) -> bool:
        """Have the vectors of all these inputs come?"""
        return all(self._objects[number] is not None for number in numbers)

    def fail(self, error: errors.DynamoError) -> None:
        """It is over, by an error."""
        if not self.is_over:
            self._close()
            self._meter.failed(error)
            delivery.respond_error(self._client, error, headers=self.order.headers)

    def _object(self, number: int, vector: bytes) -> msgspec.Raw:
        value = base64.b64encode(vector).decode() if self.order.is_base64 else embed.unpack(vector)
        return msgspec.Raw(sse.encode({"object": "embedding", "index": number, "embedding": value}))

    def _respond(self) -> None:
        self._close()
        self._meter.succeeded()
        used = self.order.num_tokens
        body = {
            "object": "list",
            "data": self._objects,
            "model": self.order.model,
            "usage": openai_embeddings.EmbeddingUsage(prompt_tokens=used, total_tokens=used),
        }
        self._client.respond(200, sse.encode(body), headers=self.order.headers)

    def _abandon(self) -> None:
        self._close()
        self._meter.disconnected()

    def _close(self) -> None:
        self.is_over = True
        for stream in self._streams:
            stream.cancel()


class ShareReceiver:
    """The stream of one share at one worker. `numbers` are the places of its inputs in the whole request."""

    def __init__(self, answer: EmbeddingAnswer, numbers: Sequence[int]) -> None:
        self._answer = answer
        self._numbers = numbers

    def receive(self, output: generate.Output) -> None:
        del output
        self._answer.fail(errors.RemoteProtocolError("expected vectors from the worker"))

    def replied(self, body: msgspec.Raw) -> None:
        if self._answer.is_over:
            return
        try:
            vectors = _decode(body)
            numbers = [self._numbers[number] for number in vectors.numbers]
            self._answer.add(numbers, vectors.data)
        except errors.RemoteProtocolError as error:
            self._answer.fail(error)
        except (msgspec.DecodeError, IndexError) as error:
            self._answer.fail(errors.RemoteProtocolError(f"expected vectors: {error}"))

    def ended(self, error: errors.DynamoError | None) -> None:
        if error is not None:
            self._answer.fail(error)
        elif not self._answer.has(self._numbers):
            self._answer.fail(errors.StreamBroken("the worker ended before its answer did"))
