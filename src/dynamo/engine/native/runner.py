"""The model runner: a step's chunks in, its tokens out.

    chunks ── PagedBatch (tokens, and slots of keys and values) ── Decoder ── logits of the chunks' ends ── Sampler

Weights, cache and arithmetic share one type: on a CPU 32 bits, elsewhere the checkpoint's, unless `--dtype` names one.
"""

import dataclasses
from collections import abc
from functools import partial
from pathlib import Path

import torch

from dynamo.base import errors
from dynamo.engine.native import attention, decode_graphs, model_files, models, sampler, weights
from dynamo.engine.native import config as configs
from dynamo.engine.native.sequence import Chunk, Sampled, Sequence
from dynamo.protocols import generate
from dynamo.transfer import descriptors

MAX_LOGITS_ROWS = 64  # computed together; of 150,000 tokens and 32 bits: 40 MB
LogitsOf = abc.Callable[[list[int]], torch.Tensor]  # rows of the batch → logits [rows, vocabulary]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(
    config: configs.ModelConfig | model_files.EncoderShape, dtype: str, device: str
) -> torch.dtype:
    """Return the named type, or for "auto" the one that suits the device. Raises ConfigError."""
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else config.dtype
    if dtype not in DTYPES:
        raise errors.ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}")
    return DTYPES[dtype]


def has_bfloat16() -> bool:
    """Return whether the processor has instructions for products of bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def cache_bytes_per_block(config: configs.ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    """Return the bytes of one block of the KV cache, over all layers."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return per_token * block_size * int(dtype.itemsize)


def check_device(device: str) -> None:
    """Raise ConfigError if torch cannot use the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise errors.ConfigError(
            f"the device {device!r} cannot be used ({reason}); expected cpu, or cuda where torch sees a GPU"
        ) from error


def _region(cache: attention.KvCache, num_blocks: int) -> descriptors.Region:
    """Return the memory of the cache, or that to which a GPU's blocks are copied, as other engines read it."""
    is_copy = cache.device_blocks is not None
    layout = descriptors.Layout(
        num_blocks=num_blocks,
        block_size=cache.block_size,
        num_layers=cache.config.num_layers,
        num_kv_heads=cache.config.num_kv_heads,
        head_dim=cache.config.head_dim,
        dtype=str(cache.dtype).removeprefix("torch."),
        order=descriptors.Order.BLOCK_MAJOR if is_copy else descriptors.Order.LAYER_MAJOR,
    )
    return descriptors.Region(memory=cache.memory, layout=layout)


