"""What vLLM is told of KV events and connectors, by our flags and by its own."""

import contextlib
import importlib.util
import pathlib
import warnings

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
    pytest.skip("vllm and nixl are not installed here: make test-vllm", allow_module_level=True)

from dynamo.base import errors
from dynamo.engine.adapters.settings import VllmConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's, and those of what it imports
    from dynamo.engine.adapters.vllm import engine

pytestmark = pytest.mark.filterwarnings("ignore")
MODEL = pathlib.Path("/a/model")


def made(*flags, **settings):
    return engine.engine_args(MODEL, VllmConfig(engine_args=flags, **settings), "m")


def test_nixl_is_the_default_connector_if_installed():
    assert made().kv_transfer_config.kv_connector == "NixlConnector"
    assert made(connector=("none",)).kv_transfer_config is None


def test_every_engine_has_a_unique_id():
    assert made().kv_transfer_config.engine_id != made().kv_transfer_config.engine_id


def test_a_users_kv_transfer_config_is_kept():
    given = '{"kv_connector": "ExampleConnector", "kv_role": "kv_producer", "engine_id": "mine"}'

    config = made("--kv-transfer-config", given).kv_transfer_config

    assert (config.kv_connector, config.kv_role, config.engine_id) == (
        "ExampleConnector", "kv_producer", "mine",
    )  # fmt: skip


def test_connector_and_kv_transfer_config_together_are_refused():
    with pytest.raises(
        errors.ConfigError, match="--connector and --kv-transfer-config say the same"
    ):
        made("--kv-transfer-config", "{}", connector=("nixl",))


def test_only_an_engine_with_nixl_transfers_blocks():
    assert engine.build(MODEL, VllmConfig(), "m").capabilities.kv_transfer is not None
    for names in (("none",), ("ExampleConnector",)):
        alone = engine.build(MODEL, VllmConfig(connector=names), "m")
        assert alone.capabilities.kv_transfer is None


def endpoints_of(args):
    with contextlib.ExitStack() as reservations:
        return engine.kv_event_endpoints(args, reservations)


def test_vllm_connects_to_our_kv_event_port():
    args = made()

    endpoints = endpoints_of(args)

    told = args.kv_events_config
    assert (told.enable_kv_cache_events, told.publisher) == (True, "zmq")
    assert (told.endpoint, told.replay_endpoint) == (endpoints.endpoint, endpoints.replay_endpoint)
    assert told.endpoint.startswith("tcp://127.0.0.1:")


def test_a_users_kv_events_config_is_kept():
    given = '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv", "endpoint": "tcp://*:20080"}'

    endpoints = endpoints_of(made("--kv-events-config", given))

    assert (endpoints.endpoint, endpoints.topic) == ("tcp://*:20080", "kv")


@pytest.mark.parametrize(
    "flags",
    [("--no-enable-prefix-caching",), ("--kv-events-config", '{"enable_kv_cache_events": false}')],
)
def test_without_prefix_caching_or_events_there_is_no_endpoint(flags):
    assert endpoints_of(made(*flags)) is None
