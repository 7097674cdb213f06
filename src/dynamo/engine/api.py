"""The engine seam: the interface between the worker and any engine.

It fits three kinds: our own engine, with a thread that computes one batch per step; an engine of another project with
one asynchronous stream per request, which its adapter batches per turn of the event loop; and a simulated engine. So
outputs go to one sink, in batches.

Every method is called on the worker's event loop, and the engine calls the sink there too. `tests/engine_suite.py`
holds every engine to this.

An `Embedder` is the smaller interface: it has no state between batches, so one call takes a batch and returns the
vectors; queueing is the worker's task. `tests/contract/test_embedder.py` holds every embedder to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from dynamo.base import errors
from dynamo.kvbm import sharing, tier_report
from dynamo.protocols import generate, kv_events, kv_transfer, load, model_card


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The facts of a started engine, for the model card. Blocks and limits are those of one data-parallel rank."""

    context_length: int  # tokens, prompt and answer together
    kv_block_size: int  # tokens
    total_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    data_parallel_size: int = 1
    supports_logprobs: bool = True
    max_top_logprobs: int = 20
    supports_prompt_logprobs: bool = True
    supports_cache_salt: bool = True  # keeps prefixes of different salts apart
    supports_thinking_limit: bool = True  # ends a thought after so many tokens
    supports_guided: bool = False  # guided decoding
    max_images: int = 0  # in one request; 0: text only
    lora_names: tuple[str, ...] = ()  # LoRA adapters that requests may name


class EngineOutput(NamedTuple):
    """The output of one step for one choice of a request."""

    request_id: str
    output: generate.Output


class EngineSink(Protocol):
    """The receiver of an engine's results. The engine calls it on the event loop on which it was started."""

    def outputs(self, batch: Sequence[EngineOutput]) -> None:
        """Receive all outputs of one step.

        A choice ends with the output that has a finish_reason, a request with its last choice.
        """

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        """Receive the error that ended a request; no further outputs follow."""

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        """Receive the blocks that one step of one data-parallel rank stored and removed, in order."""

    def died(self, error: errors.EngineFailed) -> None:
        """Receive the error that ended the engine; all its requests are lost."""


class KvTransferPeer(Protocol):
    """Moves KV blocks between this engine and others, so that one computes a prompt and another answers it.

    Of a request with KV transfer parameters that say `do_remote_decode`, the engine computes the prompt and keeps its
    blocks under a lease, until the importing engine releases it or a time limit passes; the last output says where the
    blocks are (`protocols.kv_transfer`). A request that brings such parameters waits until the blocks that are missing
    here are copied, while others go on; if anything fails, its prompt is computed here. Its answer may begin, before
    the copy has ended, with the token that was drawn with the prompt.
    `tests/contract/test_remote_prefill.py` holds every engine to this.

    Of a request that says `do_cached_only` an engine that `exports_prefixes` computes nothing: its one output, without
    a token, leases the blocks of the prompt that are cached, if any (`tests/contract/test_peer_prefixes.py`).
    """

    def enable_export(self) -> None:
        """Let other engines copy blocks from here; before `start`. Otherwise this engine can only import."""

    @property
    def transfer_metadata(self) -> bytes | None:
        """The argument of another engine's `connect_peer`; None unless export is enabled and the engine has started."""

    def on_import(self, listener: Callable[[sharing.ImportReport], None]) -> None:
        """Call `listener` after every import of blocks from another engine."""

    async def connect_peer(self, metadata: bytes, *, deadline_s: float) -> str:
        """Prepare for imports from the engine that exported `metadata`; return its id.

        Idempotent. Raises TransferError.
        """

    async def disconnect_peer(self, engine_id: str) -> None:
        """Stop connecting to an engine that leaves or is gone. An unknown id is no error."""

    def release_remote(self, params: kv_transfer.KvTransferParams | None) -> None:
        """Tell the engine that keeps a prompt's blocks, if any, to free them: the request that brought them ended here.

        `submit` has not accepted the request.
        """


class KvExportDrain(Protocol):
    """Lets an engine that shuts down wait until no other engine needs its blocks."""

    async def wait_until_released(self) -> None:
        """Return when no block is under a lease: all leases were released, or their time limits have passed."""


