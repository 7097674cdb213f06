import dataclasses
import logging

import pytest
import torch

from dynamo.base import config as settings
from dynamo.base import errors
from dynamo.engine.native import assemble, attention, config
from dynamo.engine.native.settings import NativeConfig

MODEL = config.parse(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
)
BLOCK_BYTES = 2 * 4 * 2 * 16 * 16 * 4  # keys and values, layers, heads, their size, tokens, float32


def test_the_kv_cache_fills_its_memory():
    settings = NativeConfig(kv_cache_memory_gb=100 * BLOCK_BYTES / assemble.GIB)

    assert assemble.count_blocks(MODEL, settings) == 100


def test_the_kv_cache_is_no_larger_than_all_slots_can_use():
    assert assemble.count_blocks(MODEL, NativeConfig(max_num_seqs=2)) == 2 * 512 // 16
    assert assemble.count_blocks(MODEL, NativeConfig(max_num_seqs=2, max_model_len=20)) == 2 * 2


def test_the_number_of_blocks_can_be_overridden():
    assert assemble.count_blocks(MODEL, NativeConfig(num_gpu_blocks_override=7)) == 7


def test_memory_for_less_than_a_block_is_refused():
    with pytest.raises(errors.ConfigError, match=r"--kv-cache-memory-gb 1e-06 holds no block"):
        assemble.count_blocks(MODEL, NativeConfig(kv_cache_memory_gb=1e-6))


def test_a_kv_cache_larger_than_memory_is_refused_with_its_size():
    with pytest.raises(errors.ConfigError, match=r"1000000000000 blocks takes \d+\.\d GiB"):
        attention.KvCache(
            MODEL, num_blocks=10**12, block_size=16, dtype=torch.float32, device="cpu"
        )


def test_the_context_is_the_models_if_the_kv_cache_holds_it(caplog):
    assert assemble.choose_context(512, NativeConfig(), num_blocks=32) == 512
    assert not caplog.records


def test_a_context_larger_than_the_kv_cache_is_cut_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        context_length = assemble.choose_context(512, NativeConfig(), num_blocks=10)

    assert context_length == 160
    assert "cut from 512 tokens to 160" in caplog.text


@pytest.mark.parametrize(("wanted", "num_blocks"), [(513, 100), (200, 10)])
def test_a_context_longer_than_the_model_or_cache_is_refused(wanted, num_blocks):
    with pytest.raises(errors.ConfigError, match=f"--max-model-len {wanted}"):
        assemble.choose_context(512, NativeConfig(max_model_len=wanted), num_blocks)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--block-size", "0"], "--block-size: expected at least 1, got 0"),
        (["--threads", "-1"], "--threads: expected at least 1, got -1"),
    ],
)
def test_numbers_below_one_are_refused(argv, message):
    with pytest.raises(errors.ConfigError, match=message):
        settings.load(NativeConfig, prog="native", argv=argv)


def test_step_without_a_token_for_each_sequence_is_refused():
    with pytest.raises(errors.ConfigError, match="100 is less than --max-num-seqs 256"):
        assemble.check_settings(NativeConfig(max_num_batched_tokens=100))


def test_the_default_step_on_a_cpu_is_short_but_has_a_token_for_every_sequence():
    assert NativeConfig().step_tokens == 512
    assert NativeConfig(device="cuda").step_tokens == 2048
    assert NativeConfig(max_num_seqs=1000).step_tokens == 1000
    assert NativeConfig(max_num_batched_tokens=100).step_tokens == 100


LARGE = dataclasses.replace(MODEL, hidden_size=1024, intermediate_size=3072)


@pytest.fixture
def choose_threads(monkeypatch, tmp_path):
    def choose(model, *, requested=None, omp_num_threads=None, cores=8, cpu_max=""):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if omp_num_threads is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", omp_num_threads)
        monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
        monkeypatch.setattr(assemble, "CPU_MAX", tmp_path / "cpu.max")
        (tmp_path / "cpu.max").write_text(cpu_max)
        return assemble.choose_threads(model, NativeConfig(threads=requested))

    return choose


@pytest.mark.parametrize(("model", "expected"), [(MODEL, 1), (LARGE, 8)])
def test_only_large_models_use_all_cores(choose_threads, model, expected):
    assert choose_threads(model) == expected


@pytest.mark.parametrize("model", [MODEL, LARGE])
def test_the_flag_overrides_the_environment_which_overrides_the_rule(choose_threads, model):
    assert choose_threads(model, omp_num_threads="2", cores=2) == 2
    assert choose_threads(model, requested=3, omp_num_threads="2", cores=2) == 3


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [("max 100000\n", 8), ("250000 100000\n", 2), ("50000 100000\n", 1), ("1600000 100000\n", 8)],
)
def test_a_containers_cpu_limit_bounds_the_threads(choose_threads, cpu_max, expected):
    assert choose_threads(LARGE, cpu_max=cpu_max) == expected
