"""`KvRouter` of NVIDIA Dynamo's bindings: the router that frontends use, for the services of users.

    router = KvRouter(runtime.endpoint("dynamo.backend.generate"), 16, KvRouterConfig())
    stream = await router.generate([1, 2, 3], model="Qwen/Qwen3-0.6B", stop_conditions={"max_tokens": 8})
    async for item in stream: print(item["token_ids"])

It routes to the workers of the endpoint that have a model: those of `python -m dynamo.*`, and handlers with
`register_model`. A method that finds no worker waits for the first one, as `wait_for_instances` does. Arguments that
would have no effect here are refused by name, unless they have Dynamo's default. One event loop uses a router, and the
runtime closes it.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.base import errors, ids
from dynamo.llm import end_tokens, models, router_settings
from dynamo.observability import metrics
from dynamo.protocols import blocks, generate, kv_events
from dynamo.router import api, endpoint_router, kv_router, route_factory
from dynamo.runtime import naming, request_context, requests


class ServiceRouter:
    """Selects workers by cached prefixes and load, and sends requests to them."""

    def __init__(
        self,
        endpoint: naming.Endpoint,
        block_size: int,
        kv_router_config: router_settings.KvRouterSettings,
        ais_perf_config: Any = None,
        session_affinity_ttl_secs: float | None = None,
        *,
        load_threshold_config: Any = None,
        session_affinity_mode: str = "hard",
    ) -> None:
        """Route to the workers of `endpoint`, whose KV blocks have `block_size` tokens. Raises ConfigError."""
        unsupported = {
            "ais_perf_config": ais_perf_config,
            "load_threshold_config": load_threshold_config,
            "session_affinity_mode": None if session_affinity_mode == "hard" else "other",
        }
        router_settings.refuse("KvRouter", unsupported)
        settings = kv_router_config.routing_config(
            kv_cache_block_size=block_size,
            router_session_affinity_ttl_secs=session_affinity_ttl_secs,
        )
        runtime = models.runtime_of(endpoint)
        registry = metrics.Registry("dynamo_component")
        factory = route_factory.RouteFactory(settings, runtime, runtime.clock, registry)
        self._workers = endpoint_router.EndpointRouter(
            runtime, endpoint.name, factory, runtime.clock
        )
        self._settings = kv_router_config.copy()
        self._end_tokens = end_tokens.EndTokens(runtime)
        self._running = runtime.tasks.start(f"route to {endpoint.name}", self._run())

    async def generate(  # noqa: PLR0913 (NVIDIA Dynamo's; all but two have a default)
        self,
        token_ids: Sequence[int],
        model: str,
        stop_conditions: Mapping[str, Any] | None = None,
        sampling_options: Mapping[str, Any] | None = None,
        output_options: Mapping[str, Any] | None = None,
        router_config_override: Mapping[str, Any] | None = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        extra_args: Any = None,
        block_mm_infos: Any = None,
        multi_modal_data: Any = None,
        mm_routing_info: Any = None,
        routing_constraints: Any = None,
        response_buffer_size: int = 100,
    ) -> naming.ItemStream:
        """Route a prompt and return an iterator over its answer, as `generate_from_request`.

        `worker_id` names the worker, and `dp_rank` its rank, or that of any worker.
        """
        unsupported = {
            "extra_args": extra_args,
            "block_mm_infos": block_mm_infos,
            "multi_modal_data": multi_modal_data,
            "mm_routing_info": mm_routing_info,
            "routing_constraints": routing_constraints,
        }
        router_settings.refuse("generate", unsupported)
        request = {
            "token_ids": token_ids,
            "model": model,
            "stop_conditions": stop_conditions,
            "sampling_options": sampling_options,
            "output_options": output_options,
            "backend_instance_id": worker_id,
            "dp_rank": dp_rank,
        }
        return await self._generate(request, response_buffer_size, router_config_override)

    async def generate_from_request(
        self, request: Mapping[str, Any], response_buffer_size: int = 100
    ) -> naming.ItemStream:
        """Route a request, of the fields that a handler with `register_model` gets; return an iterator over its answer.

        Without `eos_token_ids`, the model's own end it.

        Items have `token_ids`, `index`, `finish_reason` and what else was asked for. At most `MAX_BUFFERED_ITEMS` wait
        for a slow reader, whatever `response_buffer_size` is: there is no back pressure. Raises NoWorkers, WorkerLost,
        Overloaded, and InvalidRequest for fields without effect here; the iteration also the error of the worker.
        """
        return await self._generate(request, response_buffer_size, None)

    async def _generate(
        self,
        request: Mapping[str, Any],
        response_buffer_size: int,
        weights: Mapping[str, Any] | None,
    ) -> naming.ItemStream:
        override = router_settings.read_override(self._settings, weights)
        if response_buffer_size < 0:
            raise errors.InvalidRequest.of_param(
                "response_buffer_size", f"expected at least 0, got {response_buffer_size}"
            )
        parsed, instance_id = read_request(request)
        router = await self._find_router()
        if not parsed.eos_token_ids:
            cards, instances = router.cards, self._workers.present_instances
            worker_id = instance_id if instance_id is not None else next(iter(cards))
            if (card := cards.get(worker_id)) is not None:
                ids_of_model = await self._end_tokens.read(card, instances.get(worker_id))
                parsed = msgspec.structs.replace(parsed, eos_token_ids=ids_of_model)
        context = request_context.Context(parsed.id)
        receiver: requests.ItemReceiver[generate.Output] = requests.ItemReceiver(generate.Output)
        stream = await self._workers.open_stream(
            parsed,
            receiver,
            headers=context.headers,
            instance_id=instance_id,
            override=override,
        )
        return naming.ItemStream(stream, receiver, context, output_fields)

    async def best_worker(  # noqa: PLR0913 (NVIDIA Dynamo's; all but one have a default)
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        update_indexer: bool = False,
        block_mm_infos: Any = None,
        lora_name: str | None = None,
        routing_constraints: Any = None,
        strict_priority: int = 0,
        policy_class: str | None = None,
        cache_namespace: str | None = None,
    ) -> tuple[int, int, int]:
        """Return instance id and rank of the best worker, and how many blocks of the prompt it has.

        With a `request_id` the request counts as in flight there, until `free`, or 300 s in which nothing is said of
        it. Without KV events, `update_indexer` or a `request_id` lets the prompt count as cached there.
        `cache_namespace` is the `cache_salt` of the request. Raises NoWorkers, Overloaded.
        """
        unsupported = {
            "block_mm_infos": block_mm_infos,
            "routing_constraints": routing_constraints,
            "strict_priority": strict_priority,
            "policy_class": policy_class,
        }
        router_settings.refuse("best_worker", unsupported)
        override = router_settings.read_override(self._settings, router_config_override)
        await self._find_router()
        is_query = request_id is None
        if is_query and update_indexer:
            request_id = ids.new_request_id()
        decision = self._workers.select_worker(
            pack(token_ids),
            lora_name=lora_name,
            cache_salt=cache_namespace,
            request_id=request_id,
            override=override,
        )
        if is_query and request_id is not None:
            self._workers.free_request(request_id)
        return decision.worker.instance_id, decision.worker.dp_rank, int(decision.overlap_blocks)

    async def get_potential_loads(
        self,
        token_ids: Sequence[int],
        block_mm_infos: Any = None,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
    ) -> list[dict[str, int]]:
        """Return the load that each worker, and each of its ranks, would have with this prompt."""
        router_settings.refuse("get_potential_loads", {"block_mm_infos": block_mm_infos})
        router = await self._find_router()
        prompt = _prompt(router, token_ids, lora_name, cache_namespace)
        loads = router.scheduler.selector.potential_loads(prompt)
        return [
            {
                "worker_id": worker.instance_id,
                "dp_rank": worker.dp_rank,
                "potential_prefill_tokens": load.prefill_tokens,
                "potential_decode_blocks": load.decode_blocks,
                "active_requests": load.num_requests,
            }
            for worker, load in sorted(loads.items())
        ]

    async def get_overlap_scores(
        self,
        token_ids: Sequence[int],
        router_config_override: Any = None,
        block_mm_infos: Any = None,
        lora_name: str | None = None,
        include_shared: bool = True,
        cache_namespace: str | None = None,
    ) -> dict[str, Any]:
        """Return the leading blocks of a prompt that each worker has, by tier; a slower tier continues the faster."""
        del (
            router_config_override,
            include_shared,
        )  # Dynamo ignores the one; there is no shared cache
        router_settings.refuse("get_overlap_scores", {"block_mm_infos": block_mm_infos})
        router = await self._find_router()
        prompt = _prompt(router, token_ids, lora_name, cache_namespace)
        by_tier = router.scheduler.selector.find_overlaps(prompt).by_tier
        workers = []
        for worker in sorted({worker for each in by_tier.values() for worker in each}):
            num_blocks = {tier: each.get(worker, 0) for tier, each in by_tier.items()}
            num_host = num_blocks.get(kv_events.HOST, 0)
            num_disk = num_blocks.get(kv_events.DISK, 0)
            workers.append(
                {
                    "worker_id": worker.instance_id,
                    "dp_rank": worker.dp_rank,
                    "device_blocks": num_blocks.get(kv_events.DEVICE, 0),
                    "host_pinned_blocks": num_host,
                    "disk_blocks": num_disk,
                    "host_pinned_extension_blocks": num_host,
                    "disk_extension_blocks": num_disk,
                    "shared_beyond_device_blocks": 0,
                }
            )
        return {
            "block_size": router.scheduler.block_size,
            "num_blocks": len(prompt.sequence_hashes),
            "workers": workers,
            "shared_cache": {"enabled": False, "ranges": []},
        }

    async def dump_events(self) -> str:
        """Return the content of the index as JSON: a `stored` event for each run of blocks of a worker.

        Blocks have their `block_hash`, but neither the hash of their tokens nor the parent of the first.
        """
        await self._find_router()
        dumped = []
        for number, (worker, tier, names) in enumerate(self._workers.cached_runs()):
            stored = {"parent_hash": None, "blocks": [{"block_hash": name} for name in names]}
            event = {"event_id": number, "data": {"stored": stored}, "dp_rank": worker.dp_rank}
            dumped.append({"worker_id": worker.instance_id, "storage_tier": tier, "event": event})
        return json.dumps(dumped)

    async def mark_prefill_complete(self, request_id: str) -> None:
        """Record that the prompt of a request of `best_worker` is computed."""
        await self._find_router()
        self._workers.mark_prefill_completed(request_id)

    async def free(self, request_id: str) -> None:
        """Record that a request of `best_worker` has ended."""
        await self._find_router()
        self._workers.free_request(request_id)

    async def _run(self) -> None:
        """Follow the workers until the runtime is closed."""
        try:
            await self._workers.start()
            await self._workers.run(asyncio.Event())
        finally:
            await self._workers.close()

    async def _find_router(self) -> kv_router.KvRouter:
        """Wait for a worker. Raises NoWorkers, or the error by which the router ended."""
        if self._running.done():
            await self._running
        await self._workers.wait_for_workers(naming.START_S)
        return self._workers.router


def pack(token_ids: Sequence[int]) -> bytes:
    """Return the tokens of a prompt, packed. Raises InvalidRequest."""
    try:
        packed = blocks.pack(token_ids)
    except (OverflowError, TypeError) as error:
        raise errors.InvalidRequest.of_param(
            "token_ids", "expected ids of 0 to 4294967295"
        ) from error
    if not packed:
        raise errors.InvalidRequest.of_param("token_ids", "expected at least one")
    return packed


def read_request(fields: Mapping[str, Any]) -> tuple[generate.Request, int | None]:
    """Return the request of a service's fields, and the instance that they name. Raises InvalidRequest."""
    present = {name: value for name, value in fields.items() if value not in (None, [], {})}
    token_ids = present.pop("token_ids", ())
    present = _without_none(present.pop("routing", {})) | present
    instance_id, rank = present.pop("backend_instance_id", None), present.pop("dp_rank", None)
    stop = _without_none(present.pop("stop_conditions", {}))
    hidden = stop.pop("stop_token_ids_hidden", ())
    stop["stop_token_ids"] = [*dict.fromkeys([*stop.get("stop_token_ids", ()), *hidden])]
    sampling = _without_none(present.pop("sampling_options", {}))
    if sampling.get("top_k") == -1:  # Dynamo's word for all tokens
        del sampling["top_k"]
    values = present | {
        "stop_conditions": stop,
        "sampling_options": sampling,
        "output_options": _without_none(present.pop("output_options", {})),
        "data_parallel_rank": rank,
    }
    kinds_by_part = {
        "request": (generate.Request, values),
        "stop_conditions": (generate.StopConditions, values["stop_conditions"]),
        "sampling_options": (generate.SamplingOptions, values["sampling_options"]),
        "output_options": (generate.OutputOptions, values["output_options"]),
    }
    for part, (kind, content) in kinds_by_part.items():
        if unknown := sorted(content.keys() - set(kind.__struct_fields__)):
            raise errors.InvalidRequest(f"{part}: {', '.join(unknown)} is not supported here")
    try:
        parsed = msgspec.convert(
            {"id": ids.new_request_id()} | values | {"token_ids": b""}, generate.Request
        )
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"expected the fields of a request: {error}") from error
    return msgspec.structs.replace(parsed, token_ids=pack(token_ids)), instance_id


def output_fields(output: generate.Output) -> dict[str, Any]:
    """Return the fields of an item of an answer, with Dynamo's names; log probabilities where they were asked for."""
    item: dict[str, Any] = {
        "token_ids": list(output.token_ids),
        "index": output.index,
        "finish_reason": None if output.finish_reason is None else str(output.finish_reason),
    }
    if output.stop_reason is not None:
        item["stop_reason"] = output.stop_reason
    if output.logprobs is not None:
        item["log_probs"] = [each.logprob for each in output.logprobs]
        item["top_logprobs"] = [
            [
                {"rank": rank, "token_id": top.token_id, "logprob": top.logprob}
                for rank, top in enumerate(each.top, 1)
            ]
            for each in output.logprobs
        ]
    return item


def _prompt(
    router: kv_router.KvRouter,
    token_ids: Sequence[int],
    lora_name: str | None,
    cache_salt: str | None,
) -> api.Prompt:
    seed = blocks.seed_of(lora_name, cache_salt)
    return api.Prompt.from_tokens(pack(token_ids), router.scheduler.block_size, seed)


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, [], {})}


# the names of NVIDIA Dynamo, by which users import them
KvRouter, KvRouterConfig = ServiceRouter, router_settings.KvRouterSettings
