"""The compute half of the engine: a step's chunks in, its tokens out.

    chunks ── Batch (what to compute, where keys and values lie) ── Decoder ── logits of the chunks' ends ── Sampler

Weights, cache and arithmetic share one type: on a CPU 32 bits, elsewhere the checkpoint's, unless one is asked for.
"""

from collections import abc
from functools import partial
from pathlib import Path

import torch

from dynamo.base import errors
from dynamo.engine.native import (
    attention,
    encoder_config,
    kv_cache,
    prompt_scores,
    sampler,
    weights,
)
from dynamo.engine.native import config as configs
from dynamo.engine.native.models.decoder import Decoder
from dynamo.engine.native.sequence import Chunk, Sampled, Sequence

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(
    config: configs.ModelConfig | encoder_config.EncoderConfig, dtype: str, device: str
) -> torch.dtype:
    """The type named, or the one that suits the device ("auto"). Raises ConfigError."""
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else config.dtype
    if dtype not in DTYPES:
        raise errors.ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}")
    return DTYPES[dtype]


def cache_bytes_per_block(config: configs.ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    """Memory that one block of the KV cache takes, over all layers."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return per_token * block_size * int(dtype.itemsize)


def check_device(device: str) -> None:
    """Raises ConfigError if nothing can be computed there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise errors.ConfigError(
            f"the device {device!r} cannot be used ({reason}); expected cpu, or cuda where torch sees a GPU"
        ) from error


class Runner:
    """Owns the weights, the KV cache and the sampler. Only the engine's thread calls it."""

    def __init__(
        self,
        model_path: Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        num_blocks: int,
        block_size: int,
        threads: int | None = None,
    ) -> None:
        """Loads the checkpoint and takes the cache's memory. Raises ConfigError."""
        if threads is not None:
            torch.set_num_threads(threads)
        check_device(device)
        self.config = configs.read(model_path)
        kind = resolve_dtype(self.config, dtype, device)
        with weights.Checkpoint(model_path, dtype=kind, device=device) as checkpoint:
            self._decoder = Decoder(self.config, checkpoint)
        self._cache = kv_cache.KvCache(
            self.config, num_blocks=num_blocks, block_size=block_size, dtype=kind, device=device
        )
        reachable = min(self.config.max_context, num_blocks * block_size)
        self._cos, self._sin = self.config.rope.tables(reachable, dtype=kind, device=device)
        self._sampler = sampler.Sampler()
        self._prompts = prompt_scores.PromptScores()

    def run(self, chunks: abc.Sequence[Chunk]) -> list[Sampled | errors.DynamoError | None]:
        """Compute these chunks; one answer per chunk: None where it does not sample, an error where it cannot."""
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        found = self._sampler.sample(self.logits(chunks), sequences)
        drawn = iter(map(self._prompts.tell, sequences, found))
        return [next(drawn) if chunk.samples else None for chunk in chunks]

    def logits(self, chunks: abc.Sequence[Chunk]) -> torch.Tensor:
        """Compute these chunks; [those that sample, vocabulary] in 32 bits: what may come after each."""
        with torch.inference_mode():
            batch = attention.Batch(self._cache, chunks)
            cos, sin = (x.index_select(0, batch.positions) for x in (self._cos, self._sin))
            hidden = self._decoder.hidden(batch.token_ids, cos, sin, batch)
            for last, chunk in zip(batch.last_rows, chunks, strict=True):
                if chunk.sequence.wants_prompt_logprobs:
                    first = last - chunk.num_tokens + 1
                    self._prompts.read(chunk, first, partial(self._logits_of, hidden))
            ends = [
                row for row, chunk in zip(batch.last_rows, chunks, strict=True) if chunk.samples
            ]
            return self._logits_of(hidden, ends)

    def forget(self, sequence: Sequence) -> None:
        """Drop what sampling remembers of a sequence that has ended. An unknown one is no error."""
        self._sampler.forget(sequence)
        self._prompts.forget(sequence)

    def _logits_of(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        padded = rows + [0] * (attention.padded_rows(len(rows)) - len(rows))
        wanted = torch.tensor(padded, dtype=torch.int64, device=self._cache.device)
        return self._decoder.logits(hidden.index_select(0, wanted))[: len(rows)].float()
