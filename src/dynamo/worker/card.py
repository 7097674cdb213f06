"""The model card that a worker publishes: the model's files by checksum, its name, what the engine found."""

import hashlib
import json
from pathlib import Path

import msgspec

from dynamo.base import errors
from dynamo.engine import api
from dynamo.protocols import model_card

# What a frontend needs to turn text into tokens and back, and to know a model's limits.
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


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
    """The card of the model in `directory`, as an engine with these facts serves it. Raises ConfigError."""
    if name in facts.lora_names:
        raise errors.ConfigError(
            f"a LoRA adapter is called {name!r}, and so is its model: clients could not ask for it; rename one"
        )
    return model_card.ModelCard(
        display_name=name,
        source_path=str(directory),
        context_length=facts.context_length,
        kv_cache_block_size=facts.kv_block_size,
        model_type=_model_types(directory),
        migration_limit=migration_limit,
        files=describe_files(directory),
        runtime_config=msgspec.structs.replace(
            _runtime_config(facts),
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            infill_format=infill_format,
        ),
        lora_names=facts.lora_names,
        created=created,
    )


def build_embedding(
    directory: Path, *, name: str, facts: api.EmbedderFacts, created: int
) -> model_card.ModelCard:
    """The card of the model in `directory`, as an embedder with these facts serves it."""
    return model_card.ModelCard(
        display_name=name,
        source_path=str(directory),
        context_length=facts.context_length,
        kv_cache_block_size=0,
        model_type=(model_card.ModelType.EMBEDDINGS,),
        files=describe_files(directory),
        runtime_config=model_card.RuntimeConfig(
            max_num_batched_tokens=facts.max_num_batched_tokens
        ),
        embedding=facts.vectors,
        created=created,
    )


def describe_files(directory: Path) -> dict[str, model_card.ModelFile]:
    """Those of a model directory that a frontend needs."""
    return {file: describe(directory / file) for file in FILES if (directory / file).is_file()}


def describe(path: Path) -> model_card.ModelFile:
    """A file by path, size and checksum."""
    content = path.read_bytes()
    return model_card.ModelFile(
        path=str(path), checksum=f"sha256:{hashlib.sha256(content).hexdigest()}", size=len(content)
    )


def _model_types(directory: Path) -> tuple[model_card.ModelType, ...]:
    """A model without a chat template can complete text, and nothing else."""
    if _has_chat_template(directory):
        return (model_card.ModelType.CHAT, model_card.ModelType.COMPLETIONS)
    return (model_card.ModelType.COMPLETIONS,)


def _has_chat_template(directory: Path) -> bool:
    if any((directory / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = directory / "tokenizer_config.json"
    try:
        return config.is_file() and "chat_template" in json.loads(config.read_text("utf-8"))
    except ValueError as error:
        raise errors.ConfigError(f"{config}: expected a JSON object: {error}") from error


def _runtime_config(facts: api.EngineFacts) -> model_card.RuntimeConfig:
    return model_card.RuntimeConfig(
        total_kv_blocks=facts.total_kv_blocks,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        data_parallel_size=facts.data_parallel_size,
        supports_logprobs=facts.supports_logprobs,
        max_top_logprobs=facts.max_top_logprobs,
        supports_prompt_logprobs=facts.supports_prompt_logprobs,
        supports_guided=facts.supports_guided,
    )
