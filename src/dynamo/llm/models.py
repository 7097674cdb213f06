"""`register_model` of NVIDIA Dynamo: the handler of a user's endpoint becomes a worker that frontends find.

    endpoint = runtime.endpoint("dynamo.backend.generate")
    await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, "Qwen/Qwen3-0.6B")
    await endpoint.serve_endpoint(generate)

The handler gets the fields of Dynamo's preprocessed request (`token_ids`, `stop_conditions`, `sampling_options` …) and
yields `{"token_ids": [...], "finish_reason": None}`, the last time with a reason (`stop`, `length` …). It is asked once
for each choice of a request. Frontends do tokens and text, from the model's files; its weights are not read.

`publishers` has what an engine behind a handler tells routers of its KV blocks. One with a scheduler or prefill workers
implements `engine.api.Engine` instead: examples/custom_engine.
"""

import asyncio
import enum
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from dynamo.base import errors
from dynamo.protocols import blocks, generate, instances, model_card
from dynamo.runtime import component, naming, request_context, serving
from dynamo.worker import card as cards
from dynamo.worker import model_source

DEFAULT_CONTEXT = 32_768  # tokens, for a model configuration without a length
_END_TOKENS = (generate.FinishReason.EOS, generate.FinishReason.STOP)
_FINISH_REASONS = {str(reason): reason for reason in generate.FinishReason}
_GIVEN_UP = ("abort", "cancelled")
_FACTS = (
    *("context_length", "total_kv_blocks", "max_num_seqs", "max_num_batched_tokens"),
    *("data_parallel_size", "enable_local_indexer", "tool_call_parser", "reasoning_parser"),
    *("runtime_data", "kv_event_publishing_enabled"),  # the latter: its publisher says it
    "exclude_tools_when_tool_choice_none",  # always
)


class ModelInput(enum.Enum):
    """The form of a model's requests; only Tokens is supported here."""

    Text = 1
    Tokens = 2
    Tensor = 3


class ModelTypes(enum.Flag):
    """The requests of clients that a model answers; here Chat, Completions or both."""

    Chat = enum.auto()
    Completions = enum.auto()
    Embedding = enum.auto()
    TensorBased = enum.auto()
    Prefill = enum.auto()
    Images = enum.auto()
    Audios = enum.auto()
    Videos = enum.auto()
    Backend = Chat | Completions  # of versions before 0.5


