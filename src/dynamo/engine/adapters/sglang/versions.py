"""The only module that imports SGLang, and so the only one that depends on its releases.

Written after the sources of 0.5.23: `srt/entrypoints/engine.py`, `srt/server_args.py`,
`srt/managers/tokenizer_manager.py`, `srt/managers/load_snapshot.py`. Not run here.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NoReturn

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.runtime_context import get_schedule
from sglang.srt.server_args import ServerArgs

from dynamo.base import errors
from dynamo.engine import api

__all__ = ["Engine", "ServerArgs"]
CLEAR_TIMEOUT_S = 30.0  # SGLang clears its cache only when no request runs


class _SglangParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise errors.ConfigError(f"SGLang: {message}")


def read_flags(flags: Sequence[str], overrides: Mapping[str, Any]) -> ServerArgs:
    """Parse SGLang's own flags with its parser; `overrides` replaces parsed fields. Raises ConfigError."""
    parser = _SglangParser(prog="sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    words = [*flags, "--model-path", str(overrides["model_path"])]  # required by the parser
    namespace = parser.parse_args(words)
    vars(namespace).update(overrides)
    try:
        return ServerArgs.from_cli_args(namespace)
    except (ValueError, TypeError, AssertionError) as error:
        raise errors.ConfigError(f"SGLang: {error}") from error


async def start(arguments: ServerArgs) -> Engine:
    """Load an engine without blocking the event loop. Raises EngineFailed.

    Off the main thread SGLang installs no signal handlers. It does so once, when its streams are first read: that
    happens here, so that the caller can install its own handlers afterwards.
    """
    try:
        engine = await asyncio.to_thread(Engine, server_args=arguments)
        engine.tokenizer_manager.auto_create_handle_loop()
    except Exception as error:
        raise errors.EngineFailed(
            f"SGLang did not start: {type(error).__name__}: {error}"
        ) from error
    return engine


def facts(engine: Engine) -> api.EngineFacts:
    """Return the facts of a loaded engine."""
    model, loads = engine.tokenizer_manager.model_config, snapshots(engine)
    schedule, arguments = get_schedule(), engine.server_args
    first: Mapping[str, Any] = engine._scheduler_init_result.scheduler_infos[0]
    page_size = schedule.page_size or 1
    chunk = schedule.chunked_prefill_size or 0
    return api.EngineFacts(
        context_length=model.context_len,
        kv_block_size=page_size,
        total_kv_blocks=first["max_total_num_tokens"] // page_size,
        max_num_seqs=loads[0].max_running_requests if loads else schedule.max_running_requests,
        max_num_batched_tokens=chunk if chunk > 0 else schedule.max_prefill_tokens,
        data_parallel_size=arguments.dp_size,
        supports_guided=not arguments.skip_tokenizer_init,
    )


def vocab_size(engine: Engine) -> int:
    """Return the number of token ids of the model."""
    size: int = engine.tokenizer_manager.model_config.vocab_size
    return size


def snapshots(engine: Engine) -> Sequence[Any]:
    """Return the last LoadSnapshot of each rank, from shared memory; a rank has none before its first step."""
    snapshots: Sequence[Any] = engine.tokenizer_manager.load_snapshot_reader.read_all()
    return snapshots


async def generate(
    engine: Engine, token_ids: list[int], name: str, plan: Mapping[str, Any]
) -> AsyncIterator[Any]:
    """Yield SGLang's results for a request, one for each step."""
    stream = await engine.async_generate(input_ids=token_ids, rid=name, stream=True, **plan)
    async for result in stream:
        yield result


def abort(engine: Engine, name: str) -> None:
    """Abort all requests with names that begin with `name`."""
    engine.tokenizer_manager.abort_request(rid=name)


async def clear_prefix_cache(engine: Engine) -> None:
    """Clear the prefix cache once no request runs. Raises EngineFailed after CLEAR_TIMEOUT_S."""
    result = await engine.tokenizer_manager.flush_cache(timeout_s=CLEAR_TIMEOUT_S)
    if not result.success:
        raise errors.EngineFailed(
            result.message or f"requests were running for {CLEAR_TIMEOUT_S:.0f} s"
        )
