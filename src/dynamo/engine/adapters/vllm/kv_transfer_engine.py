"""Prompts that one vLLM computes and another answers, by vLLM's NixlConnector: an engine around the engine.

    prefill   a request for the prompt only: vLLM keeps its blocks, and its only output says where they are
    decode    a request that brings these parameters: vLLM fetches the blocks, while others go on, and answers

vLLM's parameters travel unchanged, as `KvTransferParams.connector`. The two engines shake hands by themselves when the
first request needs it, so `connect_peer` only checks that the other engine uses the same connector. Blocks that no
engine fetches are freed by vLLM (after 30 seconds, unless a reader that waits its turn announces itself).

A prompt for which no blocks come, because vLLM reports a failure or because nothing arrives for too long, is submitted
to vLLM again, to be computed here. That is possible as long as nothing has been answered.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.engine import api
from dynamo.kvbm import sharing
from dynamo.protocols import generate, kv_events, kv_transfer, wire

FIRST_TOKEN_S = 60.0  # more than a handshake (vLLM: 5 s), a copy, and the turn to be served
_CACHED = "remote_prefill_cached_tokens"  # of vLLM 0.32's parameters, and ours for older ones
_logger = logging.getLogger(__name__)


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a decode worker must know of a prefill worker's engine."""

    vllm_engine_id: str
    connector: str


@dataclass(frozen=True, slots=True)
class _Import:
    """A request without outputs yet, with its blocks at another engine."""

    request: generate.Request
    began_at: float
    timer: clocks.Timer


class KvTransferEngine:
    """An `api.Engine` and `api.KvTransferPeer`, around an engine that passes `kv_transfer_params` to vLLM."""

    def __init__(
        self,
        engine: api.Engine,
        clock: clocks.Clock,
        *,
        engine_id: str,
        connector: str,
        environment: Callable[[contextlib.ExitStack], Mapping[str, str]] = lambda _: {},
    ) -> None:
        """`environment` is set while the engine starts: its processes inherit it.

        The ports that it names are kept until then, by the stack that it gets.
        """
        self._engine = engine
        self._clock = clock
        self.load, self.clear_kv_blocks = engine.load, engine.clear_kv_blocks
        self._environment = environment
        self._metadata = msgspec.json.encode(_Metadata(engine_id, connector))
        self._connector = connector
        self._is_export_enabled = False
        self._imports: dict[str, _Import] = {}  # by request id
        # ids of requests with blocks that another engine will fetch
        self._exports: set[str] = set()
        self._listeners: list[Callable[[sharing.ImportReport], None]] = []
        self._sink: api.EngineSink | None = None

    @property
    def capabilities(self) -> api.EngineCapabilities:
        """Return the KV transfer of this object, and LoRA adapters and tiers of the engine within."""
        within = self._engine.capabilities
        return api.EngineCapabilities(
            kv_transfer=self,
            imports_choices=False,
            lora_adapters=within.lora_adapters,
            kv_tiers=within.kv_tiers,
        )

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Start the engine within, between it and `sink` a look at first outputs."""
        with contextlib.ExitStack() as reservations, _environment(self._environment(reservations)):
            facts = await self._engine.start(_ImportSink(sink, self))
        self._sink = sink
        return facts

    def submit(self, request: generate.Request) -> None:
        """Submit a request. Raises RemoteProtocolError for parameters of another connector."""
        params = request.kv_transfer_params
        if kv_transfer.is_prefill_only(params):
            _logger.debug("New Prefill Request ID: %s", request.id)
            only = kv_transfer.PREFILL_ONLY  # vLLM has no other option
            self._engine.submit(msgspec.structs.replace(request, kv_transfer_params=only))
            self._exports.add(request.id)
        elif not kv_transfer.is_prefilled(params):
            self._engine.submit(request)
        elif request.sampling_options.n > 1:
            # Each choice would fetch the blocks, and the first fetch frees them.
            self._engine.submit(msgspec.structs.replace(request, kv_transfer_params=None))
        else:
            _exporting_engine(request)  # raises, if its parameters are of another connector
            self._engine.submit(request)
            timer = self._clock.call_later(FIRST_TOKEN_S, self._expire, request.id)
            self._imports[request.id] = _Import(request, self._clock.now(), timer)

    def abort(self, request_id: str) -> None:
        """Abort a request, with its import."""
        self._forget(request_id)
        self._engine.abort(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        """Abort one choice of a request."""
        self._forget(request_id)  # a request that imports has one choice
        self._engine.abort_choice(request_id, index)

    async def stop(self) -> None:
        """Stop the engine, with all imports."""
        for request_id in list(self._imports):
            self._forget(request_id)
        await self._engine.stop()

    def enable_export(self) -> None:
        """See `api.KvTransferPeer`. vLLM's connector needs no preparation."""
        self._is_export_enabled = True

    @property
    def transfer_metadata(self) -> bytes | None:
        """The id and connector of this engine. See `api.KvTransferPeer`."""
        return self._metadata if self._is_export_enabled and self._sink is not None else None

    def on_import(self, listener: Callable[[sharing.ImportReport], None]) -> None:
        """See `api.KvTransferPeer`. The duration is that until the first token; vLLM's own metrics have the copy's."""
        self._listeners.append(listener)

    async def connect_peer(self, metadata: bytes, *, deadline_s: float) -> str:
        """See `api.KvTransferPeer`. Nothing is sent: vLLM shakes hands itself."""
        try:
            peer = msgspec.json.decode(metadata, type=_Metadata)
        except wire.DECODE_ERRORS as error:
            raise errors.TransferError(f"expected the metadata of a vLLM: {error}") from error
        if peer.connector != self._connector:
            raise errors.TransferError(
                f"it moves blocks by {peer.connector}, and we by {self._connector}: start both with one --connector"
            )
        return peer.vllm_engine_id

    async def disconnect_peer(self, engine_id: str) -> None:
        """See `api.KvTransferPeer`. vLLM closes its connections itself."""

    def release_remote(self, params: kv_transfer.KvTransferParams | None) -> None:
        """See `api.KvTransferPeer`. vLLM has no message for that: the time limit of its connector frees the blocks."""

    def complete_outputs(self, batch: Sequence[api.EngineOutput]) -> Sequence[api.EngineOutput]:
        """Return vLLM's outputs, the first ones of exports and imports with their cached tokens."""
        if not (self._imports or self._exports):
            return batch
        return [api.EngineOutput(name, self._complete(name, output)) for name, output in batch]

    def retry_locally(self, request_id: str, error: errors.DynamoError) -> bool:
        """Submit a request that vLLM has failed again, if its import is to blame. Return whether it was."""
        kv_import = self._forget(request_id)
        if kv_import is None or isinstance(error, errors.RequestError):
            return False
        self._compute_locally(kv_import, error)
        return True

    def _complete(self, request_id: str, output: generate.Output) -> generate.Output:
        """Count as cached what the engine that computed the prompt found in its cache."""
        params = output.kv_transfer_params
        if request_id in self._exports and params is not None and params.connector is not None:
            _logger.debug("kv transfer params: %s", params.connector)
            cached = params.connector.get(_CACHED, output.cached_tokens)
            fields = {**params.connector, _CACHED: cached}
            params = msgspec.structs.replace(params, connector=fields)
            output = msgspec.structs.replace(output, kv_transfer_params=params)
        kv_import = self._forget(request_id)
        if kv_import is None:
            return output
        self._report(kv_import, None)
        cached = _connector_fields(kv_import.request).get(_CACHED)
        return msgspec.structs.replace(output, cached_tokens=cached)

    def _expire(self, request_id: str) -> None:
        kv_import = self._forget(request_id)
        if kv_import is not None:
            self._engine.abort(request_id)
            reason = f"nothing came within {FIRST_TOKEN_S:g} s"
            self._compute_locally(kv_import, errors.DeadlineExceeded(reason))

    def _compute_locally(self, kv_import: _Import, error: errors.DynamoError) -> None:
        request = kv_import.request
        _logger.warning("%s: its prompt is computed here: %s", request.id, error)
        self._report(kv_import, error)
        try:
            self._engine.submit(msgspec.structs.replace(request, kv_transfer_params=None))
        except errors.DynamoError as refusal:
            assert self._sink is not None
            self._sink.failed(request.id, refusal)

    def _forget(self, request_id: str) -> _Import | None:
        self._exports.discard(request_id)
        kv_import = self._imports.pop(request_id, None)
        if kv_import is not None:
            kv_import.timer.cancel()
        return kv_import

    def _report(self, kv_import: _Import, error: errors.DynamoError | None) -> None:
        report = sharing.ImportReport(
            request_id=kv_import.request.id,
            engine_id=_exporting_engine(kv_import.request),
            num_blocks=_num_blocks(_connector_fields(kv_import.request)),
            duration_s=self._clock.now() - kv_import.began_at,
            error=error,
        )
        for listener in self._listeners:
            listener(report)


