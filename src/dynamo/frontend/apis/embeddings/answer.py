"""The answer to an embedding request: its types, and its delivery from workers to the client.

The inputs of a request are dealt out in *shares*, one for each worker. What a worker replies is encoded as it comes, a
batch at a time, so that a large answer never delays the streams of other requests for long. The answer ends exactly
once: complete, failed, or abandoned by the client; whatever still runs at a worker is then cancelled.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from dynamo.base import errors
from dynamo.frontend import metrics
from dynamo.frontend.apis import openai_errors
from dynamo.frontend.delivery import delivery, sse
from dynamo.protocols import embed, generate
from dynamo.runtime import requests
from dynamo.runtime.http import exchange

_decode_vectors = msgspec.msgpack.Decoder(embed.Vectors).decode


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One vector, as numbers or base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPlan:
    """The answer that a client asked for."""

    model: str
    num_inputs: int
    num_tokens: int
    dimensions: int  # of each vector
    is_base64: bool
    headers: exchange.Headers = ()


class EmbeddingDelivery:
    """Gathers the vectors of one request and answers when all have come."""

    def __init__(
        self, client: exchange.Exchange, plan: EmbeddingPlan, meter: metrics.RequestMeter
    ) -> None:
        self._client = client
        self.plan = plan
        self._meter = meter
        self._objects: list[msgspec.Raw | None] = [None] * plan.num_inputs
        self._num_missing = plan.num_inputs
        self._streams: list[requests.Stream] = []
        self.is_over = False  # complete, failed or abandoned
        client.on_disconnect(self._abandon)

    def add_stream(self, stream: requests.Stream) -> None:
        """Take the stream of a share, to cancel it when the answer is over."""
        self._streams.append(stream)
        if self.is_over:
            stream.cancel()

    def add_vectors(self, numbers: Sequence[int], data: bytes) -> None:
        """Take the vectors of these inputs, packed floats. Raises RemoteProtocolError for a wrong length or input."""
        size = self.plan.dimensions * embed.FLOAT_BYTES
        if len(data) != len(numbers) * size:
            raise errors.RemoteProtocolError(
                f"expected {len(numbers)} vectors of {size} bytes from the worker, got {len(data)} bytes"
            )
        for place, number in enumerate(numbers):
            if self._objects[number] is not None:
                raise errors.RemoteProtocolError(f"the worker sent vector {number} twice")
            vector = data[place * size : (place + 1) * size]
            value = (
                base64.b64encode(vector).decode() if self.plan.is_base64 else embed.unpack(vector)
            )
            encoded = sse.encode({"object": "embedding", "index": number, "embedding": value})
            self._objects[number] = msgspec.Raw(encoded)
            self._num_missing -= 1
        if self._num_missing:
            return
        self._close()
        self._meter.record_success()
        num_tokens = self.plan.num_tokens
        body = {
            "object": "list",
            "data": self._objects,
            "model": self.plan.model,
            "usage": EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        }
        self._client.respond(200, sse.encode(body), headers=self.plan.headers)

    def has_vectors(self, numbers: Sequence[int]) -> bool:
        """Return whether the vectors of all these inputs have come."""
        return all(self._objects[number] is not None for number in numbers)

    def fail(self, error: errors.DynamoError) -> None:
        """End the answer by an error, unless it is over."""
        if not self.is_over:
            self._close()
            self._meter.record_failure(error)
            delivery.respond_error(self._client, error, openai_errors, self.plan.headers)

    def _abandon(self) -> None:
        self._close()
        self._meter.record_disconnect()

    def _close(self) -> None:
        self.is_over = True
        for stream in self._streams:
            stream.cancel()


class ShareReceiver:
    """The receiver of one share's stream. `numbers` are its inputs' places in the whole request."""

    def __init__(self, reply: EmbeddingDelivery, numbers: Sequence[int]) -> None:
        self._reply = reply
        self._numbers = numbers

    def receive(self, output: generate.Output) -> None:
        del output
        self._reply.fail(errors.RemoteProtocolError("expected vectors from the worker"))

    def replied(self, body: msgspec.Raw) -> None:
        if self._reply.is_over:
            return
        try:
            vectors = _decode_vectors(body)
            numbers = [self._numbers[number] for number in vectors.numbers]
            self._reply.add_vectors(numbers, vectors.data)
        except errors.RemoteProtocolError as error:
            self._reply.fail(error)
        except (msgspec.DecodeError, IndexError) as error:
            self._reply.fail(errors.RemoteProtocolError(f"expected vectors: {error}"))

    def ended(self, error: errors.DynamoError | None) -> None:
        if error is not None:
            self._reply.fail(error)
        elif not self._reply.has_vectors(self._numbers):
            self._reply.fail(errors.StreamBroken("the worker ended before its answer did"))
