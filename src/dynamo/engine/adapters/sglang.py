"""SGLang's engine behind the engine seam (`streams.Library`): arguments, requests, results, load, KV events.

Its schedulers are processes of their own. One that fails sends SIGQUIT to this process, as does SGLang's watchdog;
SGLang's handler of that signal would kill this process, ours reports the death, and the worker's requests migrate.

The only module that imports SGLang, and so the only one that depends on its releases. Written after the sources of
0.5.23: `srt/entrypoints/engine.py`, `srt/server_args.py`, `srt/managers/tokenizer_manager.py`,
`srt/managers/load_snapshot.py`. Not run here.

Each choice is a request of its own, so that one can be aborted alone; their prompt is computed once, as they share a
prefix. SGLang stops at the model's own end tokens beside ours, or with `ignore_eos` at no token at all. An option that
SGLang cannot honour is refused by name.

A result is a map of `output_ids` and `meta_info`. With `incremental_streaming_output` tokens and their logprobs are
only the new ones. A logprob is (value, token, text); those of a prompt begin with (None, token, text), as nothing
predicts the first token.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.runtime_context import get_schedule
from sglang.srt.server_args import ServerArgs

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.adapters import kv_subscriber, streams, translation
from dynamo.engine.adapters import settings as adapter_settings
from dynamo.engine.adapters.settings import SglangConfig
from dynamo.protocols import blocks, generate, load

_BAD_REQUEST, _UNAVAILABLE = 400, 503
_ALL_TOKENS = -1  # for top_k
_GUIDED_SUPPORT = translation.GuidedSupport(has_choice=False)
_GUIDED_FIELDS = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}


class SglangFeatures(NamedTuple):
    """Features of SGLang that depend on how it was started."""

    has_tokenizer: bool = False
    has_priority: bool = False
    is_low_first: bool = False  # the lower priority is served first
    context_length: int | None = None  # known once it has started


def generate_arguments(
    request: generate.Request, index: int, features: SglangFeatures
) -> dict[str, Any]:
    """Return the arguments of SGLang's `async_generate` for choice `index`. Raises InvalidRequest.

    Prompt logprobs are the first choice's only.
    """
    _refuse_unsupported(request, features)
    report = request.output_options
    prompt_logprobs = report.prompt_logprobs if index == 0 else None
    top_counts = [count for count in (report.logprobs, prompt_logprobs) if count is not None]
    priority = -request.priority if features.is_low_first else request.priority
    return {
        "sampling_params": _sampling_params(request, index, features.context_length),
        "return_logprob": bool(top_counts),
        "logprob_start_len": 0 if prompt_logprobs is not None else -1,  # from the first, or none
        "top_logprobs_num": max(top_counts, default=0),
        "routed_dp_rank": request.data_parallel_rank,
        # SGLang without priorities refuses a request that has one; ours is only a hint.
        "priority": priority if features.has_priority else None,
    }


def _sampling_params(
    request: generate.Request, index: int, context_length: int | None
) -> dict[str, Any]:
    options, limit = request.sampling_options, request.stop_conditions.max_tokens
    # Some releases, and all that speculate, refuse a limit that fills the context; without one the answer ends there.
    is_full = limit is not None and request.prompt_len + limit >= (context_length or math.inf)
    params = {
        **translation.sampling_fields(request, index, "sglang"),
        "max_new_tokens": None if is_full else limit,
        "top_k": options.top_k or _ALL_TOKENS,
        "logit_bias": {str(token): bias for token, bias in translation.biases(options).items()}
        or None,
        "ignore_eos": request.stop_conditions.ignore_eos,
    }
    if options.guided_decoding is None:
        return params
    translation.refuse_resumed_guided(request, "SGLang")
    fields = translation.structured_output_fields(options.guided_decoding, _GUIDED_SUPPORT)
    named = {_GUIDED_FIELDS[name]: value for name, value in fields.items() if value is not None}
    return params | named


def _refuse_unsupported(request: generate.Request, features: SglangFeatures) -> None:
    stop = request.stop_conditions
    translation.refuse_param(
        "SGLang", "ignore_eos", "ignores stop tokens with it, too: leave out one of them",
        is_used=stop.ignore_eos and bool(stop.stop_token_ids),
    )  # fmt: skip
    translation.refuse_param(
        "SGLang", "min_tokens", "needs the tokenizer for it: start it with --load-tokenizer",
        is_used=stop.min_tokens > 0 and not features.has_tokenizer,
    )  # fmt: skip
    translation.refuse_param(
        "SGLang", "nvext.max_thinking_tokens", "has no limit for thoughts here",
        is_used=request.thinking is not None,
    )  # fmt: skip
    translation.refuse_param(
        "SGLang", "kv_transfer_params", "moves blocks by its own rendezvous, which is not supported yet",
        is_used=request.kv_transfer_params is not None,
    )  # fmt: skip


def translate_output(
    result: Mapping[str, Any], index: int, request: generate.Request, *, is_first: bool
) -> generate.Output:
    """Convert a result of choice `index`; `is_first` marks the request's first one.

    Raises InvalidRequest, Overloaded or EngineFailed if SGLang gave the request up.
    """
    meta, tokens = result["meta_info"], tuple(result["output_ids"])
    finish, report = meta["finish_reason"], request.output_options
    if finish is None and not is_first and report == translation.TOKENS_ONLY:
        return generate.Output(tokens, None, index)
    finish_reason, stop_reason = _finish(finish, request)
    # SGLang repeats the prompt's logprobs with every result; we report them with the choice's first.
    is_beginning = meta["completion_tokens"] == len(tokens)
    prompt_logprobs = report.prompt_logprobs if is_beginning and index == 0 else None
    return generate.Output(
        tokens,
        finish_reason,
        index,
        logprobs=_logprobs(meta, "output", report.logprobs),
        cached_tokens=meta["cached_tokens"] if is_first else None,
        stop_reason=stop_reason,
        prompt_logprobs=_logprobs(meta, "input", prompt_logprobs, skip=1),
    )


def _finish(
    finish: Mapping[str, Any] | None, request: generate.Request
) -> tuple[generate.FinishReason | None, int | str | None]:
    if finish is None:
        return None, None
    match finish["type"]:
        case "length":
            return generate.FinishReason.LENGTH, None
        case "stop":
            matched = finish["matched"]
            is_ours = matched in request.stop_conditions.stop_token_ids
            return translation.stop_finish(request, matched if is_ours else None)
    message = f"SGLang: {finish.get('message') or finish['type']}"
    if finish.get("status_code") == _BAD_REQUEST:
        raise errors.InvalidRequest(message)
    if finish.get("status_code") == _UNAVAILABLE:
        raise errors.Overloaded(message)
    raise errors.EngineFailed(message)


def _logprobs(
    meta: Mapping[str, Any], side: str, num_top: int | None, *, skip: int = 0
) -> tuple[generate.TokenLogprobs, ...] | None:
    """Convert the logprobs of the "input" or "output" tokens, without the first `skip`; the likeliest come sorted."""
    if num_top is None:
        return None
    chosen = meta[f"{side}_token_logprobs"][skip:]
    top = meta.get(f"{side}_top_logprobs", [])[skip:] if num_top else []
    return tuple(
        generate.TokenLogprobs(
            entry[0],
            tuple(
                generate.TopLogprob(token, value) for value, token, _ in (likely or ())[:num_top]
            ),
        )
        for entry, likely in zip(chosen, top or [()] * len(chosen), strict=True)
    )


def rank_load(snapshot: Any, facts: api.EngineFacts) -> translation.RankLoad:
    """Return the load of a rank from its LoadSnapshot, which is None before its first step."""
    if snapshot is None:
        return translation.RankLoad()
    return translation.RankLoad(
        num_running=snapshot.num_running_reqs,
        num_waiting=snapshot.num_waiting_reqs,
        num_blocks=snapshot.num_used_tokens // facts.kv_block_size,
        hit_rate=snapshot.cache_hit_rate,
    )


CLEAR_TIMEOUT_S = 30.0  # SGLang clears its cache only when no request runs
_DEFAULT_KV_ENDPOINT = "tcp://*:5557"  # where SGLang publishes KV events by default
_REFUSED_FLAGS = {
    **adapter_settings.RESERVED_FLAGS,
    **adapter_settings.HUB_FLAGS,
    "--skip-tokenizer-init": "--skip-tokenizer-init is the default; --load-tokenizer is its contrary",
    "--tokenizer-worker-num": "--tokenizer-worker-num: our frontend makes tokens, SGLang needs no workers for that",
    "--node-rank": "--node-rank: SGLang on several hosts is not supported yet",
    "--nnodes": "--nnodes: SGLang on several hosts is not supported yet",
}


def build(directory: Path, settings: SglangConfig, model_name: str) -> api.Engine:
    """Return the engine for the model in `directory`, not yet started. Raises ConfigError."""
    return streams.StreamingEngine(SglangLibrary(server_args(directory, settings, model_name)))


def server_args(directory: Path, settings: SglangConfig, model_name: str) -> ServerArgs:
    """Return SGLang's arguments to serve the model in `directory` as `model_name`. Raises ConfigError."""
    adapter_settings.refuse_flags(settings.engine_args, _REFUSED_FLAGS)
    overrides = {
        "model_path": str(directory),
        "served_model_name": model_name,
        "skip_tokenizer_init": not settings.load_tokenizer,
        "incremental_streaming_output": True,  # each result has the new tokens, not all so far
    }
    parser = _SglangParser(prog="sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    tiers = adapter_settings.hierarchical_cache_flags(settings)
    words = [
        *tiers,
        *settings.engine_args,
        "--model-path",
        str(directory),
    ]  # required by the parser
    namespace = parser.parse_args(words)
    vars(namespace).update(overrides)
    try:
        return ServerArgs.from_cli_args(namespace)
    except (ValueError, TypeError, AssertionError) as error:
        raise errors.ConfigError(f"SGLang: {error}") from error


class _SglangParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise errors.ConfigError(f"SGLang: {message}")


def kv_event_endpoints(
    args: ServerArgs, reservations: contextlib.ExitStack
) -> kv_subscriber.PublisherEndpoints | None:
    """Return where SGLang publishes its KV events, or None if it publishes none.

    Unless the user has configured it, free ports are chosen, written into `args` and kept until `reservations` is
    closed.
    """
    if args.kv_events_config is None and not args.disable_radix_cache:
        endpoints = kv_subscriber.PublisherEndpoints.on_free_ports(args.dp_size, reservations)
        args.kv_events_config = json.dumps({"publisher": "zmq", **dataclasses.asdict(endpoints)})
        return endpoints
    config = json.loads(args.kv_events_config or "{}")
    if config.get("publisher") != "zmq":
        return None
    return kv_subscriber.PublisherEndpoints(
        endpoint=config.get("endpoint", _DEFAULT_KV_ENDPOINT),
        replay_endpoint=config.get("replay_endpoint"),
        topic=config.get("topic", ""),
    )


class SglangLibrary:
    """SGLang's `Engine` as a `streams.Library`."""

    name = "SGLang"

    def __init__(self, args: ServerArgs) -> None:
        self._args = args
        self._features = SglangFeatures(
            has_tokenizer=not args.skip_tokenizer_init,
            has_priority=args.enable_priority_scheduling,
            is_low_first=args.schedule_low_priority_values_first,
        )
        self._engine: Engine | None = None
        self._kv_subscriber: kv_subscriber.ZmqKvSubscriber | None = None
        self._death: errors.EngineFailed | None = None

    async def start(self, on_kv_events: streams.OnKvEvents) -> api.EngineFacts:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGQUIT, self._record_death)
        with contextlib.ExitStack() as reservations:
            endpoints = kv_event_endpoints(self._args, reservations)
            if endpoints is not None:
                self._kv_subscriber = kv_subscriber.ZmqKvSubscriber(endpoints, self._args.dp_size)
            await self._start_engine()
        loop.add_signal_handler(signal.SIGQUIT, self._record_death)
        facts = _facts(self._started)
        self._features = self._features._replace(context_length=facts.context_length)
        if self._kv_subscriber is not None:
            self._kv_subscriber.start(facts.kv_block_size, on_kv_events)
        return facts

    async def _start_engine(self) -> None:
        """Load the engine without blocking the event loop. Raises EngineFailed."""
        try:
            self._engine = await asyncio.to_thread(Engine, server_args=self._args)
            # SGLang installs signal handlers once, when its streams are first read: that happens here, so that ours
            # follows. (Off the main thread its constructor installs none.)
            self._started.tokenizer_manager.auto_create_handle_loop()
        except Exception as error:
            raise errors.EngineFailed(
                f"SGLang did not start: {type(error).__name__}: {error}"
            ) from error

    @property
    def vocab_size(self) -> int:
        size: int = self._started.tokenizer_manager.model_config.vocab_size
        return size

    def plan(self, request: generate.Request, index: int) -> dict[str, Any]:
        return generate_arguments(request, index, self._features)

    async def stream(
        self, request: generate.Request, plan: dict[str, Any], name: str
    ) -> AsyncIterator[Mapping[str, Any]]:
        results = await self._started.async_generate(
            input_ids=blocks.unpack(request.token_ids), rid=name, stream=True, **plan
        )
        async for result in results:
            yield result

    def translate(
        self, result: Mapping[str, Any], index: int, request: generate.Request, *, is_first: bool
    ) -> generate.Output:
        return translate_output(result, index, request, is_first=is_first)

    def explain(self, error: Exception) -> errors.DynamoError:
        """Convert an error; SGLang raises ValueError for a wrong request."""
        if isinstance(error, ValueError):
            return errors.InvalidRequest(f"SGLang: {error}")
        return errors.EngineFailed(f"SGLang: {type(error).__name__}: {error}")

    def death(self) -> BaseException | None:
        return self._death

    async def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._started.tokenizer_manager.abort_request(rid=name)

    def load(
        self, facts: api.EngineFacts, *, num_prefill_tokens: int, is_idle: bool
    ) -> Sequence[load.ForwardPassMetrics]:
        snapshots = {snapshot.dp_rank: snapshot for snapshot in _snapshots(self._started)}
        num_tokens = num_prefill_tokens // facts.data_parallel_size
        return [
            rank_load(snapshots.get(rank), facts).metrics(
                facts, rank, num_prefill_tokens=num_tokens, is_idle=is_idle
            )
            for rank in range(facts.data_parallel_size)
        ]

    async def clear(self) -> None:
        result = await self._started.tokenizer_manager.flush_cache(timeout_s=CLEAR_TIMEOUT_S)
        if not result.success:
            raise errors.EngineFailed(
                result.message or f"requests were running for {CLEAR_TIMEOUT_S:.0f} s"
            )

    async def stop(self) -> None:
        """End SGLang: its shutdown ends all children of this process."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await asyncio.to_thread(engine.shutdown)
        if self._kv_subscriber is not None:
            await self._kv_subscriber.close()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)

    @property
    def _started(self) -> Engine:
        assert self._engine is not None, "the engine is used before start() has returned"
        return self._engine

    def _record_death(self) -> None:
        self._death = errors.EngineFailed("a process of SGLang's failed")


def _facts(engine: Engine) -> api.EngineFacts:
    loads, schedule, arguments = _snapshots(engine), get_schedule(), engine.server_args
    first: Mapping[str, Any] = engine._scheduler_init_result.scheduler_infos[0]
    page_size = schedule.page_size or 1
    chunk = schedule.chunked_prefill_size or 0
    return api.EngineFacts(
        context_length=engine.tokenizer_manager.model_config.context_len,
        kv_block_size=page_size,
        total_kv_blocks=first["max_total_num_tokens"] // page_size,
        max_num_seqs=loads[0].max_running_requests if loads else schedule.max_running_requests,
        max_num_batched_tokens=chunk if chunk > 0 else schedule.max_prefill_tokens,
        data_parallel_size=arguments.dp_size,
        supports_guided=not arguments.skip_tokenizer_init,
        supports_thinking_limit=False,
        supports_cache_salt=False,  # releases lose it on the way to the cache (sglang #23300)
    )


def _snapshots(engine: Engine) -> Sequence[Any]:
    """Return the last LoadSnapshot of each rank, from shared memory; a rank has none before its first step."""
    snapshots: Sequence[Any] = engine.tokenizer_manager.load_snapshot_reader.read_all()
    return snapshots
