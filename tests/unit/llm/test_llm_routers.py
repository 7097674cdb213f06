"""A user's service routes requests by `KvRouter`, as a frontend does."""

import asyncio
import contextlib
import json

import msgspec
import pytest

from dynamo.base import errors, tasks
from dynamo.llm import (
    KvEventPublisher,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    RouterQueueLimitExceeded,
    register_model,
    routers,
)
from dynamo.protocols import blocks, generate, model_card
from dynamo.router import config
from dynamo.runtime import component
from waiting import PATIENT_S, until

NAME = "dynamo.backend.generate"
BLOCK = 4
TOKENS = list(range(100))
OTHERS = list(range(1000, 1100))
REQUEST = {"token_ids": [1], "model": "m"}


class WorkerOfHandler:
    """A worker of a model from a handler, which answers with the last token of the prompt and its successor."""

    def __init__(self, runtime, running):
        self.runtime, self._running = runtime, running
        self.id = runtime.instance_id
        self.requests = []
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def start(self, num_ranks=1):
        endpoint = self.runtime.endpoint(NAME)
        facts = ModelRuntimeConfig()
        facts.data_parallel_size = num_ranks
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            "storyteller",
            kv_cache_block_size=BLOCK,
            runtime_config=facts,
        )
        self.events = KvEventPublisher(endpoint, kv_block_size=BLOCK)
        self._running.start("serve", endpoint.serve_endpoint(self._answer))

    async def _answer(self, request):
        self.requests.append(request)
        last = request["token_ids"][-1]
        yield {"token_ids": [last]}
        await self.may_end.wait()
        yield {"token_ids": [last + 1], "finish_reason": "length"}


class Cluster:
    """Workers, and a service that routes to them."""

    def __init__(self, stack, running):
        self._stack, self._running = stack, running
        self._cluster = component.MemoryCluster()
        self.workers = []

    async def runtime(self):
        runtime = await component.DistributedRuntime.in_memory(
            self._cluster, item_type=generate.Output
        )
        return await self._stack.enter_async_context(runtime)

    async def add_worker(self, num_ranks=1):
        self.workers.append(WorkerOfHandler(await self.runtime(), self._running))
        await self.workers[-1].start(num_ranks)

    async def router(self, num_workers=2, settings=None, **options):
        """Return a router to so many workers."""
        for _ in range(num_workers):
            await self.add_worker()
        runtime = await self.runtime()
        router = KvRouter(runtime.endpoint(NAME), BLOCK, settings or KvRouterConfig(), **options)
        async with asyncio.timeout(PATIENT_S):
            while num_workers and len(await router.get_potential_loads([1])) < num_workers:
                await asyncio.sleep(0)
        return router


@pytest.fixture
async def cluster():
    async with contextlib.AsyncExitStack() as stack, tasks.Tasks() as running:
        yield Cluster(stack, running)


async def read(stream):
    async with asyncio.timeout(PATIENT_S):
        return [item async for item in stream]


async def test_answer_of_a_worker_comes_in_tokens(cluster):
    router = await cluster.router(1)
    items = await read(
        await router.generate(
            [7, 8],
            "m",
            {"max_tokens": 2, "stop_token_ids_hidden": [5], "stop": None},
            {"temperature": 0.5, "n": 2},
        )
    )

    assert items == [
        {"token_ids": [token], "index": index, "finish_reason": reason}
        for index in (0, 1)
        for token, reason in ((8, None), (9, "length"))
    ]
    (request, _) = cluster.workers[0].requests
    assert request["token_ids"] == [7, 8]
    assert request["stop_conditions"]["max_tokens"] == 2
    assert request["stop_conditions"]["stop_token_ids"] == [5]
    assert request["sampling_options"]["temperature"] == 0.5


async def test_request_of_a_handler_is_passed_on_as_it_came(cluster):
    router = await cluster.router(1)
    await read(await router.generate([7], "m", {"max_tokens": 2, "ignore_eos": True}))
    (first,) = cluster.workers[0].requests
    await read(await router.generate_from_request(first))

    assert cluster.workers[0].requests == [first, first]


