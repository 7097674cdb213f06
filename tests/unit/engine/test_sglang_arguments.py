"""Our flags and SGLang's, by a fake of SGLang's parser."""

import json

import pytest

import fake_sglang
from dynamo.base import errors
from dynamo.engine.adapters.sglang.settings import SglangConfig


def made(*flags, **settings):
    with fake_sglang.adapter("engine") as engine:
        config = SglangConfig(engine_args=flags, **settings)
        return engine.server_args(fake_sglang.types.SimpleNamespace(), config, "some")


def endpoints(*flags):
    with fake_sglang.adapter("engine") as engine:
        args = made(*flags)
        return args, engine.kv_event_endpoints(args)


def test_sglang_is_told_where_to_tell_kv_events():
    args, heard = endpoints()
    told = json.loads(args.kv_events_config)

    assert told["publisher"] == "zmq"
    assert (told["endpoint"], told["replay_endpoint"]) == (heard.endpoint, heard.replay_endpoint)
    assert heard.endpoint.startswith("tcp://127.0.0.1:")


def test_a_users_own_events_are_heard_where_he_says():
    _, heard = endpoints("--kv-events-config", '{"publisher": "zmq", "topic": "kv"}')

    assert (heard.endpoint, heard.replay_endpoint, heard.topic) == ("tcp://*:5557", None, "kv")


@pytest.mark.parametrize("flags", [("--disable-radix-cache",), ("--kv-events-config", "{}")])
def test_an_sglang_that_tells_no_events_is_not_listened_to(flags):
    assert endpoints(*flags)[1] is None


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
