"""LoRA adapters with real vLLM: one of random weights changes its requests' answers and no others."""

import importlib.util
import json

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

import httpx
import pytest_asyncio
import safetensors.torch
import torch
from deployment import Deployment

import engine_suite
import vllm_models
from dynamo.base import errors
from dynamo.engine.adapters.settings import VllmConfig
from lora_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from lora_suite import answer as written
from vllm_engine import *  # noqa: F403 (its fixtures, but for make_engine)
from vllm_engine import ENVIRONMENT, FLAGS, adapter
from waiting import PATIENT_S, eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Has the model, and may have adapters of it."""
    directory = tmp_path_factory.mktemp("place")
    vllm_models.make(directory / "model")
    return directory


@pytest.fixture(scope="module")
def make_engine(place):
    clerk = make_adapter(place / "clerk", place / "model", seed=2)
    flags = (*FLAGS.split(), "--enable-lora", "--max-lora-rank", "8", "--max-cpu-loras", "2")
    settings = VllmConfig(
        engine_args=flags,
        lora_modules=(f"clerk={clerk}",),
        connector=("kvbm",),
        kvbm_cpu_cache_override_num_blocks=64,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield lambda: adapter.build(place / "model", settings, "m")


@pytest_asyncio.fixture(loop_scope="module")
async def loras(host):
    asked = host.engine.capabilities.lora_adapters
    assert asked.lora_names == ("clerk",)
    yield asked
    for name in asked.lora_names[1:]:
        await asked.unload_lora(name)


@pytest.fixture
def directory(tmp_path, place):
    return make_adapter(tmp_path / "poet", place / "model")


async def test_an_adapter_of_the_start_answers_only_its_own_requests(host):
    plain, said, again, after = [
        await written(host, f"{number}", name)
        for number, name in enumerate((None, "clerk", "clerk", None))
    ]

    assert host.facts.lora_names == ("clerk",)
    assert plain == after
    assert said == again != plain


async def test_adapter_of_the_start_that_cannot_be_loaded_is_refused_by_name(
    place, tmp_path, monkeypatch
):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    settings = VllmConfig(
        engine_args=(*FLAGS.split(), "--enable-lora"), lora_modules=(f"poet={tmp_path}",)
    )
    engine = adapter.build(place / "model", settings, "m")

    with pytest.raises(errors.ConfigError, match="--lora-modules poet="):
        await engine.start(engine_suite.Sink())
    await engine.stop()


async def test_evicted_blocks_of_an_adapter_are_loaded_for_it_alone(host):
    said = await written(host, "first", "clerk")
    for number in range(2):  # they fill vLLM's 24 blocks
        tokens = list(range(1000 + number, 1380 + number))
        await host.answer(f"other {number}", tokens, max_tokens=2)
    plain = await written(host, "plain", None)
    again = await written(host, "again", "clerk")

    assert said == again != plain
    assert dict(host.sink.of("again", 0)[-1].tier_tokens or ()) == {"host": 96}
    assert not host.sink.of("plain", 0)[-1].tier_tokens


async def test_a_reloaded_name_reuses_no_blocks_of_the_former_adapter(
    host, loras, directory, place, tmp_path
):
    other = make_adapter(tmp_path / "other", place / "model", seed=1)
    await loras.load_lora("other", other)
    expected = await written(host, "by its name", "other")
    await loras.load_lora("poet", directory)
    former = await written(host, "former", "poet")
    await loras.unload_lora("poet")

    await loras.load_lora("poet", other)

    assert await written(host, "latter", "poet") == expected != former


async def test_an_invalid_adapter_is_refused_and_the_engine_goes_on(host, loras, place, tmp_path):
    broken = make_adapter(tmp_path / "broken", place / "model")
    (broken / "adapter_config.json").write_text(json.dumps(FIELDS | {"r": 64}))

    with pytest.raises(errors.InvalidRequest, match="vLLM cannot load the LoRA adapter in"):
        await loras.load_lora("poet", broken)
    assert loras.lora_names == ("clerk",)
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
    frontend.await_models(["m", "poet"], within_s=5 * PATIENT_S)
    yield frontend
    deployment.end()


def asked(frontend, model):
    """What it says, and how many tokens of the prompt it had."""
    body = {"model": model, "prompt": list(range(3, 103)), "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=PATIENT_S)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert said["model"] == model
    return said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"]


def foretold(frontend):
    """The sum of the shares of prompts that the router believed to be cached."""
    rows = httpx.get(f"{frontend.url}/metrics", timeout=PATIENT_S).text.splitlines()
    found = [row for row in rows if "_router_kv_hit_rate_sum{" in row]
    return sum(float(row.rpartition(" ")[2]) for row in found)


@pytest.mark.system
def test_an_adapter_is_a_model_for_clients_and_its_prefixes_are_routed(story):
    cold = {model: asked(story, model) for model in ("m", "poet")}
    before = foretold(story)
    warm = asked(story, "poet")
    eventually(
        lambda: asked(story, "poet") and foretold(story) > before,
        what="a prefix of the adapter that the router knows",
    )

    assert before == 0
    assert [num_cached for _, num_cached in cold.values()] == [0, 0]
    assert warm == (cold["poet"][0], 96)
    assert cold["m"][0] != cold["poet"][0]
