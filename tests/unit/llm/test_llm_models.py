"""A user's handler is a worker of a model: it gets tokens and gives tokens."""

import asyncio
import importlib
import json
import shutil

import msgspec
import numpy as np
import pytest

from dynamo.base import errors, tasks
from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    RouterMode,
    exceptions,
    fetch_model,
    models,
    register_llm,
    register_model,
    unregister_model,
)
from dynamo.protocols import blocks, generate, instances, model_card
from dynamo.runtime import component, request_context
from waiting import PATIENT_S, until

NAME = "dynamo.backend.generate"
TEXT = ModelType.Chat | ModelType.Completions


@pytest.fixture
async def runtime():
    cluster = component.MemoryCluster()
    async with await component.DistributedRuntime.in_memory(
        cluster, item_type=generate.Output
    ) as runtime:
        yield runtime


@pytest.fixture
async def running():
    async with tasks.Tasks() as running:
        yield running


def request(*token_ids, **fields):
    return generate.Request(id="r", model="m", token_ids=blocks.pack(token_ids), **fields)


async def cards_of(runtime):
    records = await runtime.discovery.get_prefix(instances.CARDS)
    return [msgspec.json.decode(r, type=model_card.CardRecord).card_json for r in records.values()]


async def answer(runtime, running, handler, asked):
    """Return the outputs of a handler for the request of a frontend."""
    endpoint = runtime.endpoint(NAME)
    await register_model(ModelInput.Tokens, TEXT, endpoint, "storyteller")
    running.start("serve", endpoint.serve_endpoint(handler))
    client = runtime.client(endpoint.name)
    await client.wait_for_instances(PATIENT_S)
    async with asyncio.timeout(PATIENT_S):
        return [output async for output in client.stream(asked, item_type=generate.Output)]


async def test_handler_answers_each_choice_in_tokens(runtime, running):
    requests = []

    async def handler(asked, context):
        requests.append(asked)
        yield {"token_ids": [1]}
        yield {"token_ids": [2], "finish_reason": "length"}

    options = generate.SamplingOptions(n=2, seed=7, temperature=0.5)
    outputs = await answer(runtime, running, handler, request(8, 9, sampling_options=options))

    length = generate.FinishReason.LENGTH
    assert outputs == [
        generate.Output((token,), reason, index=index)
        for index in (0, 1)
        for token, reason in ((1, None), (2, length))
    ]
    assert [each["token_ids"] for each in requests] == [[8, 9]] * 2
    assert [each["sampling_options"]["seed"] for each in requests] == [7, 8]
    assert requests[0]["sampling_options"]["temperature"] == 0.5
    assert requests[0]["stop_conditions"]["max_tokens"] is None


@pytest.mark.parametrize(("max_tokens", "reason"), [(None, "eos"), (3, "eos"), (2, "length")])
async def test_choice_without_a_finish_reason_ends_with_its_items(
    runtime, running, max_tokens, reason
):
    async def handler(asked):
        yield {"token_ids": [1]}
        yield {"token_ids": [2]}

    asked = request(
        8,
        stop_conditions=generate.StopConditions(max_tokens=max_tokens),
        sampling_options=generate.SamplingOptions(n=2),
    )
    outputs = await answer(runtime, running, handler, asked)

    assert outputs == [
        generate.Output(tokens, end, index=index)
        for index in (0, 1)
        for tokens, end in (((1,), None), ((2,), None), ((), generate.FinishReason(reason)))
    ]


@pytest.mark.parametrize(
    ("ignore_eos", "hidden", "eos"), [(False, [7, 2, 5], [2, 5]), (True, [7, 2], [])]
)
def test_handler_gets_all_tokens_that_end_an_answer(ignore_eos, hidden, eos):
    stop = generate.StopConditions(stop_token_ids=(7, 2), ignore_eos=ignore_eos)
    fields = models.preprocessed_request(request(1, stop_conditions=stop, eos_token_ids=(2, 5)), 0)

    assert fields["stop_conditions"]["stop_token_ids_hidden"] == hidden
    assert fields["eos_token_ids"] == eos


async def test_error_of_the_engine_reaches_the_frontend(runtime, running):
    async def handler(asked):
        yield {"token_ids": [], "finish_reason": "error", "err_msg": "out of memory"}

    with pytest.raises(errors.EngineFailed, match="the engine failed: out of memory"):
        await answer(runtime, running, handler, request(1))


