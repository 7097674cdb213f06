"""The one door to SGLang, and so the one file that knows what its releases call things.

Read in the sources of 0.5.23: `srt/entrypoints/engine.py`, `srt/server_args.py`, `srt/managers/tokenizer_manager.py`,
`srt/managers/load_snapshot.py`. Not run here.
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
CLEAR_S = 30.0  # SGLang forgets prefixes when nothing runs: so long it waits for that


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise errors.ConfigError(f"SGLang: {message}")


def read_flags(flags: Sequence[str], overrides: Mapping[str, Any]) -> ServerArgs:
    """SGLang's own flags as it understands them; `overrides` are fields that we say. Raises ConfigError."""
    parser = _Parser(prog="sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    words = [*flags, "--model-path", str(overrides["model_path"])]  # it must be among them
    given = parser.parse_args(words)
    vars(given).update(overrides)
    try:
        return ServerArgs.from_cli_args(given)
    except (ValueError, TypeError, AssertionError) as error:
        raise errors.ConfigError(f"SGLang: {error}") from error


async def start(arguments: ServerArgs) -> Engine:
    """An engine that has loaded; our event loop turns meanwhile. Raises EngineFailed.

    Off the main thread SGLang sets no signal handlers. It does so once when its streams are first read: here, so that
    whoever has handlers of his own can set them afterwards.
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
    """What is known once it has loaded."""
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
    """How many tokens the model knows."""
    size: int = engine.tokenizer_manager.model_config.vocab_size
    return size


def snapshots(engine: Engine) -> Sequence[Any]:
    """What each rank said last (`LoadSnapshot`), from shared memory; none before its first step."""
    read: Sequence[Any] = engine.tokenizer_manager.load_snapshot_reader.read_all()
    return read


async def generate(
    engine: Engine, token_ids: list[int], name: str, plan: Mapping[str, Any]
) -> AsyncIterator[Any]:
    """What SGLang says of this request, step by step."""
    stream = await engine.async_generate(input_ids=token_ids, rid=name, stream=True, **plan)
    async for said in stream:
        yield said


def abort(engine: Engine, name: str) -> None:
    """All requests whose names begin so."""
    engine.tokenizer_manager.abort_request(rid=name)


async def forget_prefixes(engine: Engine) -> None:
    """When nothing runs. Raises EngineFailed if that does not come in time."""
    result = await engine.tokenizer_manager.flush_cache(timeout_s=CLEAR_S)
    if not result.success:
        raise errors.EngineFailed(result.message or f"something ran for {CLEAR_S:.0f} s")
