"""Tiers for models whose layers do not all keep every KV block: refused before they are loaded, or served with a flag.

vLLM forgets the blocks of a sliding window behind it, and keeps a state instead of blocks for linear attention. Its
flag lets all layers of attention keep every block, and then tiers can hold them.
"""

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

import vllm_engine
import vllm_models
from dynamo.base import errors
from dynamo.engine.adapters import settings
from dynamo.engine.adapters.vllm import connectors
from engine_suite import Host, Sink
from vllm_engine import adapter

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
computes_sinks = pytest.mark.skipif(
    (settings.VLLM.installed_version or "").startswith("0.28."),
    reason="vLLM 0.28 computes attention with sinks in float32 on no CPU",
)
BLOCK = 32


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Return a function that makes an engine with a host tier for a family, and further flags."""
    for name, value in vllm_engine.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def build(family, *flags):
        options = settings.VllmConfig(
            engine_args=(*vllm_engine.FLAGS.split(), *flags),
            connector=("kvbm",),
            kvbm_cpu_cache_override_num_blocks=128,
        )
        return adapter.build(vllm_models.make_of_family(tmp_path, family), options, "m")

    return build


def prompt(seed, length):
    return [(i * 37 + seed * 101) % 4000 + 5 for i in range(length)]


@pytest.mark.parametrize(
    ("family", "flags", "says"),
    [
        ("gemma3", (), f"sliding_attention; add {connectors.ONE_GROUP}"),
        ("gpt_oss", (), f"sliding_attention; add {connectors.ONE_GROUP}"),
        ("qwen3_next", (), "linear_attention; serve it without tiers: --connector none"),
        ("qwen3_next", (connectors.ONE_GROUP,), "linear_attention; serve it without tiers"),
    ],
)
async def test_model_is_refused_in_one_sentence_before_it_is_loaded(build, family, flags, says):
    engine = build(family, *flags)
    with pytest.raises(errors.ConfigError, match=says):
        await engine.start(Sink())


@pytest.mark.parametrize("family", ["gemma3", pytest.param("gpt_oss", marks=computes_sinks)])
async def test_model_with_sliding_windows_has_tiers_with_vllms_flag(build, family):
    engine, sink = build(family, connectors.ONE_GROUP), Sink()
    host = Host(engine, sink, await engine.start(sink))
    try:
        await host.answer("warm", prompt(999, 200), max_tokens=2)
        first = await host.answer("first", prompt(1, 300), max_tokens=12)
        for i in range(2):  # they fill vLLM's 24 blocks
            await host.answer(f"other {i}", prompt(500 + i, 380), max_tokens=2)
        again = await host.answer("again", prompt(1, 300), max_tokens=12)

        assert again == first
        assert dict(sink.of("again")[-1].tier_tokens) == {"host": 300 // BLOCK * BLOCK}
    finally:
        await engine.stop()
