"""The model deployment card: what a frontend must know about a model to serve it.

A worker registers a card with each instance. The card names files by path and SHA-256, so a frontend that reads a
different file under the same path reports that instead of serving wrong tokens.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from dynamo.protocols import instances

PART_BYTES = 512 * 1024


def model_files_path(endpoint: instances.EndpointName) -> str:
    """Return the path at which a worker that serves `endpoint` sends the files on its card, at the same address."""
    return f"{endpoint.path}/model_files"


class ModelType(StrEnum):
    """The kinds of requests that a model answers."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


class WorkerType(StrEnum):
    """The phase of inference that an instance computes."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file of the model directory of a worker."""

    path: str  # on the worker's host
    checksum: str  # "sha256:<hex>"
    size: int
    url: str | None = None  # in an object store, where there is one


class FilePart(msgspec.Struct, frozen=True, kw_only=True):
    """A request for part of a file, at `model_files_path`; replies have at most `PART_BYTES` bytes, 0 at its end."""

    name: str
    offset: Annotated[int, msgspec.Meta(ge=0)]  # bytes


class ModelRuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sizes and abilities of the engine, from its settings or as it found them; routers and planners use the sizes."""

    total_kv_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    data_parallel_size: int = 1
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    infill_format: str | None = None  # prompt format of fill-in-the-middle; None: not supported
    template_defaults: dict[str, Any] = {}  # variables of the chat template that requests leave out
    supports_logprobs: bool = True
    max_top_logprobs: int = 20
    supports_prompt_logprobs: bool = True
    supports_cache_salt: bool = True
    supports_thinking_limit: bool = True
    supports_guided: bool = False  # structured output
    max_images: int = 0  # in one request; 0: text only
    runtime_data: dict[str, Any] = {}


class EmbeddingFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of an embedding model's vectors."""

    dimensions: int
    can_shorten: bool = False  # a prefix of a vector is a vector too (arXiv 2205.13147)
    lengths: tuple[int, ...] = ()  # the only lengths to shorten to; empty: any


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model as one worker serves it. `files` maps a file's name (tokenizer.json ...) to its location."""

    display_name: str
    source_path: str
    context_length: int
    kv_cache_block_size: int
    model_type: tuple[ModelType, ...] = (ModelType.CHAT, ModelType.COMPLETIONS)
    worker_type: WorkerType = WorkerType.AGGREGATED
    files: dict[str, ModelFile] = {}
    weights: str = ""  # fingerprint of the files with the weights; empty: unknown
    migration_limit: int | None = None  # most migrations of a request; None: the frontend's limit
    runtime_config: ModelRuntimeConfig = ModelRuntimeConfig()
    embedding: EmbeddingFacts | None = None
    aliases: tuple[str, ...] = ()  # further names under which clients may ask for the model
    lora_names: tuple[str, ...] = ()  # loaded adapters; clients see each as a model
    created: int = 0  # seconds since 1970
    user_data: dict[str, Any] = {}

    @property
    def checksums(self) -> dict[str, str]:
        """Return the checksum by file name; equal checksums mean the same tokens and chat template."""
        return {name: file.checksum for name, file in self.files.items()}

    def find_difference(self, other: "ModelCard") -> str | None:
        """Return what keeps two workers from computing parts of one answer; None: nothing that is known."""
        for name in sorted(self.files.keys() | other.files.keys()):
            if self.checksums.get(name) != other.checksums.get(name):
                return name
        return None if self.has_weights_of(other.weights) else "the weights"

    def has_weights_of(self, fingerprint: str) -> bool:
        """Return whether the weights may be those with this fingerprint; unknown ones may be any."""
        return not self.weights or not fingerprint or self.weights == fingerprint

    def record_for(self, instance: instances.Instance) -> "tuple[str, CardRecord]":
        """Return the key and the record that discovery holds when `instance` serves this model."""
        record = CardRecord(
            namespace=instance.namespace,
            component=instance.component,
            endpoint=instance.endpoint,
            instance_id=instance.instance_id,
            card_json=self,
        )
        return instance.card_key, record


class CardRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="Model"):
    """The record of a card in discovery."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int
    card_json: ModelCard


def change_card(value: bytes, change: Callable[[ModelCard], ModelCard]) -> CardRecord:
    record = msgspec.json.decode(value, type=CardRecord)
    return msgspec.structs.replace(record, card_json=change(record.card_json))
