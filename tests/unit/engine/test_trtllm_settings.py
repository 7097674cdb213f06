"""Flags, file and JSON become the arguments of TensorRT-LLM's LLM class."""

import json

import pytest

import fake_trtllm
from dynamo.base import errors
from dynamo.engine.adapters.settings import TrtllmConfig


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return tmp_path


def made(directory, extra=(), **fields):
    with fake_trtllm.adapter() as engine:
        return engine.llm_arguments(directory, TrtllmConfig(**fields), dict(extra))


def test_flags_become_arguments(directory):
    args = made(directory, tensor_parallel_size=2, kv_block_size=64, free_gpu_memory_fraction=0.8)

    assert (args["model"], args["tensor_parallel_size"]) == (str(directory), 2)
    assert args["kv_cache_config"]["tokens_per_block"] == 64
    assert args["kv_cache_config"]["free_gpu_memory_fraction"] == 0.8


def test_the_context_is_the_models_unless_the_flag_is_given(directory):
    assert made(directory)["max_seq_len"] == 4096
    assert made(directory, max_seq_len=512)["max_seq_len"] == 512


def test_the_file_overrides_flags_and_json_overrides_the_file(directory):
    extra = {"max_batch_size": 16, "kv_cache_config": {"dtype": "fp8"}}
    args = made(directory, extra, override_engine_args='{"max_batch_size": 4}')

    assert args["max_batch_size"] == 4
    assert args["kv_cache_config"]["dtype"] == "fp8"
    assert args["kv_cache_config"]["tokens_per_block"] == 32


def test_a_tokenizer_is_loaded_only_for_guided_decoding(directory):
    assert made(directory)["skip_tokenizer_init"]
    assert not made(directory, {"guided_decoding_backend": "xgrammar"})["skip_tokenizer_init"]


@pytest.mark.parametrize("name", ["model", "skip_tokenizer_init", "backend"])
def test_reserved_arguments_are_refused_with_their_source(directory, name):
    with pytest.raises(errors.ConfigError, match=f"--extra-engine-args: {name}"):
        made(directory, {name: 1})
    with pytest.raises(errors.ConfigError, match=f"--override-engine-args: {name}"):
        made(directory, override_engine_args=json.dumps({name: 1}))


def test_the_backend_that_is_supported_may_be_named(directory):
    assert made(directory, {"backend": "pytorch"})["backend"] == "pytorch"


@pytest.mark.parametrize("text", ["{", "[]"])
def test_an_override_that_is_not_a_map_is_refused(directory, text):
    with pytest.raises(errors.ConfigError, match="--override-engine-args: expected"):
        made(directory, override_engine_args=text)


def test_a_number_may_be_in_the_text_models_configuration(directory):
    (directory / "config.json").write_text('{"text_config": {"vocab_size": 7}}')

    with fake_trtllm.adapter() as engine:
        assert engine.read_model_number(directory, "vocab_size") == 7


@pytest.mark.parametrize("content", ["{}", '{"vocab_size": "7"}', "["])
def test_a_model_without_the_number_is_refused(directory, content):
    (directory / "config.json").write_text(content)
    with (
        fake_trtllm.adapter() as engine,
        pytest.raises(errors.ConfigError, match=r"config\.json"),
    ):
        engine.read_model_number(directory, "vocab_size")


def test_a_file_is_read_as_yaml(tmp_path):
    path = tmp_path / "extra.yaml"
    path.write_text("max_batch_size: 8")
    with fake_trtllm.adapter() as engine:
        assert engine.read_file(str(path)) == {"max_batch_size": 8}
        assert engine.read_file(None) == {}


def test_a_missing_file_is_named(tmp_path):
    with (
        fake_trtllm.adapter() as engine,
        pytest.raises(errors.ConfigError, match=r"--extra-engine-args: cannot read .*gone"),
    ):
        engine.read_file(str(tmp_path / "gone"))