@pytest.mark.parametrize(("options", "end_ids"), [({}, [2, 0]), ({"eos_token_ids": [5]}, [5])])
async def test_answer_ends_at_the_tokens_of_the_request_or_else_of_the_model(
    cluster, options, end_ids
):
    router = await cluster.router(1)
    for _ in range(2):
        await read(await router.generate_from_request(REQUEST | options))

    assert [each["eos_token_ids"] for each in cluster.workers[0].requests] == [end_ids] * 2


async def test_answer_of_a_model_whose_end_tokens_cannot_be_read_ends_by_its_length(
    cluster, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    router = await cluster.router(1)
    (card,) = router._workers.router.cards.values()
    broken = {
        name: model_card.ModelFile(path="/no", checksum="none", size=1) for name in card.files
    }
    router._workers._update_card(cluster.workers[0].id, msgspec.structs.replace(card, files=broken))
    items = await read(await router.generate([7], "m"))

    assert [item["finish_reason"] for item in items] == [None, "length"]
    assert "the end tokens of 'storyteller' are not known" in caplog.text


async def test_prompt_goes_to_the_worker_that_has_it(cluster):
    router = await cluster.router(2)
    holder = cluster.workers[1]
    names = list(range(len(TOKENS) // BLOCK))
    holder.events.publish_stored(TOKENS, [BLOCK] * len(names), names)

    async def overlaps():
        return (await router.get_overlap_scores(TOKENS))["workers"]

    async with asyncio.timeout(PATIENT_S):
        while not await overlaps():
            await asyncio.sleep(0)
    (row,) = await overlaps()
    dumped = json.loads(await router.dump_events())

    assert (row["worker_id"], row["device_blocks"], row["disk_blocks"]) == (holder.id, 25, 0)
    assert await router.best_worker(TOKENS) == (holder.id, 0, 25)
    assert (await router.best_worker(TOKENS, cache_namespace="tenant"))[2] == 0
    assert {each["worker_id"] for each in dumped} == {holder.id}
    stored = [each["event"]["data"]["stored"]["blocks"] for each in dumped]
    hashes = blocks.sequence_hashes(blocks.local_hashes(blocks.pack(TOKENS), BLOCK))
    assert [block["block_hash"] for run in stored for block in run] == list(hashes)


async def test_request_may_have_weights_of_its_own(cluster):
    router = await cluster.router(2)
    idle, holder = cluster.workers
    prompt = list(range(4000))
    holder.events.publish_stored(prompt, [BLOCK] * 1000, list(range(1000)))
    async with asyncio.timeout(PATIENT_S):
        while not (await router.get_overlap_scores(prompt))["workers"]:
            await asyncio.sleep(0)
    holder.may_end.clear()
    stream = await router.generate(OTHERS, "m", worker_id=holder.id)
    async with asyncio.timeout(PATIENT_S):
        await anext(stream)
    weights = {"overlap_score_credit": 0.0}
    selected = [
        await router.best_worker(prompt),
        await router.best_worker(prompt, weights),
        await router.best_worker(prompt, weights, request_id="a"),
        await router.best_worker(prompt, {"router_temperature": 0.0, "prefill_load_scale": None}),
    ]
    await router.free("a")
    await read(await router.generate(prompt, "m", router_config_override=weights))
    await stream.aclose()

    assert [worker_id for worker_id, _, _ in selected] == [holder.id, idle.id, idle.id, holder.id]
    assert [len(worker.requests) for worker in cluster.workers] == [1, 1]


async def test_request_counts_at_its_worker_until_it_is_free(cluster):
    router = await cluster.router(2)
    first, _, _ = await router.best_worker(TOKENS, request_id="a")
    second, _, _ = await router.best_worker(OTHERS)
    busy = {row["worker_id"]: row for row in await router.get_potential_loads(OTHERS)}
    await router.mark_prefill_complete("a")
    decoding = {row["worker_id"]: row for row in await router.get_potential_loads(OTHERS)}
    await router.free("a")
    idle = await router.get_potential_loads(OTHERS)

    assert first != second
    assert busy[first] == {
        "worker_id": first,
        "dp_rank": 0,
        "potential_prefill_tokens": 200,
        "potential_decode_blocks": 50,
        "active_requests": 1,
    }
    assert busy[second]["potential_prefill_tokens"] == 100
    assert decoding[first]["potential_prefill_tokens"] == 100
    assert [row["potential_decode_blocks"] for row in idle] == [25, 25]


async def test_question_is_refused_while_the_only_worker_is_busy(cluster):
    settings = KvRouterConfig(router_queue_threshold=0.001)  # 8 tokens
    router = await cluster.router(1, settings)
    await router.best_worker(TOKENS, request_id="a")

    with pytest.raises(RouterQueueLimitExceeded, match="all workers are busy"):
        await router.best_worker(OTHERS, request_id="b")


async def test_answer_that_is_closed_frees_its_worker(cluster):
    router = await cluster.router(1)
    cluster.workers[0].may_end.clear()
    stream = await router.generate(TOKENS, "m")
    async with asyncio.timeout(PATIENT_S):
        assert (await anext(stream))["token_ids"] == [99]
    (row,) = await router.get_potential_loads([1])
    await stream.aclose()

    assert row["active_requests"] == 1
    assert [row["active_requests"] for row in await router.get_potential_loads([1])] == [0]


async def test_request_for_a_worker_by_name_goes_there(cluster):
    router = await cluster.router(2)
    for worker in cluster.workers:
        for _ in range(2):
            await read(await router.generate(TOKENS, "m", worker_id=worker.id))

    assert [len(worker.requests) for worker in cluster.workers] == [2, 2]
    with pytest.raises(errors.InvalidRequest, match="expected the id of a worker"):
        await router.generate(TOKENS, "m", worker_id=5)


async def test_selected_worker_counts_as_having_the_prompt_where_there_are_no_events(cluster):
    router = await cluster.router(2, KvRouterConfig(use_kv_events=False))
    selected = [
        await router.best_worker(TOKENS),
        await router.best_worker(TOKENS, update_indexer=True),
        await router.best_worker(TOKENS),
    ]

    assert [num_blocks for _, _, num_blocks in selected] == [0, 0, 25]
    assert [row["active_requests"] for row in await router.get_potential_loads([1])] == [0, 0]


async def test_prompts_are_spread_over_the_ranks_of_a_worker_which_learns_the_rank(cluster):
    router = await cluster.router(0)
    await cluster.add_worker(num_ranks=2)
    first = await router.best_worker(TOKENS, request_id="a")
    second = await router.best_worker(OTHERS, request_id="b")
    await read(await router.generate(TOKENS, "m", dp_rank=1))
    (request,) = cluster.workers[0].requests

    assert {first[1], second[1]} == {0, 1}
    assert (request["dp_rank"], request["routing"]["dp_rank"]) == (1, 1)
    assert len(await router.get_potential_loads(TOKENS)) == 2


async def test_first_request_waits_for_the_first_worker(cluster):
    router = await cluster.router(0)
    asking = asyncio.ensure_future(router.generate([7], "m"))
    await asyncio.sleep(0)
    await cluster.add_worker()
    async with asyncio.timeout(PATIENT_S):
        stream = await asking

    assert [item["token_ids"] for item in await read(stream)] == [[7], [8]]


async def test_session_stays_with_its_worker(cluster):
    router = await cluster.router(2, session_affinity_ttl_secs=60)
    for number in range(4):
        tokens = list(range(number * 1000, number * 1000 + 50))
        await read(
            await router.generate_from_request(
                {"token_ids": tokens, "model": "m", "session_id": "s"}
            )
        )

    assert sorted(len(worker.requests) for worker in cluster.workers) == [0, 4]


async def test_router_ends_with_its_runtime(cluster):
    router = await cluster.router(1)
    await cluster._stack.aclose()

    await until(router._running.done)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"router_queue_threshold": 0.0, "router_queue_policy": "fcfs"}),
        ({"overlap_score_weight": 2.0}, {"kv_overlap_score_weight": 2.0}),
        ({"prefill_load_scale": 2.0}, {"kv_overlap_score_weight": 2.0}),
        (
            {"overlap_score_weight": 0.0},
            {"kv_overlap_score_weight": 0.0, "router_device_credit": 0.0},
        ),
        ({"overlap_score_credit": 0.5}, {"router_device_credit": 0.5}),
        ({"router_temperature": 0.3}, {"router_temperature": 0.3}),
        ({"use_kv_events": False}, {"kv_events": False}),
        ({"router_queue_threshold": 2.0}, {"router_queue_threshold": 2.0}),
        ({"router_event_threads": 1}, {}),
    ],
)
def test_settings_are_those_of_the_router_of_a_frontend(settings, expected):
    routing = KvRouterConfig(**settings).routing_config()
    plain = KvRouterConfig().routing_config()

    assert isinstance(routing, config.RoutingConfig)
    assert {name: getattr(routing, name) for name in expected} == expected
    names = set(routing.__dataclass_fields__) - expected.keys()
    assert [name for name in names if getattr(routing, name) != getattr(plain, name)] == []


