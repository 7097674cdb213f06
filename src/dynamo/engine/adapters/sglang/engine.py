"""SGLang behind the engine seam (`streams`): its requests, its load, its KV events, its death.

Its schedulers are processes of their own. One that fails sends SIGQUIT to us, as does SGLang's watch over them; its own
handler of that would kill this process, ours tells the worker, whose requests then go on elsewhere.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.adapters import kv_feed, streams
from dynamo.engine.adapters.rank_load import RankLoad
from dynamo.engine.adapters.sglang import arguments, outputs, sampling, versions
from dynamo.engine.adapters.sglang.settings import SglangConfig
from dynamo.protocols import blocks, generate, load


def build(directory: Path, settings: SglangConfig, model_name: str) -> streams.StreamingEngine:
    """The engine for the model in `directory`, not yet started. Raises ConfigError."""
    return streams.StreamingEngine(
        SglangLibrary(arguments.server_args(directory, settings, model_name))
    )


class SglangLibrary:
    """A `streams.Library`."""

    name = "SGLang"

    def __init__(self, args: versions.ServerArgs) -> None:
        self._args = args
        self._ability = sampling.Ability(
            has_tokenizer=not args.skip_tokenizer_init,
            takes_priority=args.enable_priority_scheduling,
            is_low_first=args.schedule_low_priority_values_first,
        )
        self._engine: versions.Engine | None = None
        self._feed: kv_feed.KvFeed | None = None
        self._death: errors.EngineFailed | None = None

    async def start(self, tell: streams.Tell) -> api.EngineFacts:
        """Load, in processes of SGLang's."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGQUIT, self._quit)
        endpoints = arguments.kv_endpoints(self._args)
        if endpoints is not None:
            self._feed = kv_feed.KvFeed(endpoints, self._args.dp_size)
        self._engine = await versions.start(self._args)
        loop.add_signal_handler(signal.SIGQUIT, self._quit)  # SGLang has just set its own
        facts = versions.facts(self._engine)
        if self._feed is not None:
            self._feed.start(facts.kv_block_size, tell)
        return facts

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return versions.vocab_size(self._started)

    def plan(self, request: generate.Request, index: int) -> Any:
        """Arguments for SGLang."""
        return sampling.plan(request, index, self._ability)

    def stream(self, request: generate.Request, plan: Any, name: str) -> AsyncIterator[Any]:
        """What it says of one choice."""
        return versions.generate(self._started, blocks.unpack(request.token_ids), name, plan)

    def translate(
        self, said: Any, index: int, request: generate.Request, *, is_first: bool
    ) -> generate.Output:
        """In our words."""
        return outputs.translate(said, index, request, is_first=is_first)

    def explain(self, error: Exception) -> errors.DynamoError:
        """It raises ValueError for what is wrong with a request."""
        if isinstance(error, ValueError):
            return errors.InvalidRequest(f"SGLang: {error}")
        return errors.EngineFailed(f"SGLang: {type(error).__name__}: {error}")

    def death(self) -> BaseException | None:
        """Since the signal."""
        return self._death

    async def abort(self, names: Sequence[str]) -> None:
        """Each by its name."""
        for name in names:
            versions.abort(self._started, name)

    def load(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        """As of each rank's last step."""
        said = {one.dp_rank: one for one in versions.snapshots(self._started)}
        share = num_prefill_tokens // facts.data_parallel_size
        return [
            _rank_load(said.get(rank), facts).metrics(
                facts, rank, num_prefill_tokens=share, is_idle=is_idle
            )
            for rank in range(facts.data_parallel_size)
        ]

    async def clear(self) -> None:
        """When nothing runs."""
        await versions.forget_prefixes(self._started)

    async def stop(self) -> None:
        """End its processes: SGLang ends all children of this one."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await asyncio.to_thread(engine.shutdown)
        if self._feed is not None:
            await self._feed.close()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)

    @property
    def _started(self) -> versions.Engine:
        assert self._engine is not None, "the engine is used before start() has returned"
        return self._engine

    def _quit(self) -> None:
        self._death = errors.EngineFailed("a process of SGLang's failed")


def _rank_load(said: Any, facts: api.EngineFacts) -> RankLoad:
    if said is None:
        return RankLoad()
    return RankLoad(
        num_running=said.num_running_reqs,
        num_waiting=said.num_waiting_reqs,
        num_blocks=said.num_used_tokens // facts.kv_block_size,
        hit_rate=said.cache_hit_rate,
    )
