"""From a checkpoint and settings to an engine that can step: how much memory, how long a context, which parts."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.native import config, encoder_config, runner, threads
from dynamo.engine.native.guidance import grammars
from dynamo.engine.native.paging import Paging
from dynamo.engine.native.scheduler import Limits, Scheduler
from dynamo.engine.native.settings import NativeConfig

log = logging.getLogger(__name__)
GIB = 2**30
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # of a container, or of nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """The parts of a loaded engine."""

    facts: api.EngineFacts
    vocab_size: int
    scheduler: Scheduler
    runner: runner.Runner
    grammars: grammars.Grammars


def assemble(model_path: Path, settings: NativeConfig) -> Assembly:
    """Load the checkpoint; takes seconds. Raises ConfigError."""
    check(settings)
    model = config.read(model_path)
    num_blocks = count_blocks(model, settings)
    context_length = choose_context(model.max_context, settings, num_blocks)
    paging = Paging(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        prefix_caching=settings.enable_prefix_caching,
    )
    limits = Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.step_tokens,
        context_length=context_length,
    )
    known = grammars.Grammars(model_path / "tokenizer.json", model.vocab_size)
    facts = api.EngineFacts(
        context_length=context_length,
        kv_block_size=settings.block_size,
        total_kv_blocks=num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.step_tokens,
        supports_guided=known.is_possible,
    )
    return Assembly(
        grammars=known,
        facts=facts,
        vocab_size=model.vocab_size,
        scheduler=Scheduler(paging, limits),
        runner=runner.Runner(
            model_path,
            device=settings.device,
            dtype=settings.dtype,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            threads=choose_threads(model, settings),
        ),
    )


def check(settings: NativeConfig) -> None:
    """Raises ConfigError for settings that no model could run with."""
    for name in (
        "block_size",
        "num_gpu_blocks_override",
        "max_num_seqs",
        "max_model_len",
        "threads",
    ):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise errors.ConfigError(
                f"--{name.replace('_', '-')}: expected at least 1, got {value}"
            )
    if settings.step_tokens < settings.max_num_seqs:
        raise errors.ConfigError(
            f"--max-num-batched-tokens {settings.step_tokens} is less than --max-num-seqs"
            f" {settings.max_num_seqs}: every running sequence must get a token in each step"
        )


def count_blocks(model: config.ModelConfig, settings: NativeConfig) -> int:
    """Blocks of the KV cache: what the memory holds, but no more than all slots can use. Raises ConfigError."""
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override
    dtype = runner.resolve_dtype(model, settings.dtype, settings.device)
    block_bytes = runner.cache_bytes_per_block(model, dtype, settings.block_size)
    affordable = int(settings.kv_cache_memory_gb * GIB) // block_bytes
    if affordable < 1:
        raise errors.ConfigError(
            f"--kv-cache-memory-gb {settings.kv_cache_memory_gb:g} holds no block of"
            f" {block_bytes / GIB:.3g} GiB; give more memory or a smaller --block-size"
        )
    context_length = min(settings.max_model_len or model.max_context, model.max_context)
    usable = settings.max_num_seqs * -(-context_length // settings.block_size)
    return min(affordable, usable)


def choose_context(max_context: int, settings: NativeConfig, num_blocks: int) -> int:
    """The longest sequence that model, settings and memory allow. Raises ConfigError if one was asked for in vain."""
    capacity = num_blocks * settings.block_size
    wanted = settings.max_model_len
    if wanted is not None and wanted > min(max_context, capacity):
        raise errors.ConfigError(
            f"--max-model-len {wanted}: the model's context has {max_context} tokens, and the"
            f" KV cache of {num_blocks} blocks holds {capacity}; lower it or give more memory"
        )
    if wanted is None and capacity < max_context:
        log.warning(
            "the context is cut from %d tokens to %d, which is what the KV cache holds;"
            " --kv-cache-memory-gb gives it more memory",
            max_context,
            capacity,
        )
    return wanted or min(max_context, capacity)


def choose_threads(
    model: config.ModelConfig | encoder_config.EncoderConfig, settings: NativeConfig
) -> int:
    """How many CPU threads compute; the choice is logged."""
    choice = threads.choose(
        model,
        asked=settings.threads,
        environment=os.environ.get("OMP_NUM_THREADS"),
        cores=torch.get_num_threads(),
        cpu_max=CPU_MAX.read_text() if CPU_MAX.exists() else "",
    )
    log.info("computing with CPU threads: %d (%s)", choice.number, choice.reason)
    return choice.number
