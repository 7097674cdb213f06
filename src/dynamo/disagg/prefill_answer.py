"""The only output of a prefill, which says where the prompt's blocks are."""

import asyncio

import msgspec

from dynamo.base import errors
from dynamo.protocols import generate, kv_transfer


class PrefillAnswer:
    """The receiver of a prefill's only output."""

    def __init__(self) -> None:
        self._is_over = asyncio.Event()
        self._params: kv_transfer.KvTransferParams | None = None
        self._error: errors.DynamoError | None = None

    async def wait(self) -> kv_transfer.KvTransferParams:
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

    def _end(
        self, params: kv_transfer.KvTransferParams | None, error: errors.DynamoError | None
    ) -> None:
        if not self._is_over.is_set():
            self._params, self._error = params, error
            self._is_over.set()