class _ImportSink:
    """The worker's sink, which hides the failures that a local prefill can mend."""

    def __init__(self, sink: api.EngineSink, engine: KvTransferEngine) -> None:
        self.died = sink.died
        self._sink, self._engine = sink, engine

    def outputs(self, batch: Sequence[api.EngineOutput]) -> None:
        self._sink.outputs(self._engine.complete_outputs(batch))

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        if not self._engine.retry_locally(request_id, error):
            self._sink.failed(request_id, error)

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        self._sink.kv_events(events, dp_rank)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _connector_fields(request: generate.Request) -> dict[str, Any]:
    params = request.kv_transfer_params
    return params.connector or {} if params is not None else {}


def _exporting_engine(request: generate.Request) -> str:
    """Return the id under which `connect_peer` knows the engine that has the blocks. Raises RemoteProtocolError."""
    fields = _connector_fields(request)
    engine_id = fields.get("remote_engine_id")
    if not isinstance(engine_id, str):
        raise errors.RemoteProtocolError(
            f"kv_transfer_params: expected vLLM's, with remote_engine_id, got {sorted(fields)}"
        )
    return engine_id.partition("_dp")[0]  # which vLLM appends for each data-parallel rank


def _num_blocks(fields: Mapping[str, Any]) -> int:
    """Count the blocks of a prompt, which vLLM gives as one list, or as one for each kind of attention."""
    ids = fields.get("remote_block_ids") or ()
    return len(ids[0]) if ids and isinstance(ids[0], list | tuple) else len(ids)