@pytest.mark.parametrize(
    ("item", "outputs"),
    [
        ({"token_ids": [4]}, [((4,), None)]),
        ({"token_ids": [4, 2], "finish_reason": "stop"}, [((4, 2), "stop")]),  # 2 is an end token
        ({"token_ids": [4], "finish_reason": "stop"}, [((4,), None), ((), "stop")]),
        ({"token_ids": [], "finish_reason": "eos"}, [((), "eos")]),
        ({"token_ids": [4], "finish_reason": "length"}, [((4,), "length")]),
        ({"token_ids": []}, []),
        ({"token_ids": None, "finish_reason": "eos"}, [((), "eos")]),
        ({"token_ids": np.array([4, 2]), "finish_reason": "stop"}, [((4, 2), "stop")]),
    ],
)
def test_item_becomes_outputs_that_keep_its_last_token_visible(item, outputs):
    translated = models.translate_item(item, 0, {2})

    assert [(each.token_ids, each.finish_reason) for each in translated] == outputs


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("hi", "expected an item with token_ids, got 'hi'"),
        ({"finish_reason": "abort"}, "the engine gave the request up: abort"),
        ({"finish_reason": "cancelled"}, "the engine gave the request up: cancelled"),
        ({"finish_reason": "done"}, "expected a finish_reason of eos, stop, .* got 'done'"),
        ({"finish_reason": {"error": "no GPU"}}, "the engine failed: no GPU"),
        ({"token_ids": ["four"]}, "expected token_ids of 0 to 4294967295, got .'four'"),
        ({"token_ids": [-1]}, "expected token_ids of 0 to 4294967295"),
        ({"token_ids": 4}, "expected token_ids of 0 to 4294967295, got 4"),
    ],
)
def test_item_that_is_none_fails_the_request(item, reason):
    with pytest.raises(errors.EngineFailed, match=reason):
        list(models.translate_item(item, 0, set()))


async def test_model_is_published_as_it_was_registered_until_it_is_unregistered(runtime, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    facts = ModelRuntimeConfig()
    facts.max_num_seqs, facts.tool_call_parser = 8, "hermes"
    facts.set_engine_specific("kind", "mine")
    endpoint = runtime.endpoint(NAME)
    await register_llm(
        ModelInput.Tokens, ModelType.Chat, endpoint, "storyteller", "mine", 512, 32,
        RouterMode.RoundRobin, runtime_config=facts, user_data={"a": 1}, migration_limit=3,
        custom_template_path=str(template),
    )  # fmt: skip
    (card,) = await cards_of(runtime)
    await unregister_model(endpoint)
    left = await cards_of(runtime)
    await register_model(ModelInput.Tokens, TEXT, endpoint, "storyteller", "again")
    (second,) = await cards_of(runtime)

    assert (card.display_name, card.context_length, card.kv_cache_block_size) == ("mine", 512, 32)
    assert card.model_type == (model_card.ModelType.CHAT,)
    assert card.files["chat_template.jinja"].path == str(template)
    assert "tokenizer.json" in card.files
    assert (card.migration_limit, card.user_data) == (3, {"a": 1})
    assert (card.runtime_config.max_num_seqs, card.runtime_config.tool_call_parser) == (8, "hermes")
    assert facts.get_engine_specific("kind") == card.runtime_config.runtime_data["kind"] == "mine"
    assert (left, second.display_name) == ([], "again")


async def test_template_that_is_registered_replaces_that_for_tools_as_well(runtime, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(await fetch_model("storyteller"), directory)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("<tool_call>")
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    await register_model(
        ModelInput.Tokens, TEXT, runtime.endpoint(NAME), str(directory), "mine",
        custom_template_path=str(tmp_path / "own.jinja"),
    )  # fmt: skip
    (card,) = await cards_of(runtime)

    assert [name for name in card.files if "template" in name] == ["chat_template.jinja"]


async def test_context_length_is_that_of_the_model(runtime):
    await register_model(ModelInput.Tokens, TEXT, runtime.endpoint(NAME), "storyteller")
    (card,) = await cards_of(runtime)
    directory = await fetch_model("storyteller")

    with open(f"{directory}/config.json") as file:
        assert card.context_length == json.load(file)["max_position_embeddings"]
    assert card.display_name == "storyteller"


async def test_model_is_registered_as_before_version_05(runtime):
    await register_llm(ModelType.Backend, runtime.endpoint(NAME), "storyteller", "old")
    (card,) = await cards_of(runtime)

    assert card.display_name == "old"
    assert card.model_type == (model_card.ModelType.CHAT, model_card.ModelType.COMPLETIONS)


async def test_handler_fails_a_request_by_dynamos_errors(runtime, running):
    async def handler(asked):
        raise exceptions.InvalidArgument("no such voice")
        yield

    with pytest.raises(errors.InvalidRequest, match="no such voice"):
        await answer(runtime, running, handler, request(1))
    assert issubclass(exceptions.EngineShutdown, errors.WorkerLost)  # the request migrates


def test_names_are_those_of_the_bindings_module():
    core = importlib.import_module("dynamo._core")

    assert core.Context is request_context.Context
    assert core.register_model is register_model
    assert core.InvalidArgument is errors.InvalidRequest
    with pytest.raises(AttributeError, match="no attribute 'SelectionService'"):
        core.SelectionService  # noqa: B018


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_input": ModelInput.Text}, "expected ModelInput.Tokens"),
        ({"model_type": ModelType.Embedding}, "expected ModelType.Chat"),
        ({"model_type": TEXT | ModelType.Images}, "expected ModelType.Chat"),
        (
            {"lora_name": "poet", "base_model_path": "x"},
            "lora_name, base_model_path is not support",
        ),
        (
            {"custom_template_path": "/no/such.jinja"},
            "custom_template_path /no/such.jinja: expected a file",
        ),
    ],
)
async def test_what_is_not_supported_is_refused(runtime, changed, reason):
    arguments = {
        "model_input": ModelInput.Tokens,
        "model_type": TEXT,
        "endpoint": runtime.endpoint(NAME),
        "model_path": "storyteller",
    }

    with pytest.raises(errors.ConfigError, match=reason):
        await register_model(**{**arguments, **changed})
    assert await cards_of(runtime) == []


