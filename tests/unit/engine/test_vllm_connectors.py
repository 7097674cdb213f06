"""From `--connector` to vLLM's configuration."""

import types

import pytest

from dynamo.base import errors
from dynamo.engine.adapters.vllm import connectors


@pytest.mark.parametrize("names", [["none"], []])
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


def test_kvbm_is_our_connector_with_its_options_and_computes_what_was_not_loaded():
    fields = connectors.transfer_config(["kvbm"], "e", {"kvbm_cpu_cache_gb": "1"})

    assert fields == {
        "kv_connector": "DynamoConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "dynamo.llm.vllm_integration.connector",
        "kv_connector_extra_config": {"kvbm_cpu_cache_gb": "1"},
        "engine_id": "e",
        "kv_load_failure_policy": "recompute",
    }


def test_kvbm_comes_after_nixl_whose_blocks_wait_to_be_read():
    fields = connectors.transfer_config(["kvbm", "nixl"], "e")
    extra = fields["kv_connector_extra_config"]

    assert [each["kv_connector"] for each in extra["connectors"]] == [
        "NixlConnector",
        "DynamoConnector",
    ]
    assert fields["kv_load_failure_policy"] == "recompute"
    assert connectors.can_export(types.SimpleNamespace(**fields))
    assert connectors.has_tiers(types.SimpleNamespace(**fields))


def test_tier_report_is_found_in_the_statistics_of_one_connector_and_of_several():
    report = {"tiers": []}
    alone = types.SimpleNamespace(kv_connector_stats=report)
    older = types.SimpleNamespace(kv_connector_stats={"DynamoConnector": {"data": report}})

    assert connectors.find_tier_report(alone) == report
    assert connectors.find_tier_report(older) == report
    assert connectors.find_tier_report(types.SimpleNamespace()) is None
    nixl = types.SimpleNamespace(kv_connector_stats={"NixlConnector": {"num": 1}})
    assert connectors.find_tier_report(nixl) is None


def test_parameters_of_tiers_alone_are_no_transfer():
    assert connectors.decode_params({"kv_tier_tokens": {"host": 32}}) is None


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["tape"], "--connector tape: expected one of nixl, lmcache, kvbm, none, null alone"),
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
    fields = {"kv_connector_extra_config": {}} | connectors.transfer_config(names, "e")

    assert connectors.can_export(types.SimpleNamespace(**fields)) is expected
    assert not connectors.can_export(None)


@pytest.mark.parametrize("names", [["lmcache"], ["nixl", "lmcache"]])
def test_lmcache_is_refused_on_a_cpu(names):
    fields = {"kv_connector_extra_config": {}} | connectors.transfer_config(names, "e")
    transfer = types.SimpleNamespace(**fields)
    connectors.check_device(transfer, "cuda")

    with pytest.raises(errors.ConfigError, match=r"expected a GPU.* --connector kvbm"):
        connectors.check_device(transfer, "cpu")


def test_other_connectors_are_accepted_on_a_cpu():
    fields = {"kv_connector_extra_config": {}} | connectors.transfer_config(["kvbm"], "e")

    connectors.check_device(types.SimpleNamespace(**fields), "cpu")
    connectors.check_device(None, "cpu")


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
        "DYN_VLLM_NIXL_PAUSE_US": "10000",
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
    }
    assert "UCX_NET_DEVICES" not in chosen


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@pytest.mark.parametrize(
    ("kinds", "is_unified", "says"),
    [
        (None, False, None),  # the configuration does not say it
        ([FULL, FULL], False, None),
        (
            [FULL, SLIDING],
            False,
            "m has full_attention, sliding_attention; add --disable-hybrid-kv",
        ),
        ([FULL, SLIDING], True, None),
        (
            [LINEAR, FULL],
            False,
            "m has full_attention, linear_attention; serve it without tiers: --con",
        ),
        (
            [LINEAR, FULL],
            True,
            "m has full_attention, linear_attention; serve it without tiers: --con",
        ),
    ],
)
def test_model_whose_layers_do_not_keep_every_block_is_refused_before_it_is_loaded(
    kinds, is_unified, says
):
    part = types.SimpleNamespace(
        model="m",
        hf_text_config=types.SimpleNamespace(layer_types=kinds),
        disable_hybrid_kv_cache_manager=is_unified,
    )
    config = types.SimpleNamespace(model_config=part, scheduler_config=part)
    if says is None:
        connectors.check_layers(config)
    else:
        with pytest.raises(errors.ConfigError, match=says):
            connectors.check_layers(config)


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["none"], True), (["kvbm"], True), (["kvbm", "nixl"], True), (["lmcache", "kvbm"], False)],
)
def test_stores_of_others_may_give_an_adapter_the_blocks_of_a_former_one(names, expected):
    fields = connectors.transfer_config(names, "e")
    transfer = (
        types.SimpleNamespace(**({"kv_connector_extra_config": {}} | fields)) if fields else None
    )

    assert connectors.keeps_loads_apart(transfer) is expected
