"""Adapters, with real vLLM: one of random weights changes an answer, and who does not ask for it is not touched."""

import importlib.util
import json

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

import httpx
import safetensors.torch
import torch
from deployment import Deployment, eventually

import vllm_models
from adapters_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from adapters_suite import answer as written
from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.adapters.vllm.settings import VllmConfig
from dynamo.protocols import blocks, generate
from engine_suite import Host, Sink
from vllm_engine import FLAGS, adapter, make_engine  # noqa: F401 (a fixture: it sets the environment)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]
RANK = 4
FIELDS = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 64,
    "target_modules": ["q_proj"],
    "bias": "none",
    "task_type": "CAUSAL_LM",
}


def make_adapter(directory, model, *, seed=0):
    config = json.loads((model / "config.json").read_text())
    size = config["num_attention_heads"] * config["head_dim"]
    drawn = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        begin = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        tensors[f"{begin}A.weight"] = torch.randn(RANK, config["hidden_size"], generator=drawn)
        tensors[f"{begin}B.weight"] = torch.randn(size, RANK, generator=drawn)
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(FIELDS))
    safetensors.torch.save_file(tensors, directory / "adapter_model.safetensors")
    return directory


async def answer(engine, sink, request_id, lora_name):
    engine.submit(
        generate.Request(
            id=request_id,
            model="m",
            lora_name=lora_name,
            token_ids=blocks.pack(range(3, 103)),
            stop_conditions=generate.StopConditions(max_tokens=8),
            sampling_options=generate.SamplingOptions(temperature=0.0),
        )
    )
    await sink.until_ended(request_id)
    return sink.tokens(request_id)


@pytest.mark.usefixtures("make_engine")
async def test_an_adapter_answers_who_asks_for_it_and_nobody_else(tmp_path):
    model = vllm_models.make(tmp_path / "model")
    poet = make_adapter(tmp_path / "poet", model)
    flags = (*FLAGS.split(), "--enable-lora", "--max-lora-rank", "8")
    engine = adapter.build(
        model, VllmConfig(engine_args=flags, lora_modules=(f"poet={poet}",)), "m"
    )
    sink = Sink()
    facts = await engine.start(sink)
    plain, written, again, after = [
        await answer(engine, sink, f"{number}", name)
        for number, name in enumerate((None, "poet", "poet", None))
    ]
    await engine.stop()

    assert facts.lora_names == ("poet",)
    assert plain == after
    assert written == again
    assert written != plain


@pytest.fixture
async def host(tmp_path, make_engine):  # noqa: F811 (it sets the environment)
    model = vllm_models.make(tmp_path / "model")
    flags = (*FLAGS.split(), "--enable-lora", "--max-lora-rank", "8", "--max-cpu-loras", "2")
    engine, sink = adapter.build(model, VllmConfig(engine_args=flags), "m"), Sink()
    yield Host(engine, sink, await engine.start(sink))
    await engine.stop()


@pytest.fixture
def adapters(host):
    assert isinstance(host.engine, api.CanAdapt)
    return host.engine.adapters


@pytest.fixture
def directory(tmp_path, host):
    return make_adapter(tmp_path / "poet", tmp_path / "model")


async def test_another_adapter_of_the_same_name_finds_no_blocks_of_the_former(
    host, adapters, directory, tmp_path
):
    other = make_adapter(tmp_path / "other", tmp_path / "model", seed=1)
    await adapters.load_lora("other", other)
    expected = await written(host, "by its name", "other")
    await adapters.load_lora("poet", directory)
    former = await written(host, "former", "poet")
    await adapters.unload_lora("poet")

    await adapters.load_lora("poet", other)

    assert await written(host, "latter", "poet") == expected != former


async def test_what_vllm_cannot_load_is_refused_and_it_goes_on(host, adapters, tmp_path):
    broken = make_adapter(tmp_path / "broken", tmp_path / "model")
    (broken / "adapter_config.json").write_text(json.dumps(FIELDS | {"r": 64}))

    with pytest.raises(errors.InvalidRequest, match="vLLM cannot load the LoRA adapter in"):
        await adapters.load_lora("poet", broken)
    assert adapters.lora_names == ()
    assert await written(host, "still", None)


@pytest.fixture
def story(tmp_path):
    """A frontend in mode kv, and a worker that has the adapter."""
    model = vllm_models.make(tmp_path / "model")
    poet = make_adapter(tmp_path / "poet", model)
    deployment = Deployment(tmp_path)
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"poet={poet}")
    named = ("--model", str(model), "--model-name", "m")
    worker = deployment.vllm(*named, *FLAGS.split(), *lora)
    frontend = deployment.frontend("--router-mode", "kv")
    frontend.others = [worker]
    frontend.await_models(["m", "poet"], within_s=300)
    yield frontend
    deployment.end()


def asked(frontend, model):
    """What it says, and how many tokens of the prompt it had."""
    body = {"model": model, "prompt": list(range(3, 103)), "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert said["model"] == model
    return said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"]


def foretold(frontend):
    """The sum of the shares of prompts that the router believed to be cached."""
    rows = httpx.get(f"{frontend.url}/metrics", timeout=5).text.splitlines()
    found = [row for row in rows if "_router_kv_hit_rate_sum{" in row]
    return sum(float(row.rpartition(" ")[2]) for row in found)


@pytest.mark.system
def test_clients_ask_for_it_as_a_model_and_the_router_knows_its_prefixes(story):
    cold = {model: asked(story, model) for model in ("m", "poet")}
    before = foretold(story)
    warm = asked(story, "poet")
    eventually(
        lambda: asked(story, "poet") and foretold(story) > before,
        within_s=30,
        what="a prefix of the adapter that the router knows",
    )

    assert before == 0
    assert [num_cached for _, num_cached in cold.values()] == [0, 0]
    assert warm == (cold["poet"][0], 96)
    assert cold["m"][0] != cold["poet"][0]