def test_settings_are_copied_and_overridden():
    settings = KvRouterConfig.from_json('{"router_temperature": 0.5}')
    copied, other = settings.copy(), settings.with_overrides(prefill_load_scale=3.0)
    copied.overlap_score_credit = 0.25

    assert (settings.router_temperature, settings.overlap_score_credit) == (0.5, 1.0)
    assert (other.router_temperature, other.prefill_load_scale) == (0.5, 3.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"router_prefill_load_model": "ais"}, "router_prefill_load_model is not supported here"),
        ({"router_assume_kv_reuse": False}, "router_assume_kv_reuse is not supported here"),
        ({"overlap_score_credit": 1.5}, "KvRouter, overlap_score_credit: expected 0.* to 1"),
        ({"router_queue_policy": "random"}, "router_queue_policy: expected fcfs or lcfs or wspt"),
    ],
)
def test_setting_without_effect_is_refused_by_name(settings, message):
    with pytest.raises(errors.ConfigError, match=message):
        KvRouterConfig(**settings)


@pytest.mark.parametrize("text", ["[]", "{", '{"temperature": 1}'])
def test_json_that_has_no_settings_is_refused(text):
    with pytest.raises(errors.ConfigError, match="KvRouterConfig"):
        KvRouterConfig.from_json(text)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("generate", {"model": "m", "extra_args": {"a": 1}}, "generate: extra_args is not"),
        ("best_worker", {"policy_class": "gold"}, "best_worker: policy_class is not supported"),
        (
            "best_worker",
            {"router_config_override": {"assume_kv_reuse": False}},
            "router_config_override: assume_kv_reuse is not supported here",
        ),
        ("get_potential_loads", {"block_mm_infos": [{}]}, "block_mm_infos is not supported here"),
    ],
)
async def test_argument_without_effect_is_refused_by_name(cluster, call, arguments, message):
    router = await cluster.router(0)
    with pytest.raises(errors.ConfigError, match=message):
        await getattr(router, call)([1], **arguments)


