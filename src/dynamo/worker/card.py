"""The model card of a worker, and the files that it names.

The card holds the model's name, its files with checksums, and what the engine found. Frontends on other hosts get the
files from the object store, if the worker is connected to one, and in any case over the request plane. Only files that
the card names are served, and never weights. A file in the store is named by its content, so that all workers of a
model share it; it stays as long as one of them runs and a while longer (`services.ObjectStoreBounds`).
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.protocols import instances, model_card
from dynamo.runtime import component, requests, services

_TEMPLATES = (
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)
# What a frontend needs to turn text into tokens and back, and to know the limits of a model.
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *_TEMPLATES,
)
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt")
_HEAD_BYTES = 64 * 1024
_PAGE_BYTES = 4096
_NUM_PAGES = 30
_logger = logging.getLogger(__name__)
_decode_part = msgspec.msgpack.Decoder(model_card.FilePart).decode


def build(
    directory: Path,
    *,
    name: str,
    facts: api.EngineFacts,
    created: int,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    infill_format: str | None = None,
    migration_limit: int | None = None,
) -> model_card.ModelCard:
    """Return the card of the model in `directory`, served by an engine with these facts.

    `created` is in seconds since 1970. Raises ConfigError.
    """
    if name in facts.lora_names:
        raise errors.ConfigError(
            f"a LoRA adapter is called {name!r}, and so is its model: clients could not ask for it; rename one"
        )
    model_types: tuple[model_card.ModelType, ...] = (model_card.ModelType.COMPLETIONS,)
    if _has_chat_template(directory):
        model_types = (model_card.ModelType.CHAT, *model_types)
    return model_card.ModelCard(
        display_name=name,
        source_path=str(directory),
        context_length=facts.context_length,
        kv_cache_block_size=facts.kv_block_size,
        model_type=model_types,
        migration_limit=migration_limit,
        files=describe_files(directory),
        weights=fingerprint_weights(directory),
        runtime_config=model_card.ModelRuntimeConfig(
            total_kv_blocks=facts.total_kv_blocks,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            data_parallel_size=facts.data_parallel_size,
            supports_logprobs=facts.supports_logprobs,
            max_top_logprobs=facts.max_top_logprobs,
            supports_prompt_logprobs=facts.supports_prompt_logprobs,
            supports_cache_salt=facts.supports_cache_salt,
            supports_thinking_limit=facts.supports_thinking_limit,
            supports_guided=facts.supports_guided,
            max_images=facts.max_images,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            infill_format=infill_format,
        ),
        lora_names=facts.lora_names,
        created=created,
    )


def build_embedding(
    directory: Path,
    *,
    name: str,
    facts: api.EmbedderFacts,
    created: int,
    template: str | None = None,
) -> model_card.ModelCard:
    """Return the card of the model in `directory`, served by an embedder with these facts.

    `template` is the file of its chat template, by which prompts are tokenized. Raises ConfigError.
    """
    return model_card.ModelCard(
        display_name=name,
        source_path=str(directory),
        context_length=facts.context_length,
        kv_cache_block_size=0,
        model_type=(model_card.ModelType.EMBEDDINGS,),
        files=describe_files(directory, template),
        weights=fingerprint_weights(directory),
        runtime_config=model_card.ModelRuntimeConfig(
            max_num_batched_tokens=facts.max_num_batched_tokens
        ),
        embedding=facts.vectors,
        created=created,
    )


def describe_files(directory: Path, template: str | None = None) -> dict[str, model_card.ModelFile]:
    """Describe the files of a model directory that a frontend needs, by name, or its template elsewhere.

    Raises ConfigError for a template that cannot be read.
    """
    files = {file: describe(directory / file) for file in FILES if (directory / file).is_file()}
    return with_template(files, template, "--custom-jinja-template") if template else files


def with_template(
    files: Mapping[str, model_card.ModelFile], path: str, option: str
) -> dict[str, model_card.ModelFile]:
    """Return the files with this chat template in place of all of the model's. Raises ConfigError, by the option."""
    try:
        template = describe(Path(path).expanduser().absolute())
    except OSError as error:
        raise errors.ConfigError(
            f"{option} {path}: expected a file with a chat template ({error.strerror})"
        ) from error
    kept = {name: file for name, file in files.items() if name not in _TEMPLATES}
    return kept | {_TEMPLATES[0]: template}


