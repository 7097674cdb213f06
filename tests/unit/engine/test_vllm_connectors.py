"""From `--connector` to vLLM's configuration."""

import socket

import pytest

from dynamo.base import errors
from dynamo.engine.adapters import settings
from dynamo.engine.adapters.vllm import connectors


@pytest.mark.parametrize("names", [["none"], ["null"], []])
def test_without_a_connector_there_is_no_transfer_configuration(names):
    assert connectors.transfer_config(names, "e") is None


def test_one_connector_is_configured_alone():
    assert connectors.transfer_config(["nixl"], "e") == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "engine_id": "e",
        "kv_load_failure_policy": "fail",
    }


def test_several_connectors_keep_their_order():
    fields = connectors.transfer_config(["lmcache", "nixl", "ExampleConnector"], "e")

    assert fields["kv_connector"] == "MultiConnector"
    asked = fields["kv_connector_extra_config"]["connectors"]
    assert [one["kv_connector"] for one in asked] == [
        "LMCacheConnectorV1", "NixlConnector", "ExampleConnector",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["kvbm"], "--connector kvbm: expected one of nixl, lmcache, none, null"),
        (["nixl", "none"], "--connector nixl,none: expected none alone"),
    ],
)
def test_an_unknown_connector_name_is_refused(names, says):
    with pytest.raises(errors.ConfigError, match=says):
        connectors.transfer_config(names, "e")


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["nixl"], True), (["ExampleConnector", "nixl"], True), (["lmcache"], False)],
)
def test_only_nixl_can_export_prompts(names, expected):
    fields = connectors.transfer_config(names, "e")
    extra = fields.get("kv_connector_extra_config", {})

    assert connectors.can_export(fields["kv_connector"], extra) is expected


def test_a_users_side_channel_is_kept():
    chosen = connectors.side_channel({"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1"}, 7)

    assert chosen["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "7"
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" not in chosen


def test_the_default_side_channel_is_on_loopback():
    chosen = connectors.side_channel({"UCX_NET_DEVICES": "mlx5_0:1"}, 7)

    assert connectors.side_channel({}, 7) == {
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "7",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "UCX_NET_DEVICES": "lo",
        "DYN_VLLM_NIXL_PAUSE_US": "1000",
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
    }
    assert "UCX_NET_DEVICES" not in chosen


def test_found_ports_are_free_and_outside_the_systems_range():
    first = settings.find_free_ports(3)

    assert first in settings.PORT_RANGE
    for port in range(first, first + 3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_ports_in_use_are_not_free(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(settings, "PORT_RANGE", range(port, port + 2))

        with pytest.raises(errors.ConfigError, match="no 1 consecutive free ports"):
            settings.find_free_ports(1)
