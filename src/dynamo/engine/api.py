"""The engine seam: what the worker asks of any engine.

It must fit three kinds: an engine of ours whose loop is a thread that makes one batch per step; a foreign
engine with one asynchronous stream per request, whose adapter gathers what one turn of the event loop brought;
and a simulated one. So outputs go to one sink, in batches.

Every method is called on the worker's event loop, and the sink is called there too.
`tests/engine_suite.py` holds every engine to this.

An `Embedder` is the smaller sibling: it has no state between batches, so it is asked and answers; who waits for what
is the worker's matter. `tests/contract/test_embedder.py` holds every embedder to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from dynamo.base import errors
from dynamo.kvbm import sharing
from dynamo.protocols import generate, kv_events, load, model_card


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is known once an engine has started; it goes onto the model card. Blocks and limits are those of a rank."""

    context_length: int  # tokens, prompt and answer together
    kv_block_size: int  # tokens
    total_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    data_parallel_size: int = 1
    supports_logprobs: bool = True
    max_top_logprobs: int = 20
    supports_prompt_logprobs: bool = True
    supports_guided: bool = False  # can it hold an answer to a grammar?
    lora_names: tuple[str, ...] = ()  # adapters that can be asked for


class EngineOutput(NamedTuple):
    """What a step brought for one request."""

    request_id: str
    output: generate.Output


class EngineSink(Protocol):
    """Where an engine's results go."""

    def outputs(self, batch: Sequence[EngineOutput]) -> None:
        """All outputs of one step. A choice ends with its finish_reason; a request when all its n choices ended."""
        ...

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        """This request is over, by an error; nothing more comes for it."""
        ...

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        """What one step of one data-parallel rank stored and removed, in order."""
        ...

    def died(self, error: errors.EngineFailed) -> None:
        """The engine is beyond use; all its requests are lost."""
        ...


class KvTransferPeer(Protocol):
    """Moves KV blocks between this engine and others, so that one computes a prompt and another answers it.

    Of a request with KV transfer parameters that say `do_remote_decode`, the engine computes the prompt and keeps its
    blocks under a lease, until the importing engine releases it or a time limit passes; the last output says where the
    blocks are (`protocols.kv_transfer`). A request that brings such parameters waits until the blocks that are missing
    here are copied, while others go on; if anything fails, its prompt is computed here. Its answer may begin, before
    the copy has ended, with the token that was drawn with the prompt.
    `tests/contract/test_remote_prefill.py` holds every engine to this.
    """

    def enable_export(self) -> None:
        """Let other engines copy blocks from here; before `start`. Otherwise this engine can only import."""
        ...

    @property
    def transfer_metadata(self) -> bytes | None:
        """The argument of another engine's `connect_peer`; None unless export is enabled and the engine has started."""
        ...

    def on_import(self, listener: Callable[[sharing.ImportReport], None]) -> None:
        """Call `listener` after every import of blocks from another engine."""
        ...

    async def connect_peer(self, metadata: bytes, *, deadline_s: float) -> str:
        """Prepare for imports from the engine that exported `metadata`; return its id.

        Idempotent. Raises TransferError.
        """
        ...

    async def disconnect_peer(self, engine_id: str) -> None:
        """Stop connecting to an engine that leaves or is gone. An unknown id is no error."""
        ...


class KvExportDrain(Protocol):
    """Lets an engine that shuts down wait until no other engine needs its blocks."""

    async def wait_until_released(self) -> None:
        """Return when no block is under a lease: all leases were released, or their time limits have passed."""
        ...


class SleepController(Protocol):
    """Releases an engine's memory for a while, and takes it back.

    The caller ensures that no request runs or is submitted before the engine is awake again, and clears the reusable
    KV blocks before it calls `sleep`. `tests/contract/test_sleep_controller.py` holds every engine to this.
    """

    async def sleep(self, level: int) -> None:
        """Release the engine's memory.

        Level 1 moves the weights to host memory; level 2 drops them, and `wake_up` reads them from the files again.
        """
        ...

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Take back the memory of "weights" or "kv_cache", or of both if `tags` is empty.

        Returns True once all memory is back and the engine can serve.
        """
        ...


class LoraAdapterStore(Protocol):
    """Loads and unloads LoRA adapters while an engine runs.

    The caller makes one call at a time, loads only names that are not loaded, and unloads only names that are.
    `tests/contract/test_lora_adapter_store.py` holds every engine to this.
    """

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        ...

    async def load_lora(self, name: str, directory: Path) -> None:
        """Load the adapter in `directory`, and accept requests for it as `name`.

        Raises InvalidRequest (the adapter does not fit the model), Conflict or EngineFailed.
        """
        ...

    async def unload_lora(self, name: str) -> None:
        """Refuse new requests for an adapter; its running requests go on. Raises EngineFailed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do besides generating. A field is None where the engine, as it is configured, cannot."""

    kv_transfer: KvTransferPeer | None = None  # moves KV blocks between engines
    kv_exports: KvExportDrain | None = None  # knows whether other engines still read its KV blocks
    sleep: SleepController | None = None  # releases and takes back the engine's memory
    lora_adapters: LoraAdapterStore | None = None  # loads and unloads LoRA adapters


class Engine(Protocol):
    """An engine. Life: start once, then submit and abort at will, then stop once."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Return what else the engine can do; the same value before and after `start`."""
        ...

    async def start(self, sink: EngineSink) -> EngineFacts:
        """Load and be ready. Raises ConfigError (the model or a setting is not supported) or EngineFailed."""
        ...

    def submit(self, request: generate.Request) -> None:
        """Take a request. Raises RequestError (it can never be served), Overloaded, or WorkerLost (ask another)."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop it and free its blocks; nothing more is said about it. An unknown id is no error."""
        ...

    def abort_choice(self, request_id: str, index: int) -> None:
        """Stop one of its n choices; nothing more is said about it, and the others go on. Of the last it is `abort`."""
        ...

    def load(self) -> Sequence[load.ForwardPassMetrics]:
        """How busy each data-parallel rank is now; cheap."""
        ...

    async def clear_kv_blocks(self) -> None:
        """Forget all reusable prefixes; running requests are not disturbed."""
        ...

    async def stop(self) -> None:
        """End; requests in flight are dropped in silence. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderFacts:
    """What is known once an embedder has started."""

    context_length: int  # tokens of one input
    max_num_batched_tokens: int  # of all inputs of a batch; a single input may exceed it
    vectors: model_card.EmbeddingFacts
    vocab_size: int | None = None  # None: any token will do


class EmbedInput(NamedTuple):
    """One text, as packed token ids, and how long its vector is to be (None: as long as it is)."""

    token_ids: bytes
    dimensions: int | None = None


class Embedder(Protocol):
    """What embeds instead of generating. Life: start once, then one batch at a time, then stop once."""

    async def start(self) -> EmbedderFacts:
        """Load and be ready. Raises ConfigError (the model is not supported) or EngineFailed."""
        ...

    async def embed(self, batch: Sequence[EmbedInput]) -> list[bytes]:
        """The unit vector of each, packed (`embed.pack`). Raises RequestError or EngineFailed.

        A vector does not depend on what else is in the batch, beyond rounding.
        """
        ...

    async def stop(self) -> None:
        """End. Idempotent."""
        ...
