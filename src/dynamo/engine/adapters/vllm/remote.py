"""Prompts that one vLLM computes and another answers, by vLLM's NixlConnector: an engine around the engine.

    prefill   a request with {"do_remote_decode": true}: vLLM holds its blocks, and its only output says where they are
    decode    a request that brings what was said: vLLM fetches the blocks, while others go on, and answers

What vLLM says travels as it is. The two engines shake hands by themselves, when the first request needs it; so to be
connected to another means no more than to know that it is of our kind. Blocks that nobody fetches are vLLM's to free
(after 30 seconds, unless a reader that waits its turn says that it will come).

A prompt whose blocks do not come, because vLLM says so or because nothing is heard for too long, is given to vLLM
again, to be computed here. That is possible as long as nothing has been answered.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.engine import api
from dynamo.kvbm import sharing
from dynamo.protocols import generate, kv_events, kv_transfer

FIRST_TOKEN_S = 60.0  # more than a handshake (vLLM: 5 s), a copy, and the turn to be served
_CACHED = "remote_prefill_cached_tokens"  # of vLLM 0.32's parameters, and ours for older ones
_logger = logging.getLogger(__name__)


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a decode worker must know of a prefill worker's engine."""

    vllm_engine_id: str
    connector: str


@dataclass(frozen=True, slots=True)
class _Pull:
    """A request of which nothing has come yet, whose blocks another engine has."""

    request: generate.Request
    began_at: float
    limit: asyncio.TimerHandle