class SleepController(Protocol):
    """Releases an engine's memory for a while, and takes it back.

    The caller ensures that no request runs or is submitted before the engine is awake again, and clears the reusable
    KV blocks before it calls `sleep`. `tests/contract/test_sleep_controller.py` holds every engine to this.
    """

    async def sleep(self, level: int) -> None:
        """Release the engine's memory.

        Level 1 moves the weights to host memory; level 2 drops them, and `wake_up` reads them from the files again.
        """

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Take back the memory of "weights" or "kv_cache", or of both if `tags` is empty.

        Returns True once all memory is back and the engine can serve.
        """


class RoleChanger(Protocol):
    """Lets an engine change between prefill and decode after its start, at which its export was enabled."""

    def leave_role(self) -> None:
        """Forget all that listens to imports; no request runs."""


class LoraAdapterStore(Protocol):
    """Loads and unloads LoRA adapters while an engine runs.

    The caller makes one call at a time, loads only names that are not loaded, and unloads only names that are.
    `tests/contract/test_lora_adapter_store.py` holds every engine to this.
    """

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""

    async def load_lora(self, name: str, directory: Path) -> None:
        """Load the adapter in `directory`, and accept requests for it as `name`.

        Raises InvalidRequest (the adapter does not fit the model), Conflict or EngineFailed.
        """

    async def unload_lora(self, name: str) -> None:
        """Refuse new requests for an adapter; its running requests go on. Raises EngineFailed."""


class KvTierReporter(Protocol):
    """Reports on the tiers of an engine's KV cache."""

    def report_tiers(self) -> tier_report.TierReport | None:
        """Return how full the tiers are and what was copied; None before the engine has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do besides generating. A field is None where the engine, as it is configured, cannot."""

    kv_transfer: KvTransferPeer | None = None  # moves KV blocks between engines
    # also for a request of several choices, where it has a `kv_transfer`
    imports_choices: bool = True
    kv_exports: KvExportDrain | None = None  # knows whether other engines still read its KV blocks
    sleep: SleepController | None = None  # releases and takes back the engine's memory
    lora_adapters: LoraAdapterStore | None = None  # loads and unloads LoRA adapters
    kv_tiers: KvTierReporter | None = None  # keeps KV blocks in tiers below its memory
    exports_prefixes: bool = False  # answers `kv_transfer.EXPORT_CACHED`, and imports such blocks
    role_changer: RoleChanger | None = None  # can become a prefill worker or a decode worker


class Engine(Protocol):
    """An engine: started once, then given requests and aborts, then stopped once."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Return what else the engine can do; the same value before and after `start`."""

    async def start(self, sink: EngineSink) -> EngineFacts:
        """Load the model, and return when requests can be served.

        Raises ConfigError (the model or a setting is not supported) or EngineFailed.
        """

    def submit(self, request: generate.Request) -> None:
        """Accept a request.

        Raises RequestError (no engine like this can serve it), Overloaded, or WorkerLost (another worker may serve it).
        """

    def abort(self, request_id: str) -> None:
        """Abort a request and free its blocks; the sink receives nothing more for it. An unknown id is no error."""

    def abort_choice(self, request_id: str, index: int) -> None:
        """Abort one choice of a request; the others go on. With the last choice the request ends, as by `abort`."""

    def load(self) -> Sequence[load.ForwardPassMetrics]:
        """Return the current load of each data-parallel rank; cheap."""

    async def clear_kv_blocks(self) -> None:
        """Clear the prefix cache; running requests go on."""

    async def stop(self) -> None:
        """Stop the engine; open requests are dropped without an error. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderFacts:
    """The limits and the vectors of a started embedder, as its model card tells them."""

    context_length: int  # tokens of one input
    max_num_batched_tokens: int  # of all inputs of a batch; a single input may exceed it
    vectors: model_card.EmbeddingFacts
    vocab_size: int | None = None  # None: any token id is accepted


class EmbedInput(NamedTuple):
    """One text as packed token ids, and the length to which its vector is shortened (None: full length)."""

    token_ids: bytes
    dimensions: int | None = None


class Embedder(Protocol):
    """A model for embeddings: started once, then called with one batch at a time, then stopped once."""

    async def start(self) -> EmbedderFacts:
        """Load the model. Raises ConfigError (the model is not supported) or EngineFailed."""

    async def embed(self, batch: Sequence[EmbedInput]) -> list[bytes]:
        """Return the unit vector of each text, packed (`encoders.pack`). Raises RequestError or EngineFailed.

        A vector does not depend on the other texts of the batch, beyond rounding.
        """

    async def stop(self) -> None:
        """Stop the embedder. Idempotent."""