async def test_router_with_a_threshold_of_load_is_refused(cluster):
    with pytest.raises(errors.ConfigError, match="KvRouter: load_threshold_config, session_aff"):
        await cluster.router(0, load_threshold_config=object(), session_affinity_mode="soft")


def test_hints_of_routing_and_a_top_k_of_all_tokens_are_read():
    hints = {"backend_instance_id": 7, "dp_rank": 1, "lora_name": None, "priority": 3}
    request, instance_id = routers.read_request(
        REQUEST | {"routing": hints, "sampling_options": {"top_k": -1}}
    )

    assert (instance_id, request.data_parallel_rank, request.priority) == (7, 1, 3)
    assert (request.lora_name, request.sampling_options.top_k) == (None, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": []}, "expected at least one"),
        ({"token_ids": [-1]}, "expected ids of 0 to 4294967295"),
        ({"multi_modal_data": {"image": 1}}, "request: multi_modal_data is not supported here"),
        ({"sampling_options": {"best_of": 2}}, "sampling_options: best_of is not supported here"),
        ({"stop_conditions": {"max_tokens": "2"}}, "expected the fields of a request"),
    ],
)
def test_request_that_would_lose_something_is_refused(fields, message):
    with pytest.raises(errors.InvalidRequest, match=message):
        routers.read_request(REQUEST | fields)


def test_log_probabilities_have_the_names_of_dynamo():
    top = generate.TopLogprob(4, -0.5)
    output = generate.Output((3,), logprobs=(generate.TokenLogprobs(-1.0, (top,)),), stop_reason=3)

    assert routers.output_fields(output) == {
        "token_ids": [3],
        "index": 0,
        "finish_reason": None,
        "stop_reason": 3,
        "log_probs": [-1.0],
        "top_logprobs": [[{"rank": 1, "token_id": 4, "logprob": -0.5}]],
    }
