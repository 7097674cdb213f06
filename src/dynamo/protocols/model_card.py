"""The model deployment card: what a frontend must know of a model to serve it.

A worker writes its card beside its instance. Files are named by path and SHA-256, so that a frontend that reads another
file under the same path notices it, and says so, instead of serving wrong tokens.
"""

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from dynamo.protocols import instances

PART_BYTES = 512 * 1024


def endpoint_of_files(beside: instances.EndpointName) -> str:
    """The path where whoever serves this endpoint gives away the files on its card, at the same address."""
    return f"{beside.namespace}/{beside.component}/model_files"


class ModelType(StrEnum):
    """What can be asked of a model."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


class WorkerType(StrEnum):
    """The part of the work that this instance does."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file of the model directory."""

    path: str  # at the worker
    checksum: str  # "sha256:<hex>"
    size: int
    url: str | None = None  # in an object store, where there is one


class FilePart(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is asked at `endpoint_of_files`; it replies with bytes, at most `PART_BYTES`, none at the end."""

    name: str
    offset: Annotated[int, msgspec.Meta(ge=0)]  # bytes


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the engine found or was told: sizes that routers and planners use."""

    total_kv_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    data_parallel_size: int = 1
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    infill_format: str | None = None  # how it is asked to fill in the middle; None: it cannot
    supports_logprobs: bool = True
    max_top_logprobs: int = 20
    supports_prompt_logprobs: bool = True
    supports_guided: bool = False  # can its answers be held to a grammar?
    runtime_data: dict[str, Any] = {}


class EmbeddingFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The vectors of a model that embeds."""

    dimensions: int
    can_shorten: bool = False  # the beginning of a vector is a vector too (arXiv 2205.13147)
    lengths: tuple[int, ...] = ()  # the only lengths to shorten to; none given: any


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model as one worker serves it. `files` maps a file's name (tokenizer.json ...) to where it is."""

    display_name: str
    source_path: str
    context_length: int
    kv_cache_block_size: int
    model_type: tuple[ModelType, ...] = (ModelType.CHAT, ModelType.COMPLETIONS)
    worker_type: WorkerType = WorkerType.AGGREGATED
    files: dict[str, ModelFile] = {}
    migration_limit: int | None = (
        None  # how often a request may be moved; None: as the frontend says
    )
    runtime_config: RuntimeConfig = RuntimeConfig()
    embedding: EmbeddingFacts | None = None
    lora_names: tuple[str, ...] = ()  # adapters that this worker has; to clients each is a model
    created: int = 0  # seconds since 1970
    user_data: dict[str, Any] = {}

    @property
    def checksums(self) -> dict[str, str]:
        """By file; where they are the same, tokens and template are."""
        return {name: file.checksum for name, file in self.files.items()}


class CardRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="Model"):
    """A card as it stands in discovery."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int
    card_json: ModelCard