async def test_description_of_an_engine_says_its_context_length(runtime):
    facts = ModelRuntimeConfig()
    facts.context_length, facts.enable_local_indexer, facts.taints = 100, True, set()
    for length in (None, 200):
        endpoint = runtime.endpoint(NAME)
        await register_model(
            ModelInput.Tokens, TEXT, endpoint, "storyteller", None, length, runtime_config=facts
        )
        (card,) = await cards_of(runtime)
        assert card.context_length == (length or 100)


@pytest.mark.parametrize(
    ("field", "value"),
    [("taints", {"gpu"}), ("data_parallel_start_rank", 1), ("max_num_sequences", 3)],
)
def test_fact_of_an_engine_that_nothing_reads_is_refused(field, value):
    with pytest.raises(errors.ConfigError, match=f"ModelRuntimeConfig, {field}: not supported"):
        setattr(ModelRuntimeConfig(), field, value)


async def test_process_has_models_at_several_endpoints_of_a_component(runtime, running):
    async def handler(asked):
        yield {"token_ids": [1], "finish_reason": "length"}

    for name in ("generate", "other"):
        endpoint = runtime.endpoint(f"dynamo.backend.{name}")
        await register_model(ModelInput.Tokens, TEXT, endpoint, "storyteller", name)
        running.start("serve", endpoint.serve_endpoint(handler))

    assert sorted(card.display_name for card in await cards_of(runtime)) == ["generate", "other"]


async def test_stopped_choice_is_no_end_of_the_others(runtime, running):
    may_go_on = asyncio.Event()

    async def handler(asked):
        yield {"token_ids": [1]}
        await may_go_on.wait()
        yield {"token_ids": [2], "finish_reason": "length"}

    endpoint = runtime.endpoint(NAME)
    await register_model(ModelInput.Tokens, TEXT, endpoint, "storyteller")
    running.start("serve", endpoint.serve_endpoint(handler))
    client = runtime.client(endpoint.name)
    await client.wait_for_instances(PATIENT_S)
    outputs, over = [], []

    class Receiver:
        receive = staticmethod(outputs.append)
        ended = staticmethod(over.append)

        def replied(self, body):
            raise AssertionError

    stream = await client.open(
        request(5, sampling_options=generate.SamplingOptions(n=2)), Receiver()
    )
    await until(lambda: outputs)
    stream.send_signal(0)  # a frontend needs no more of choice 0
    await asyncio.sleep(0)
    may_go_on.set()
    await until(lambda: over)

    assert over == [None]
    assert [each.index for each in outputs if each.finish_reason is not None] == [0, 1]
