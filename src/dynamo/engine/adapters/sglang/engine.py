"""SGLang's engine behind the engine seam (`streams.Library`): arguments, requests, load, KV events.

Its schedulers are processes of their own. One that fails sends SIGQUIT to this process, as does SGLang's watchdog;
SGLang's handler of that signal would kill this process, ours reports the death, and the worker's requests migrate.
"""

import asyncio
import dataclasses
import json
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.adapters import kv_subscriber, startup, streams
from dynamo.engine.adapters.sglang import translation, versions
from dynamo.engine.adapters.sglang.settings import SglangConfig
from dynamo.protocols import blocks, generate, load

_DEFAULT_KV_ENDPOINT = "tcp://*:5557"  # where SGLang publishes KV events by default
_REFUSED_FLAGS = {
    **startup.RESERVED_FLAGS,
    "--skip-tokenizer-init": "--skip-tokenizer-init is the default; --load-tokenizer is its contrary",
    "--tokenizer-worker-num": "--tokenizer-worker-num: our frontend makes tokens, SGLang needs no workers for that",
    "--node-rank": "--node-rank: SGLang on several hosts is not supported yet",
    "--nnodes": "--nnodes: SGLang on several hosts is not supported yet",
}


def build(directory: Path, settings: SglangConfig, model_name: str) -> streams.StreamingEngine:
    """Return the engine for the model in `directory`, not yet started. Raises ConfigError."""
    return streams.StreamingEngine(SglangLibrary(server_args(directory, settings, model_name)))


def server_args(directory: Path, settings: SglangConfig, model_name: str) -> versions.ServerArgs:
    """Return SGLang's arguments to serve the model in `directory` as `model_name`. Raises ConfigError."""
    startup.refuse_flags(settings.engine_args, _REFUSED_FLAGS)
    overrides = {
        "model_path": str(directory),
        "served_model_name": model_name,
        "skip_tokenizer_init": not settings.load_tokenizer,
        "incremental_streaming_output": True,  # each result has the new tokens, not all so far
    }
    return versions.read_flags(settings.engine_args, overrides)


def kv_event_endpoints(args: versions.ServerArgs) -> kv_subscriber.PublisherEndpoints | None:
    """Return where SGLang publishes its KV events, or None if it publishes none.

    Unless the user has configured it, free ports are chosen and written into `args`.
    """
    if args.kv_events_config is None and not args.disable_radix_cache:
        endpoints = kv_subscriber.PublisherEndpoints.on_free_ports(args.dp_size)
        args.kv_events_config = json.dumps({"publisher": "zmq", **dataclasses.asdict(endpoints)})
        return endpoints
    config = json.loads(args.kv_events_config or "{}")
    if config.get("publisher") != "zmq":
        return None
    return kv_subscriber.PublisherEndpoints(
        endpoint=config.get("endpoint", _DEFAULT_KV_ENDPOINT),
        replay_endpoint=config.get("replay_endpoint"),
        topic=config.get("topic", ""),
    )


class SglangLibrary:
    """SGLang's `Engine` as a `streams.Library`."""

    name = "SGLang"

    def __init__(self, args: versions.ServerArgs) -> None:
        self._args = args
        self._features = translation.SglangFeatures(
            has_tokenizer=not args.skip_tokenizer_init,
            has_priority=args.enable_priority_scheduling,
            is_low_first=args.schedule_low_priority_values_first,
        )
        self._engine: versions.Engine | None = None
        self._kv_subscriber: kv_subscriber.ZmqKvSubscriber | None = None
        self._death: errors.EngineFailed | None = None

    async def start(self, on_kv_events: streams.OnKvEvents) -> api.EngineFacts:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGQUIT, self._record_death)
        endpoints = kv_event_endpoints(self._args)
        if endpoints is not None:
            self._kv_subscriber = kv_subscriber.ZmqKvSubscriber(endpoints, self._args.dp_size)
        self._engine = await versions.start(self._args)
        # Again, as SGLang has just installed a handler of its own.
        loop.add_signal_handler(signal.SIGQUIT, self._record_death)
        facts = versions.facts(self._engine)
        if self._kv_subscriber is not None:
            self._kv_subscriber.start(facts.kv_block_size, on_kv_events)
        return facts

    @property
    def vocab_size(self) -> int:
        return versions.vocab_size(self._started)

    def plan(self, request: generate.Request, index: int) -> Any:
        return translation.generate_arguments(request, index, self._features)

    def stream(self, request: generate.Request, plan: Any, name: str) -> AsyncIterator[Any]:
        return versions.generate(self._started, blocks.unpack(request.token_ids), name, plan)

    def translate(
        self, result: Any, index: int, request: generate.Request, *, is_first: bool
    ) -> generate.Output:
        return translation.translate_output(result, index, request, is_first=is_first)

    def explain(self, error: Exception) -> errors.DynamoError:
        """Convert an error; SGLang raises ValueError for a wrong request."""
        if isinstance(error, ValueError):
            return errors.InvalidRequest(f"SGLang: {error}")
        return errors.EngineFailed(f"SGLang: {type(error).__name__}: {error}")

    def death(self) -> BaseException | None:
        return self._death

    async def abort(self, names: Sequence[str]) -> None:
        for name in names:
            versions.abort(self._started, name)

    def load(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        snapshots = {snapshot.dp_rank: snapshot for snapshot in versions.snapshots(self._started)}
        num_tokens = num_prefill_tokens // facts.data_parallel_size
        return [
            translation.rank_load(snapshots.get(rank), facts).metrics(
                facts, rank, num_prefill_tokens=num_tokens, is_idle=is_idle
            )
            for rank in range(facts.data_parallel_size)
        ]

    async def clear(self) -> None:
        await versions.clear_prefix_cache(self._started)

    async def stop(self) -> None:
        """End SGLang: its shutdown ends all children of this process."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await asyncio.to_thread(engine.shutdown)
        if self._kv_subscriber is not None:
            await self._kv_subscriber.close()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)

    @property
    def _started(self) -> versions.Engine:
        assert self._engine is not None, "the engine is used before start() has returned"
        return self._engine

    def _record_death(self) -> None:
        self._death = errors.EngineFailed("a process of SGLang's failed")