class PromptLogprobs:
    """Logprobs of the prompts that are being computed, for requests that ask for them.

    The model computes them with the prompt; only the output layer has more to do, for all rows instead of the last. A
    row is as long as the vocabulary, so only a few are computed together. A prompt may come in several chunks, and once
    more after a preemption: logprobs are kept until they are reported with the first token of the answer.
    """

    def __init__(self) -> None:
        self._logprobs: dict[Sequence, list[generate.TokenLogprobs]] = {}

    def add_chunk(self, chunk: Chunk, first_row: int, logits_of: LogitsOf) -> None:
        """Compute the logprobs of a chunk that was run as the rows of the batch from `first_row` on."""
        sequence = chunk.sequence
        logprobs = self._logprobs.setdefault(sequence, [])
        end = min(chunk.start + chunk.num_tokens, sequence.prompt_len - 1)
        num_top = sequence.request.output_options.prompt_logprobs or 0
        for start in range(max(chunk.start, len(logprobs)), end, MAX_LOGITS_ROWS):
            positions = range(start, min(start + MAX_LOGITS_ROWS, end))
            logits = logits_of([first_row + position - chunk.start for position in positions])
            next_ids = sequence.token_ids[positions.start + 1 : positions.stop + 1]
            logprobs += sampler.report_logprobs(logits, next_ids, [num_top] * len(positions))

    def add_to(
        self, sequence: Sequence, drawn: Sampled | errors.DynamoError
    ) -> Sampled | errors.DynamoError:
        """Return the first token of an answer with the prompt's logprobs, if the request asked for them."""
        logprobs = self._logprobs.pop(sequence, None)
        if logprobs is None or isinstance(drawn, errors.DynamoError):
            return drawn
        return dataclasses.replace(drawn, prompt_logprobs=tuple(logprobs))

    def forget(self, sequence: Sequence) -> None:
        """Drop the logprobs of a sequence that has ended."""
        self._logprobs.pop(sequence, None)


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
        allocate: attention.Allocate | None = None,
    ) -> None:
        """Load the checkpoint and allocate the KV cache. Raises ConfigError."""
        if threads is not None:
            torch.set_num_threads(threads)
        check_device(device)
        self.config = configs.read(model_path)
        if not self.config.is_causal:
            raise errors.ConfigError(
                f"{model_path / 'config.json'}: is_causal false is not supported in a model that generates text"
            )
        kind = resolve_dtype(self.config, dtype, device)
        with weights.Checkpoint(model_path, dtype=kind, device=device) as checkpoint:
            self._decoder = models.Decoder(self.config, checkpoint)
        self._cache = attention.KvCache(
            self.config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=kind,
            device=device,
            allocate=allocate,
        )
        self.region = _region(self._cache, num_blocks)
        self.device_blocks = self._cache.device_blocks
        reachable = min(self.config.max_context, num_blocks * block_size)
        self._cos, self._sin = self.config.rope.tables(reachable, dtype=kind, device=device)
        self._graphs: decode_graphs.DecodeGraphs | None = None
        # of experts the number of tokens would decide the shapes
        if device == "cuda" and self.config.experts is None:
            self._graphs = decode_graphs.DecodeGraphs(
                self._decoder, self._cache, self._cos, self._sin
            )
        self._sampler = sampler.Sampler()
        self._prompt_logprobs = PromptLogprobs()

    def run(self, chunks: abc.Sequence[Chunk]) -> list[Sampled | errors.DynamoError | None]:
        """Compute these chunks; return for each the drawn token, an error, or None if it does not sample."""
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        sampled = self._sampler.sample(self.logits(chunks), sequences)
        drawn = iter(map(self._prompt_logprobs.add_to, sequences, sampled))
        return [next(drawn) if chunk.samples else None for chunk in chunks]

    def logits(self, chunks: abc.Sequence[Chunk]) -> torch.Tensor:
        """Compute these chunks; return logits [chunks that sample, vocabulary] in 32 bits."""
        with torch.inference_mode():
            self._cache.clear_begun(chunks)
            logits = self._graphs.logits(chunks) if self._graphs is not None else None
            if logits is not None:
                return logits
            batch = attention.PagedBatch(self._cache, chunks)
            cos, sin = (x.index_select(0, batch.positions) for x in (self._cos, self._sin))
            hidden = self._decoder.hidden(batch.token_ids, cos, sin, batch)
            for last, chunk in zip(batch.last_rows, chunks, strict=True):
                if chunk.sequence.wants_prompt_logprobs:
                    first = last - chunk.num_tokens + 1
                    logits_of = partial(self._logits_of, hidden)
                    self._prompt_logprobs.add_chunk(chunk, first, logits_of)
            ends = [
                row for row, chunk in zip(batch.last_rows, chunks, strict=True) if chunk.samples
            ]
            return self._logits_of(hidden, ends)

    def forget(self, sequence: Sequence) -> None:
        """Drop the sampling state of a sequence that has ended. An unknown one is no error."""
        self._sampler.forget(sequence)
        self._prompt_logprobs.forget(sequence)

    def _logits_of(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        padded = rows + [0] * (attention.padded_rows(len(rows)) - len(rows))
        indices = torch.tensor(padded, dtype=torch.int64, device=self._cache.device)
        return self._decoder.logits(hidden.index_select(0, indices))[: len(rows)].float()
