"""The process of the semantic router's encoders: it loads the models of a configuration and answers for texts.

Frontends and gateways find it by discovery and never import torch. Calls that wait are computed together: the texts
of all of them that one classifier reads become one batch. What waits is bounded in calls and in characters.
"""

import asyncio
import logging
import re
import sys
from collections import deque
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from dynamo.base import config, distribution, errors, process_setup, tasks
from dynamo.observability import logs
from dynamo.protocols import classification, instances, wire
from dynamo.runtime import component, requests

if TYPE_CHECKING:
    from dynamo.worker import classifier_set

_logger = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(classification.ClassificationRequest).decode
_PROG = "python -m dynamo.semantic_encoder"
MAX_WAITING_CHARACTERS = 32 * 2**20
_STOP_S = 5.0  # for running requests, after a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticEncoderConfig(component.RuntimeConfig):
    """The encoder models of a semantic router's configuration, in a process of their own."""

    router_config: str | None = config.option(
        None,
        env="DYN_SEMANTIC_ROUTER",
        help="configuration (YAML) of the semantic router that names the models; --config is the same",
    )
    device: Literal["cpu", "cuda"] = config.option("cpu", help="device that computes")
    threads: int | None = config.option(
        None, help="CPU threads that compute; by default OMP_NUM_THREADS or all cores", least=1
    )
    max_batch_tokens: int = config.option(
        8192, help="tokens of one forward pass; fewer take less memory", least=1
    )
    max_text_tokens: int = config.option(
        131_072, help="tokens that are read of one text; the rest is reported as unread", least=1
    )
    max_waiting: int = config.option(
        256, help="requests that may wait; more are refused as overload", least=1
    )


class _WaitingCall(NamedTuple):
    call: requests.Call
    request: classification.ClassificationRequest
    num_characters: int


class ClassificationRequests:
    """Accepts requests for classification and answers them, all that wait in one turn."""

    def __init__(self, classifiers: "classifier_set.ClassifierSet", *, max_waiting: int) -> None:
        self._classifiers = classifiers
        self._max_waiting = max_waiting
        self._waiting: deque[_WaitingCall] = deque()
        self._num_characters = 0
        self._has_work = asyncio.Event()
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoder")

    def handle(self, call: requests.Call) -> None:
        """Accept or refuse a call; the handler of the endpoint."""
        try:
            self._accept(call)
        except errors.DynamoError as error:
            call.fail(error)

    async def run(self) -> None:
        """Compute batch after batch, until cancelled."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            batch = list(self._waiting)
            self._waiting.clear()
            self._num_characters = 0
            if batch:
                await self._compute(batch)

    async def close(self) -> None:
        """Return when the thread has ended."""
        await asyncio.to_thread(self._thread.shutdown)

    def _accept(self, call: requests.Call) -> None:
        if len(self._waiting) >= self._max_waiting or self._num_characters > MAX_WAITING_CHARACTERS:
            raise errors.Overloaded("the encoders are at capacity")
        try:
            request = _decode(call.body)
        except wire.DECODE_ERRORS as error:
            raise errors.RemoteProtocolError(f"expected texts to classify: {error}") from error
        unknown = {one.classifier for one in request.inputs} - self._classifiers.names
        if unknown:
            raise errors.Unavailable(
                f"no encoder is loaded for {', '.join(sorted(unknown))}; "
                "start this process again with the router's configuration"
            )
        entry = _WaitingCall(call, request, sum(len(one.text) for one in request.inputs))
        self._waiting.append(entry)
        self._num_characters += entry.num_characters
        self._has_work.set()
        call.on_cancel(lambda: self._drop(entry))

    def _drop(self, entry: _WaitingCall) -> None:
        if entry in self._waiting:
            self._waiting.remove(entry)
            self._num_characters -= entry.num_characters

    async def _compute(self, batch: list[_WaitingCall]) -> None:
        inputs = [one for entry in batch for one in entry.request.inputs]
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._thread, self._classifiers.classify, inputs)
        except Exception as error:
            _logger.exception("a batch of %d texts failed", len(inputs))
            for entry in batch:
                entry.call.fail(errors.EngineFailed(f"the encoder failed: {type(error).__name__}"))
            return
        first = 0
        for entry in batch:
            last = first + len(entry.request.inputs)
            entry.call.reply(classification.ClassificationReply(results=tuple(results[first:last])))
            entry.call.finish()
            first = last


def main() -> int:
    """Run the process and return its exit status."""
    return process_setup.run_command(_PROG, _run)


def _run() -> None:
    logs.configure()
    argv = [re.sub(r"^--config(?==|$)", "--router-config", word) for word in sys.argv[1:]]
    settings = config.load(SemanticEncoderConfig, prog=_PROG, argv=argv)
    asyncio.run(serve(settings))


def load_models(settings: SemanticEncoderConfig) -> "classifier_set.ClassifierSet":
    """Load the models that the configuration names. Raises ConfigError."""
    if settings.router_config is None:
        raise errors.ConfigError("--config: expected the configuration of the router, got none")
    service = distribution.load_extra("dynamo.semantic.service", feature=_PROG, extra="semantic")
    loaded = service.load_config(Path(settings.router_config))
    modules = distribution.load_extra("dynamo.worker.classifier_set", feature=_PROG, extra="native")
    if not loaded.uses_encoders:
        raise errors.ConfigError(
            f"{settings.router_config}: no model_id is a directory with an encoder, and "
            "encoders.profile is fast; the word models need no process of their own"
        )
    native = modules.native_settings.NativeConfig(device=settings.device, threads=settings.threads)
    classifiers = [
        modules.load_classifier(name, model, native) for name, model in loaded.encoders.items()
    ]
    exact = loaded.settings.encoders
    if exact.profile != "fast":
        directory = Path(settings.router_config).parent
        classifiers.append(modules.load_exact(exact.base_model, directory, native))
    embedder = None if loaded.embedder is None else modules.load_embedder(loaded.embedder, native)
    made: classifier_set.ClassifierSet = modules.ClassifierSet(
        classifiers,
        max_batch_tokens=settings.max_batch_tokens,
        max_text_tokens=settings.max_text_tokens,
        embedder=embedder,
    )
    return made


async def serve(settings: SemanticEncoderConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError."""
    classifiers = load_models(settings)
    accepted = ClassificationRequests(classifiers, max_waiting=settings.max_waiting)
    name = instances.EndpointName(
        settings.namespace, classification.COMPONENT, classification.ENDPOINT
    )
    running = tasks.Tasks()
    async with await component.DistributedRuntime.open(settings) as runtime:
        stop = process_setup.stop_on_signals()
        try:
            running.start("classify", accepted.run())
            await runtime.register(name, accepted.handle)
            _logger.info(
                "serving the classifiers %s at %s", ", ".join(sorted(classifiers.names)), name
            )
            await running.run_until(stop)
        finally:
            await runtime.drain(_STOP_S)
            await running.close()
            await accepted.close()
