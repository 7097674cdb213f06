"""Our flags and SGLang's, by a fake of SGLang's parser."""

import contextlib
import json
import os

import pytest

import fake_sglang
from dynamo.base import errors
from dynamo.engine.adapters.settings import SglangConfig


def made(*flags, **settings):
    with fake_sglang.adapter() as engine:
        config = SglangConfig(engine_args=flags, **settings)
        return engine.server_args(fake_sglang.types.SimpleNamespace(), config, "some")


def endpoints(*flags):
    with fake_sglang.adapter() as engine, contextlib.ExitStack() as reservations:
        args = made(*flags)
        return args, engine.kv_event_endpoints(args, reservations)


def test_the_kv_event_endpoint_is_set_for_sglang():
    args, heard = endpoints()
    told = json.loads(args.kv_events_config)

    assert told["publisher"] == "zmq"
    assert (told["endpoint"], told["replay_endpoint"]) == (heard.endpoint, heard.replay_endpoint)
    assert heard.endpoint.startswith("tcp://127.0.0.1:")


def test_a_users_kv_event_endpoint_is_kept():
    _, heard = endpoints("--kv-events-config", '{"publisher": "zmq", "topic": "kv"}')

    assert (heard.endpoint, heard.replay_endpoint, heard.topic) == ("tcp://*:5557", None, "kv")


@pytest.mark.parametrize("flags", [("--disable-radix-cache",), ("--kv-events-config", "{}")])
def test_without_kv_events_there_is_no_endpoint(flags):
    assert endpoints(*flags)[1] is None


def test_sglangs_own_flags_are_accepted():
    assert made("--tp-size", "2").tp_size == 2


def test_our_overrides_are_set():
    args = made()

    assert args.served_model_name == "some"
    assert args.skip_tokenizer_init
    assert args.incremental_streaming_output
    assert not made(load_tokenizer=True).skip_tokenizer_init


@pytest.mark.parametrize(
    "flag", ["--served_model_name", "--model-path=x", "--skip-tokenizer-init", "--nnodes"]
)
def test_reserved_flags_are_refused(flag):
    with pytest.raises(errors.ConfigError, match=flag.partition("=")[0].replace("_", "-")):
        made(flag, "x")


def test_revision_of_the_hub_that_sglang_would_not_get_is_refused():
    with pytest.raises(errors.ConfigError, match=r"--revision .* give its directory as --model"):
        made("--revision", "v1.1")


def test_an_unknown_flag_is_named():
    with pytest.raises(errors.ConfigError, match="SGLang: unrecognized arguments: --tp-sizes"):
        made("--tp-sizes-", "5")


def test_sglangs_own_errors_are_passed_on():
    with pytest.raises(errors.ConfigError, match="SGLang: tp_size must be positive"):
        made("--tp-size", "0")


def test_kvbm_connector_is_sglangs_hierarchical_cache(monkeypatch):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "")
    tiers = ("hbm", "host_dram", "nvme_ssd")
    args = made(connector="kvbm", kvbm_storage_tiers=tiers, kvbm_nvme_path="/fast")

    assert args.enable_hierarchical_cache
    assert args.hicache_storage_backend == "file"
    assert os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == "/fast"
    assert made(connector="kvbm").hicache_storage_backend is None
    assert not made(kvbm_storage_tiers=tiers).enable_hierarchical_cache


@pytest.mark.parametrize(
    ("tiers", "says"), [(("tape",), "tape"), (("hbm", "host_dram", "nvme_ssd"), "--kvbm-nvme-path")]
)
def test_impossible_tiers_are_refused_by_name(tiers, says):
    with pytest.raises(errors.ConfigError, match=says):
        made(connector="kvbm", kvbm_storage_tiers=tiers)