class EngineDescription:
    """What a worker says of its engine: sizes for routers and planners, and the formats of its model's answers.

    A field that nothing here reads may be set to nothing, or not at all: raises ConfigError.
    """

    def __init__(self) -> None:
        self.context_length: int | None = None  # tokens; that of `register_model` goes before
        self.total_kv_blocks: int | None = None  # of each data-parallel rank
        self.max_num_seqs: int | None = None
        self.max_num_batched_tokens: int | None = None
        self.data_parallel_size = 1
        self.enable_local_indexer = True  # events can always be asked for again
        self.tool_call_parser: str | None = None
        self.reasoning_parser: str | None = None
        self.runtime_data: dict[str, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if value and name not in _FACTS:
            raise errors.ConfigError(f"ModelRuntimeConfig, {name}: not supported here")
        super().__setattr__(name, value)

    def set_engine_specific(self, key: str, value: Any) -> None:
        """Add a value of the engine's own."""
        self.runtime_data[key] = value

    def get_engine_specific(self, key: str) -> Any | None:
        """Return a value of the engine's own; None if there is none."""
        return self.runtime_data.get(key)

    def facts(self) -> model_card.ModelRuntimeConfig:
        """Return the part of a model card."""
        return model_card.ModelRuntimeConfig(
            total_kv_blocks=self.total_kv_blocks or 0,
            max_num_seqs=self.max_num_seqs or 0,
            max_num_batched_tokens=self.max_num_batched_tokens or 0,
            data_parallel_size=self.data_parallel_size,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            supports_logprobs=False,
            supports_prompt_logprobs=False,
            supports_cache_salt=False,
            supports_thinking_limit=False,
            runtime_data=self.runtime_data,
        )


@dataclass(slots=True)
class ModelAdapter:
    """The adapter of an endpoint with a model: the files of its card, and the card."""

    files: cards.FileSharing
    card: model_card.ModelCard

    def __call__(
        self, handle: serving.Handle, request: Any, context: request_context.Context
    ) -> AsyncIterator[generate.Output]:
        return answer_tokens(handle, request, context)


async def register_model(  # noqa: PLR0913 (NVIDIA Dynamo's; all but four have a default)
    model_input: ModelInput,
    model_type: ModelTypes,
    endpoint: naming.Endpoint,
    model_path: str,
    model_name: str | None = None,
    context_length: int | None = None,
    kv_cache_block_size: int | None = None,
    router_mode: naming.RouterMode | None = None,
    *,
    migration_limit: int | None = None,
    runtime_config: EngineDescription | None = None,
    user_data: Mapping[str, Any] | None = None,
    custom_template_path: str | None = None,
    **unsupported: Any,
) -> None:
    """Publish a model that `endpoint` of this process serves, before or after `serve_endpoint` begins.

    `model_path` is a directory or a name of the hub, from which only tokenizer, template and configuration are read; it
    is also the name of the model, if there is no `model_name`. `context_length` in tokens is that of the model's
    configuration by default. `router_mode` is ignored: each frontend has its own (`--router-mode`).
    Raises ConfigError for what is not supported here: other inputs and types than tokens, chat and completions; LoRA
    adapters; media.
    """
    del router_mode
    if names := [name for name, value in unsupported.items() if value is not None]:
        raise errors.ConfigError(f"register_model: {', '.join(names)} is not supported here")
    if model_input is not ModelInput.Tokens:
        raise errors.ConfigError(f"register_model: expected ModelInput.Tokens, got {model_input}")
    text_types = ModelTypes.Chat | ModelTypes.Completions
    if not model_type & text_types or model_type & ~text_types:
        raise errors.ConfigError(
            f"register_model: expected ModelType.Chat, ModelType.Completions or both, got {model_type}"
        )
    runtime, facts = runtime_of(endpoint), runtime_config or EngineDescription()
    directory = Path(await fetch_model(model_path, ignore_weights=True))
    files = cards.describe_files(directory)
    if custom_template_path is not None:
        files = cards.with_template(files, custom_template_path, "custom_template_path")
    kinds = {
        ModelTypes.Chat: model_card.ModelType.CHAT,
        ModelTypes.Completions: model_card.ModelType.COMPLETIONS,
    }
    card = model_card.ModelCard(
        display_name=model_name or model_path,
        source_path=str(directory),
        context_length=context_length or facts.context_length or _trained_context(directory),
        kv_cache_block_size=kv_cache_block_size or 16,
        model_type=tuple(kind for flag, kind in kinds.items() if flag in model_type),
        files=files,
        migration_limit=migration_limit,
        runtime_config=facts.facts(),
        user_data=dict(user_data or {}),
        created=int(time.time()),
    )
    adapter = runtime.served.adapters.get(endpoint.name)
    if not isinstance(adapter, ModelAdapter):
        adapter = ModelAdapter(cards.FileSharing(runtime, runtime.clock), card)
        runtime.served.adapters[endpoint.name] = adapter
    adapter.card = card
    card = await adapter.files.share(card, endpoint.name)
    await runtime.records.put(*card.record_for(_instance_of(endpoint)))


async def register_llm(*arguments: Any, **options: Any) -> None:
    """Publish a model as `register_model`; the input may be left out, as in versions of Dynamo before 0.5."""
    if arguments and isinstance(arguments[0], ModelTypes):
        arguments = (ModelInput.Tokens, *arguments)
    await register_model(*arguments, **options)


async def unregister_model(endpoint: naming.Endpoint, lora_name: str | None = None) -> None:
    """Remove the model of an endpoint of this process from discovery; requests that still come are answered."""
    if lora_name is not None:
        raise errors.ConfigError("unregister_model: lora_name is not supported here")
    await runtime_of(endpoint).records.detach(_instance_of(endpoint).card_key)


async def fetch_model(remote_name: str, ignore_weights: bool = False) -> str:
    """Return the directory of a model, downloaded from the hub if needed; `ignore_weights`: without its weights.

    Raises ConfigError.
    """
    directory = await asyncio.to_thread(
        model_source.resolve, remote_name, with_weights=not ignore_weights
    )
    return str(directory)


async def answer_tokens(
    handle: serving.Handle, request: Any, context: request_context.Context
) -> AsyncIterator[generate.Output]:
    """Answer a frontend's request by the items of a user's handler, one choice after the other.

    A choice ends with its items, also if none of them has a finish reason. Raises EngineFailed for an item that is
    none, or that says so.
    """
    try:
        parsed = msgspec.convert(request, generate.Request)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"expected the request of a frontend: {error}") from error
    end_ids = {*parsed.stop_conditions.stop_token_ids, *parsed.eos_token_ids}
    for index in range(parsed.sampling_options.n):
        items = handle(preprocessed_request(parsed, index), context)
        has_ended, num_left = False, parsed.stop_conditions.max_tokens
        try:
            async for item in items:
                for output in translate_item(item, index, end_ids):
                    has_ended |= output.finish_reason is not None
                    num_left = None if num_left is None else num_left - len(output.token_ids)
                    yield output
        finally:
            await serving.close_items(items)
        if not has_ended:
            is_full = num_left is not None and num_left <= 0
            reason = generate.FinishReason.LENGTH if is_full else generate.FinishReason.EOS
            yield generate.Output((), reason, index=index)


