"""What a prefill worker is asked for, and its only output, which says where the prompt's blocks are."""

import asyncio
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.protocols import generate, kv_transfer


def prompt_of(request: generate.Request) -> generate.Request:
    """The request to a prefill worker: its one token is not used, so how it is drawn does not matter."""
    return generate.Request(
        id=request.id,
        model=request.model,
        token_ids=request.token_ids,
        stop_conditions=generate.StopConditions(max_tokens=1, min_tokens=1),
        sampling_options=generate.SamplingOptions(temperature=0.0),
        priority=request.priority,
        lora_name=request.lora_name,
        session_id=request.session_id,
        kv_transfer_params=kv_transfer.ASK,
    )


class PrefillAnswer:
    """The receiver of a prefill's only output."""

    def __init__(self) -> None:
        self._is_over = asyncio.Event()
        self._params: dict[str, Any] | None = None
        self._error: errors.DynamoError | None = None

    async def wait(self) -> dict[str, Any]:
        """The parameters that say where the blocks are. Raises what the prefill failed with, or Cancelled."""
        await self._is_over.wait()
        if self._params is None:
            assert self._error is not None
            raise self._error
        return self._params

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self._end(None, errors.Cancelled("the caller went away"))

    def receive(self, output: generate.Output) -> None:
        """As `requests.Receiver`."""
        if output.kv_transfer_params is not None:
            self._end(output.kv_transfer_params, None)

    def replied(self, body: msgspec.Raw) -> None:
        """As `requests.Receiver`."""
        del body
        self._end(None, errors.RemoteProtocolError("expected an engine's output, got a reply"))

    def ended(self, error: errors.DynamoError | None) -> None:
        """As `requests.Receiver`."""
        silent = "the prefill worker does not say where its blocks are"
        self._end(None, error or errors.RemoteProtocolError(silent))

    def _end(self, params: dict[str, Any] | None, error: errors.DynamoError | None) -> None:
        if not self._is_over.is_set():
            self._params, self._error = params, error
            self._is_over.set()
