"""The process of the semantic router's encoders: it loads the models of a configuration and answers for texts.

Frontends and gateways find it by discovery and never import torch. Calls that wait are computed together: the texts
of all of them that one classifier reads become one batch. What waits is bounded in calls and in characters.
"""

import asyncio
import logging
import os
import re
import sys
from collections import deque
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from dynamo.base import addresses, config, distribution, errors, process_setup, tasks
from dynamo.base import clock as clocks
from dynamo.observability import logs
from dynamo.protocols import encoders, instances, wire
from dynamo.runtime import component, reachability, requests
from dynamo.worker import health, model_source, startup

if TYPE_CHECKING:
    from dynamo.worker import classifier_set

_logger = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(encoders.ClassificationRequest).decode
_PROG = "python -m dynamo.semantic_encoder"
MAX_WAITING_CHARACTERS = 32 * 2**20
_STALL_S = 300.0  # without progress, after which /live gives up a start
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
    system_host: str = config.option(
        "127.0.0.1", env="DYN_SYSTEM_HOST", help="address of /live, /health and /metrics"
    )
    system_port: addresses.PortRange | None = config.option(  # noqa: RUF009 (a declaration)
        None,
        env="DYN_SYSTEM_PORT",
        help="port of /live, /health and /metrics, or a range of which the first free one is used; 0: any,"
        " -1 (default): none",
    )


class _WaitingCall(NamedTuple):
    call: requests.Call
    request: encoders.ClassificationRequest
    num_characters: int
    received_at: float


class ClassificationRequests:
    """Accepts requests for classification and answers them, all that wait in one turn."""

    def __init__(
        self,
        classifiers: "classifier_set.ClassifierSet",
        *,
        max_waiting: int,
        counters: health.WorkerMetrics,
        clock: clocks.Clock,
    ) -> None:
        self._classifiers = classifiers
        self._counters = counters
        self._clock = clock
        self._max_waiting = max_waiting
        self._waiting: deque[_WaitingCall] = deque()
        self._num_characters = 0
        self._has_work = asyncio.Event()
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoder")

    def handle(self, call: requests.Call) -> None:
        """Accept or refuse a call; the handler of the endpoint."""
        received_at = self._clock.now()
        self._counters.request_accepted(len(call.body))
        try:
            self._accept(call, received_at)
        except errors.DynamoError as error:
            self._end(received_at, error)
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

    def close(self) -> None:
        """Let the thread end with its batch; one that hangs is left to the end of the process."""
        self._thread.shutdown(wait=False)

    def _accept(self, call: requests.Call, received_at: float) -> None:
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
        num_characters = sum(len(one.text) for one in request.inputs)
        entry = _WaitingCall(call, request, num_characters, received_at)
        self._waiting.append(entry)
        self._num_characters += entry.num_characters
        self._has_work.set()
        call.on_cancel(lambda: self._drop(entry))

    def _drop(self, entry: _WaitingCall) -> None:
        if entry in self._waiting:
            self._waiting.remove(entry)
            self._num_characters -= entry.num_characters
            self._end(entry.received_at, errors.Cancelled("the caller went away"))

    def _end(self, received_at: float, error: errors.DynamoError | None = None) -> None:
        self._counters.request_ended(self._clock.now() - received_at, error)

    async def _compute(self, batch: list[_WaitingCall]) -> None:
        inputs = [one for entry in batch for one in entry.request.inputs]
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._thread, self._classifiers.classify, inputs)
        except Exception as error:
            _logger.exception("a batch of %d texts failed", len(inputs))
            failure = errors.EngineFailed(f"the encoder failed: {type(error).__name__}")
            for entry in batch:
                entry.call.fail(failure)
                self._end(entry.received_at, failure)
            return
        first = 0
        for entry in batch:
            last = first + len(entry.request.inputs)
            entry.call.reply(encoders.ClassificationReply(results=tuple(results[first:last])))
            entry.call.finish()
            self._end(entry.received_at)
            first = last


def main() -> int:
    """Run the process and return its exit status."""
    return process_setup.run_command(_PROG, _run)


def _run() -> None:
    logs.configure()
    argv = [re.sub(r"^--config(?==|$)", "--router-config", word) for word in sys.argv[1:]]
    settings = config.load(SemanticEncoderConfig, prog=_PROG, argv=argv)
    clock = clocks.SystemClock()
    progress = startup.StartProgress(clock, _STALL_S)
    with startup.early_port(settings.system_host, settings.system_port, progress) as start_port:
        classifiers = load_models(settings)
        progress.finish()
        asyncio.run(serve(settings, classifiers, clock, start_port))


def _fetch_hub_model(name: str) -> Path | None:
    """Return the directory of a model of the hub, which is downloaded if need be; None if it cannot be had."""
    try:
        return model_source.resolve(name)
    except errors.ConfigError as error:
        _logger.warning("%s", error)
        return None


def load_models(settings: SemanticEncoderConfig) -> "classifier_set.ClassifierSet":
    """Load the models that the configuration names. Raises ConfigError."""
    if settings.router_config is None:
        raise errors.ConfigError("--config: expected the configuration of the router, got none")
    service = distribution.load_extra("dynamo.semantic.service", feature=_PROG, extra="semantic")
    loaded = service.load_config(Path(settings.router_config), _fetch_hub_model)
    modules = distribution.load_extra("dynamo.worker.classifier_set", feature=_PROG, extra="native")
    if not loaded.uses_process:
        raise errors.ConfigError(
            f"{settings.router_config}: no model_id is a directory or a hub name of an encoder, and "
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


async def serve(
    settings: SemanticEncoderConfig,
    classifiers: "classifier_set.ClassifierSet",
    clock: clocks.Clock,
    start_port: startup.StartPort | None,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError."""
    name = instances.EndpointName(settings.namespace, encoders.COMPONENT, encoders.ENDPOINT)
    counters = health.WorkerMetrics(name, clock)
    accepted = ClassificationRequests(
        classifiers, max_waiting=settings.max_waiting, counters=counters, clock=clock
    )
    stop: asyncio.Event | None = None
    system_port = health.SystemPort(
        endpoints=(name.endpoint,),
        is_ready=lambda: stop is not None and not stop.is_set(),
        uptime_s=lambda: counters.uptime_s,
        render=lambda: counters.render(()),
    )
    running = tasks.Tasks()
    settings = reachability.with_reachable_host(settings, os.environ)
    async with await component.DistributedRuntime.open(settings) as runtime:
        try:
            counters.follow(runtime)
            if start_port is not None:
                await system_port.start_on(start_port.release())
            running.start("classify", accepted.run())
            await runtime.register(name, accepted.handle)
            stop = process_setup.stop_on_signals()
            _logger.info(
                "serving the classifiers %s at %s", ", ".join(sorted(classifiers.names)), name
            )
            await running.run_until(stop)
        finally:
            await runtime.drain(_STOP_S)
            await running.close()
            accepted.close()
            await system_port.close()