class RemoteEngine:
    """An `api.Engine` that is an `api.KvTransferPeer`, around one that passes `kv_transfer_params` on to vLLM."""

    def __init__(
        self,
        engine: api.Engine,
        *,
        engine_id: str,
        connector: str,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`environment` is set while the engine starts: its processes inherit it."""
        self._engine = engine
        self.load, self.clear_kv_blocks = engine.load, engine.clear_kv_blocks
        self._environment = environment
        self._me = msgspec.json.encode(_Metadata(engine_id, connector))
        self._connector = connector
        self._is_open = False
        self._pulls: dict[str, _Pull] = {}  # by request id
        self._held: set[str] = set()  # requests whose blocks another will fetch
        self._listeners: list[Callable[[sharing.ImportReport], None]] = []
        self._sink: api.EngineSink | None = None

    @property
    def capabilities(self) -> api.EngineCapabilities:
        """Return the KV transfer of this object and the LoRA adapters of the engine within."""
        return api.EngineCapabilities(
            kv_transfer=self, lora_adapters=self._engine.capabilities.lora_adapters
        )

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """The engine's."""
        with _environment(self._environment):
            facts = await self._engine.start(_Watched(sink, self))
        self._sink = sink
        return facts

    def submit(self, request: generate.Request) -> None:
        """Raises RemoteProtocolError for parameters that are not of our connector."""
        params = request.kv_transfer_params
        if kv_transfer.wants_hold(params):
            _logger.debug("New Prefill Request ID: %s", request.id)
            asked = kv_transfer.ASK  # vLLM knows of nothing else that might be asked
            self._engine.submit(msgspec.structs.replace(request, kv_transfer_params=asked))
            self._held.add(request.id)
        elif params is None or params.get("do_remote_prefill") is not True:
            self._engine.submit(request)
        elif request.sampling_options.n > 1:  # each choice would fetch, from who frees them for one
            self._engine.submit(msgspec.structs.replace(request, kv_transfer_params=None))
        else:
            self._fetch(request, params)

    def abort(self, request_id: str) -> None:
        """The engine's."""
        self._forget(request_id)
        self._engine.abort(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        """The engine's."""
        self._forget(request_id)  # what is fetched has one choice
        self._engine.abort_choice(request_id, index)

    async def stop(self) -> None:
        """The engine's."""
        for request_id in list(self._pulls):
            self._forget(request_id)
        await self._engine.stop()

    def enable_export(self) -> None:
        """See `api.KvTransferPeer`. vLLM's connector lends whatever it is told to hold."""
        self._is_open = True

    @property
    def transfer_metadata(self) -> bytes | None:
        """See `api.KvTransferPeer`."""
        return self._me if self._is_open and self._sink is not None else None

    def on_import(self, listener: Callable[[sharing.ImportReport], None]) -> None:
        """See `api.KvTransferPeer`. The time told is that until the first token; vLLM's own metrics have the copy's."""
        self._listeners.append(listener)

    async def connect_peer(self, metadata: bytes, *, deadline_s: float) -> str:
        """See `api.KvTransferPeer`. Nothing is sent: vLLM shakes hands itself."""
        try:
            other = msgspec.json.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise errors.TransferError(f"expected the metadata of a vLLM: {error}") from error
        if other.connector != self._connector:
            raise errors.TransferError(
                f"it moves blocks by {other.connector}, and we by {self._connector}: start both with one --connector"
            )
        return other.vllm_engine_id

    async def disconnect_peer(self, engine_id: str) -> None:
        """See `api.KvTransferPeer`."""

    def heard(self, batch: Sequence[api.EngineOutput]) -> Sequence[api.EngineOutput]:
        """From vLLM: the first outputs of some requests may be here."""
        if not (self._pulls or self._held):
            return batch
        return [api.EngineOutput(name, self._first(name, output)) for name, output in batch]

    def _first(self, request_id: str, output: generate.Output) -> generate.Output:
        """As vLLM gave it, but counting as cached what the engine that computed the prompt found so."""
        params = output.kv_transfer_params
        if request_id in self._held and params is not None:
            _logger.debug("kv transfer params: %s", params)
            said = {**params, _CACHED: params.get(_CACHED, output.cached_tokens)}
            output = msgspec.structs.replace(output, kv_transfer_params=said)
        pull = self._forget(request_id)
        if pull is None:
            return output
        self._tell(pull, None)
        cached = (pull.request.kv_transfer_params or {}).get(_CACHED)
        return msgspec.structs.replace(output, cached_tokens=cached)

    def is_given_again(self, request_id: str, error: errors.DynamoError) -> bool:
        """From vLLM: it gives a request up. Does it get it once more?"""
        pull = self._forget(request_id)
        if pull is None or isinstance(error, errors.RequestError):
            return False
        self._give_again(pull, error)
        return True

    def _fetch(self, request: generate.Request, params: Mapping[str, Any]) -> None:
        _source(params)
        self._engine.submit(request)
        loop = asyncio.get_running_loop()
        limit = loop.call_later(FIRST_TOKEN_S, self._too_late, request.id)
        self._pulls[request.id] = _Pull(request, loop.time(), limit)

    def _too_late(self, request_id: str) -> None:
        pull = self._forget(request_id)
        if pull is not None:
            self._engine.abort(request_id)
            what = f"nothing came within {FIRST_TOKEN_S:g} s"
            self._give_again(pull, errors.DeadlineExceeded(what))

    def _give_again(self, pull: _Pull, error: errors.DynamoError) -> None:
        _logger.warning("%s: its prompt is computed here: %s", pull.request.id, error)
        self._tell(pull, error)
        try:
            self._engine.submit(msgspec.structs.replace(pull.request, kv_transfer_params=None))
        except errors.DynamoError as refusal:
            assert self._sink is not None
            self._sink.failed(pull.request.id, refusal)

    def _forget(self, request_id: str) -> _Pull | None:
        self._held.discard(request_id)
        pull = self._pulls.pop(request_id, None)
        if pull is not None:
            pull.limit.cancel()
        return pull

    def _tell(self, pull: _Pull, error: errors.DynamoError | None) -> None:
        params = pull.request.kv_transfer_params or {}
        report = sharing.ImportReport(
            request_id=pull.request.id,
            engine_id=_source(params),
            num_blocks=_num_blocks(params),
            duration_s=asyncio.get_running_loop().time() - pull.began_at,
            error=error,
        )
        for listener in self._listeners:
            listener(report)


class _Watched:
    """The sink, with a look at requests of which nothing has come yet."""

    def __init__(self, sink: api.EngineSink, remote: RemoteEngine) -> None:
        self.died = sink.died
        self._sink, self._remote = sink, remote

    def outputs(self, batch: Sequence[api.EngineOutput]) -> None:
        self._sink.outputs(self._remote.heard(batch))

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        if not self._remote.is_given_again(request_id, error):
            self._sink.failed(request_id, error)

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        self._sink.kv_events(events, dp_rank)


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _source(params: Mapping[str, Any]) -> str:
    """The engine that has the blocks, as it calls itself to `connect`. Raises RemoteProtocolError."""
    engine_id = params.get("remote_engine_id")
    if not isinstance(engine_id, str):
        raise errors.RemoteProtocolError(
            f"kv_transfer_params: expected vLLM's, with remote_engine_id, got {sorted(params)}"
        )
    return engine_id.partition("_dp")[0]  # which vLLM appends for each data-parallel rank


def _num_blocks(params: Mapping[str, Any]) -> int:
    """vLLM tells them as one list, or as one for each kind of attention."""
    ids = params.get("remote_block_ids") or ()
    return len(ids[0]) if ids and isinstance(ids[0], list | tuple) else len(ids)
