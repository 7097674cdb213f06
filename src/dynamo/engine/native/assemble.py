"""Assembly of the engine's parts from a checkpoint and settings: KV cache size, context length, threads.

Threads share a matrix product and synchronize after each one. Where the matrices are small, synchronization takes
longer than the sharing saves; and where another process uses the cores too, it waits for the thread that has lost its
core. So a small model is computed by one thread, and only large matrices by all cores. Waiting threads must sleep, not
spin, or they take the cores from those they wait for: `OMP_WAIT_POLICY`, which the worker sets before torch is loaded
(`worker.engines`).
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.native import (
    attention,
    config,
    device_memory,
    grammar_compiler,
    model_files,
    runner,
)
from dynamo.engine.native.scheduler import Scheduler, SchedulerLimits
from dynamo.engine.native.sequence import Paging
from dynamo.engine.native.settings import NativeConfig
from dynamo.kvbm import tier_copies, tier_setup
from dynamo.transfer import api as transfer
from dynamo.transfer import descriptors

log = logging.getLogger(__name__)
GIB = 2**30
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # exists in a container
# Weights of a layer's largest matrix from which sharing pays: reading them takes about ten times one synchronization.
SPLIT_WEIGHTS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """The parts of a loaded engine, complete but for its thread, which `loop` is."""

    facts: api.EngineFacts
    vocab_size: int
    scheduler: Scheduler
    runner: runner.Runner
    grammars: grammar_compiler.GrammarCompiler
    region: descriptors.Region | None = None  # the KV cache, if other engines may read it
    mirror: transfer.BlockCopier | None = None  # between a GPU's memory and the region
    copies: tier_copies.TierCopies | None = None  # between the tiers of the KV cache


def assemble(
    model_path: Path, settings: NativeConfig, allocate: attention.Allocate | None = None
) -> Assembly:
    """Load the checkpoint, which takes seconds. `allocate` allocates the KV cache's memory. Raises ConfigError."""
    check_settings(settings)
    model = config.read(model_path)
    num_blocks = count_blocks(model, settings)
    context_length = choose_context(model.max_context, settings, num_blocks)
    paging = Paging(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        prefix_caching=settings.enable_prefix_caching,
    )
    limits = SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.step_tokens,
        context_length=context_length,
    )
    grammars = grammar_compiler.GrammarCompiler(model_path / "tokenizer.json", model.vocab_size)
    facts = api.EngineFacts(
        context_length=context_length,
        kv_block_size=settings.block_size,
        total_kv_blocks=num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.step_tokens,
        supports_guided=grammars.is_possible,
    )
    model_runner = runner.Runner(
        model_path,
        device=settings.device,
        dtype=settings.dtype,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        threads=choose_threads(model, settings),
        allocate=allocate,
    )
    region, device = model_runner.region, model_runner.device_blocks
    fingerprint = {"model": tier_setup.identify_model(model_path)}
    tiers = tier_setup.open_tiers(
        settings,
        region.layout,
        device or device_memory.RegionBlocks(region),
        paging.pool,
        fingerprint,
    )
    paging.tiers = tiers.cache if tiers is not None else None
    return Assembly(
        grammars=grammars,
        facts=facts,
        vocab_size=model.vocab_size,
        scheduler=Scheduler(paging, limits),
        runner=model_runner,
        region=region,
        mirror=device.attach(region.memory) if device else None,
        copies=tiers.copies if tiers is not None else None,
    )


def check_settings(settings: NativeConfig) -> None:
    """Raise ConfigError for settings that no model can run with."""
    if settings.step_tokens < settings.max_num_seqs:
        raise errors.ConfigError(
            f"--max-num-batched-tokens {settings.step_tokens} is less than --max-num-seqs"
            f" {settings.max_num_seqs}: every running sequence must get a token in each step"
        )


def count_blocks(model: config.ModelConfig, settings: NativeConfig) -> int:
    """Return the blocks of the KV cache: as many as its memory holds, but no more than all slots can use.

    Raises ConfigError.
    """
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override
    dtype = runner.resolve_dtype(model, settings.dtype, settings.device)
    block_bytes = runner.cache_bytes_per_block(model, dtype, settings.block_size)
    num_fitting = int(settings.kv_cache_memory_gb * GIB) // block_bytes
    if num_fitting < 1:
        raise errors.ConfigError(
            f"--kv-cache-memory-gb {settings.kv_cache_memory_gb:g} holds no block of"
            f" {block_bytes / 2**20:.5g} MiB; give more memory or a smaller --block-size"
        )
    context_length = min(settings.max_model_len or model.max_context, model.max_context)
    num_usable = settings.max_num_seqs * -(-context_length // settings.block_size)
    return min(num_fitting, num_usable)


def choose_context(max_context: int, settings: NativeConfig, num_blocks: int) -> int:
    """Return the context length that model, settings and memory allow. Raises ConfigError for a longer one."""
    capacity = num_blocks * settings.block_size
    requested = settings.max_model_len
    if requested is not None and requested > min(max_context, capacity):
        raise errors.ConfigError(
            f"--max-model-len {requested}: the model's context has {max_context} tokens, and the"
            f" KV cache of {num_blocks} blocks holds {capacity}; lower it or give more memory"
        )
    if requested is None and capacity < max_context:
        log.warning(
            "the context is cut from %d tokens to %d, which is what the KV cache holds;"
            " --kv-cache-memory-gb gives it more memory",
            max_context,
            capacity,
        )
    return requested or min(max_context, capacity)


def choose_threads(
    model: config.ModelConfig | model_files.EncoderConfig, settings: NativeConfig
) -> int:
    """Return the number of CPU threads that compute, and log the choice.

    It follows the flag, else OMP_NUM_THREADS (as torch does), else the size of the model and the CPU limit of a
    container.
    """
    number: int = torch.get_num_threads()
    reason = "all cores that this process may use"
    largest = 2 * model.hidden_size * model.intermediate_size  # gate and up are one matrix
    if settings.threads is not None:
        number, reason = settings.threads, "as --threads says"
    elif os.environ.get("OMP_NUM_THREADS"):
        reason = "as OMP_NUM_THREADS says"
    elif largest < SPLIT_WEIGHTS:
        number, reason = 1, "the model's matrices are too small to be split"
    else:
        quota, _, period = (CPU_MAX.read_text() if CPU_MAX.exists() else "").partition(" ")
        if quota.isdigit() and period.strip().isdigit():  # without a limit it is "max 100000"
            number = min(number, max(1, int(quota) // int(period)))
    log.info("computing with CPU threads: %d (%s)", number, reason)
    return number
