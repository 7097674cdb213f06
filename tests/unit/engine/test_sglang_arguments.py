"""Our flags and SGLang's, by a fake of SGLang's parser."""

import pytest

import fake_sglang
from dynamo.base import errors
from dynamo.engine.adapters.sglang.settings import SglangConfig


def made(*flags, **settings):
    with fake_sglang.adapter("arguments") as arguments:
        config = SglangConfig(engine_args=flags, **settings)
        return arguments.server_args(fake_sglang.types.SimpleNamespace(), config, "some")


def test_sglangs_own_flags_are_taken():
    assert made("--tp-size", "2").tp_size == 2


def test_what_we_say_is_said():
    args = made()

    assert args.served_model_name == "some"
    assert args.skip_tokenizer_init
    assert args.incremental_streaming_output
    assert not made(load_tokenizer=True).skip_tokenizer_init


@pytest.mark.parametrize(
    "flag", ["--served_model_name", "--model-path=x", "--skip-tokenizer-init", "--nnodes"]
)
def test_what_we_tell_sglang_cannot_be_said_in_its_way(flag):
    with pytest.raises(errors.ConfigError, match=flag.partition("=")[0].replace("_", "-")):
        made(flag, "x")


def test_a_flag_that_nobody_knows_is_named():
    with pytest.raises(errors.ConfigError, match="SGLang: unrecognized arguments: --tp-sizes"):
        made("--tp-sizes-", "5")


def test_what_sglang_finds_wrong_is_said_in_its_words():
    with pytest.raises(errors.ConfigError, match="SGLang: tp_size must be positive"):
        made("--tp-size", "0")