def fingerprint_weights(directory: Path) -> str:
    """Return a fingerprint of the weights in a model directory, or "" if it has none.

    It covers the names and sizes of the files, their beginnings with the headers, and pages spread over each: files
    that were copied wrongly in a single byte may pass, other weights do not. A file costs 30 reads, whatever its size.
    """
    digest = hashlib.blake2b(digest_size=16)
    paths = sorted(
        path
        for path in directory.glob("*")
        if path.suffix in _WEIGHT_SUFFIXES and path.is_file()  # no folder, nor a link to nothing
    )
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for page in range(_NUM_PAGES):
                file.seek(max(0, size - _PAGE_BYTES) * (page + 1) // _NUM_PAGES)
                digest.update(file.read(_PAGE_BYTES))
    return digest.hexdigest() if paths else ""


def describe(path: Path) -> model_card.ModelFile:
    """Describe a file by its path, its size in bytes and its checksum."""
    content = path.read_bytes()
    return model_card.ModelFile(
        path=str(path), checksum=f"sha256:{hashlib.sha256(content).hexdigest()}", size=len(content)
    )


def _has_chat_template(directory: Path) -> bool:
    if any((directory / name).is_file() for name in _TEMPLATES[:2]):
        return True
    config = directory / "tokenizer_config.json"
    try:
        return config.is_file() and bool(json.loads(config.read_bytes()).get("chat_template"))
    except (ValueError, AttributeError) as error:
        raise errors.ConfigError(f"{config}: expected a JSON object: {error}") from error


class FileSharing:
    """Serves the files of one worker's card to frontends, from `share` until `close`."""

    def __init__(self, runtime: component.DistributedRuntime, clock: clocks.Clock) -> None:
        self._runtime = runtime
        self._clock = clock
        self._card: model_card.ModelCard | None = None
        self._tasks = tasks.Tasks()

    async def share(
        self, card: model_card.ModelCard, endpoint: instances.EndpointName
    ) -> model_card.ModelCard:
        """Serve the card's files beside `endpoint`, instead of an earlier card's; return it with their stored URLs."""
        if self._card is None:
            await self._runtime.requests.serve(model_card.model_files_path(endpoint), self._handle)
        self._card = card
        store = self._runtime.services.object_store()
        if store is None or not card.files:
            return card
        shared_card = await _put_files(card, store)
        if shared_card is not card:
            self._tasks.start("keep model files in the store", self._keep_stored(card, store))
        return shared_card

    async def close(self) -> None:
        """Cancel what is being read, and let the files in the store expire."""
        await self._tasks.close()

    async def _keep_stored(self, card: model_card.ModelCard, store: services.ObjectStore) -> None:
        while True:
            await self._clock.sleep(services.ObjectStoreBounds().fresh_s)
            await _put_files(card, store)

    def _handle(self, call: requests.Call) -> None:
        self._tasks.start("serve a part of a model file", self._serve_part(call))

    async def _serve_part(self, call: requests.Call) -> None:
        try:
            part = await asyncio.to_thread(self._read_part, _decode_part(call.body))
        except (ValueError, RecursionError, KeyError) as error:  # msgspec's are of the first
            call.fail(errors.RemoteProtocolError(f"expected a part of a file on the card: {error}"))
        except OSError as error:
            call.fail(errors.Unavailable(f"the worker cannot read its own file: {error}"))
        else:
            call.reply(part)
            call.finish()

    def _read_part(self, part: model_card.FilePart) -> bytes:
        assert self._card is not None
        with Path(self._card.files[part.name].path).open("rb") as file:
            file.seek(part.offset)
            return file.read(model_card.PART_BYTES)


async def _put_files(
    card: model_card.ModelCard, store: services.ObjectStore
) -> model_card.ModelCard:
    """Put the card's files into the store; return the card with their URLs, or the same card if that failed."""
    try:
        files = {
            name: msgspec.structs.replace(
                file,
                url=await store.put(
                    file.checksum.replace(":", "-"),
                    await asyncio.to_thread(Path(file.path).read_bytes),
                ),
            )
            for name, file in card.files.items()
        }
    except (errors.DynamoError, OSError) as error:
        _logger.warning("model files are not in the object store, and workers give them: %s", error)
        return card
    return msgspec.structs.replace(card, files=files)