def preprocessed_request(request: generate.Request, index: int) -> dict[str, Any]:
    """Return the fields of NVIDIA Dynamo's preprocessed request for one choice; None stands for what is not set."""
    stop, sampling = request.stop_conditions, request.sampling_options
    seed = None if sampling.seed is None else sampling.seed + request.first_choice + index
    end_ids = [] if stop.ignore_eos else list(request.eos_token_ids)
    return {
        "model": request.model,
        "token_ids": blocks.unpack(request.token_ids),
        "stop_conditions": {
            "max_tokens": stop.max_tokens,
            "min_tokens": stop.min_tokens,
            "stop": list(stop.stop) or None,
            "stop_token_ids": list(stop.stop_token_ids) or None,
            "stop_token_ids_hidden": list(dict.fromkeys((*stop.stop_token_ids, *end_ids))) or None,
            "ignore_eos": stop.ignore_eos,
        },
        "sampling_options": {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or None,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": seed,
            "logit_bias": sampling.logit_bias or None,
            "allowed_token_ids": list(sampling.allowed_token_ids) or None,
            "guided_decoding": None,
        },
        "output_options": {"logprobs": None, "prompt_logprobs": None},
        "eos_token_ids": end_ids,
        "annotations": list(request.annotations),
        "lora_name": request.lora_name,
        "dp_rank": request.data_parallel_rank,
        "routing": {"dp_rank": request.data_parallel_rank, "lora_name": request.lora_name},
    }


def translate_item(item: Any, index: int, end_ids: set[int]) -> Iterator[generate.Output]:
    """Yield the outputs for an item of a handler. Raises EngineFailed.

    A choice that stops ends with an end token in our outputs; an item that stops without one of `end_ids` gets an
    output of its own for the end, so that its last token stays visible.
    """
    if not isinstance(item, Mapping):
        raise errors.EngineFailed(f"expected an item with token_ids, got {item!r:.80}")
    reason = item.get("finish_reason")
    if isinstance(reason, Mapping) or reason == "error":
        message = reason.get("error") if isinstance(reason, Mapping) else item.get("err_msg")
        raise errors.EngineFailed(f"the engine failed: {message or 'it gives no reason'}")
    if reason in _GIVEN_UP:
        raise errors.EngineFailed(f"the engine gave the request up: {reason}")
    if reason is not None and str(reason) not in _FINISH_REASONS:
        raise errors.EngineFailed(
            f"expected a finish_reason of {', '.join(_FINISH_REASONS)}, got {reason!r:.80}"
        )
    finish = None if reason is None else _FINISH_REASONS[str(reason)]
    token_ids = _read_token_ids(item.get("token_ids"))
    if finish in _END_TOKENS and token_ids and token_ids[-1] not in end_ids:
        yield generate.Output(token_ids, index=index)
        token_ids = ()
    if token_ids or finish is not None:
        yield generate.Output(token_ids, finish, index=index)


def _read_token_ids(value: Any) -> tuple[int, ...]:
    """Return the tokens of an item, which may be those of an array. Raises EngineFailed."""
    try:
        return () if value is None else tuple(blocks.unpack(blocks.pack(value)))
    except (TypeError, OverflowError, ValueError) as error:
        raise errors.EngineFailed(
            f"expected token_ids of 0 to 4294967295, got {value!r:.80}"
        ) from error


def runtime_of(endpoint: naming.Endpoint) -> component.DistributedRuntime:
    """Return the runtime that an endpoint was made by."""
    return cast("component.DistributedRuntime", endpoint.runtime)


def _instance_of(endpoint: naming.Endpoint) -> instances.Instance:
    """Return what names the records of this endpoint in this process."""
    name = endpoint.name
    return instances.Instance(
        namespace=name.namespace,
        component=name.component,
        endpoint=name.endpoint,
        instance_id=endpoint.connection_id(),
        transport={},
    )


def _trained_context(directory: Path) -> int:
    path = directory / "config.json"
    try:
        length = json.loads(path.read_text("utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise errors.ConfigError(f"{path}: expected a JSON object: {error}") from error
    return length if type(length) is int and length > 0 else DEFAULT_CONTEXT


# the names of NVIDIA Dynamo, by which users import them
ModelType, ModelRuntimeConfig = ModelTypes, EngineDescription
unregister_llm, fetch_llm = unregister_model, fetch_model
