"""The tier connector beside real vLLM, without an engine: its interface, its settings, and what it refuses."""

import abc
import importlib.util
import os
import types
import warnings

import msgspec
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

from dynamo.base import errors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's, and those of what it imports
    from vllm.distributed.kv_transfer.kv_connector import factory
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils

    from dynamo.engine.adapters.vllm import tier_connector
    from dynamo.llm.vllm_integration import connector

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
REPORT = {"tiers": [{"tier": "host", "used_blocks": 3}], "host_hit_rate": 0.5, "disk_hit_rate": 0.0,
          "counts": {"matched_tokens": 64}}  # fmt: skip


class Changed(abc.ABC):
    """Another release's interface."""

    def renamed(self, request, more):
        return request, more

    @abc.abstractmethod
    def demanded(self): ...


def test_interface_of_this_vllm_is_the_known_one():
    used, ours = tier_connector._USED_METHODS, dir(connector.DynamoConnector)

    assert tier_connector.find_interface_faults(used, ours) == []


def test_differences_of_an_interface_are_named():
    used = {Changed: {"renamed": ("request",), "missing": ()}}

    assert tier_connector.find_interface_faults(used, ["renamed"]) == [
        "Changed.renamed takes (request, more), expected (request)",
        "Changed has no missing",
        "Changed demands demanded, which is not known here",
    ]


def test_settings_come_from_the_environment_and_over_it_from_the_extra_config(monkeypatch):
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "4")
    monkeypatch.setenv("DYN_KVBM_DISK_CACHE_GB", "20")
    settings = tier_connector.read_settings(
        {
            "kvbm_cpu_cache_gb": 1,
            "kvbm_storage_tiers": ["hbm", "host_dram"],
            "kvbm_disk_cache_override_num_blocks": "7",
            "other": 1,
        }
    )

    assert (settings.kvbm_cpu_cache_gb, settings.kvbm_disk_cache_gb) == ("1", "20")
    assert settings.kvbm_disk_cache_override_num_blocks == 7
    assert settings.storage_tiers == ("host",)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"kvbm_size": 1}, "unknown option 'kvbm_size'"),
        ({"kvbm_storage_tiers": ["hbm"]}, "expected host_dram"),
        ({"kvbm_offload_ratio": 0.5}, "expected 1 with vLLM"),
        ({"kvbm_host_offload_filter": "often"}, "--kvbm-host-offload-filter.*presence"),
        ({"kvbm_sharing_workers": 0}, "--kvbm-sharing-workers.*1"),
    ],
)
def test_settings_that_cannot_be_are_refused(extra, says):
    with pytest.raises(errors.ConfigError, match=says):
        tier_connector.read_settings(extra)


def test_model_of_a_hub_is_another_one_after_it_was_changed(tmp_path):
    cached, names = tmp_path / "models--someone--small", []
    for commit in ("a1", "b2"):
        snapshot = cached / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(commit)
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / "main").write_text(commit)
        names.append(tier_connector.identify_model("someone/small", None, str(tmp_path)))
        assert names[-1] == tier_connector.identify_model(str(snapshot), None, None)

    assert names[0] != names[1]
    assert tier_connector.identify_model("other", "v1", str(tmp_path)) == "other@v1"


class FullAttentionSpec: ...


class SlidingWindowSpec: ...


class MambaSpec: ...


@pytest.mark.parametrize(
    ("kinds", "changes", "says"),
    [
        ([FullAttentionSpec], {}, None),
        (
            [FullAttentionSpec, MambaSpec],
            {},
            "m has FullAttentionSpec, MambaSpec; serve it without",
        ),
        ([FullAttentionSpec, SlidingWindowSpec], {}, "add --disable-hybrid-kv-cache-manager"),
        ([MambaSpec], {}, "all keep every KV block.*--connector none"),
        ([FullAttentionSpec], {"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ([FullAttentionSpec], {"decode_context_parallel_size": 2}, "context-parallel-size"),
    ],
)
def test_models_without_tiers_are_refused_by_name(kinds, changes, says):
    fields = {
        "enable_prefix_caching": True,
        "decode_context_parallel_size": 1,
        "world_size": 1,
        "model": "m",
    }
    part = types.SimpleNamespace(**(fields | changes))
    vllm_config = types.SimpleNamespace(parallel_config=part, cache_config=part, model_config=part)
    groups = [types.SimpleNamespace(kv_cache_spec=kind()) for kind in kinds]
    check = tier_connector.check_support
    cache_config = types.SimpleNamespace(kv_cache_groups=groups)
    if says is None:
        check(vllm_config, cache_config)
    else:
        with pytest.raises(errors.ConfigError, match=says):
            check(vllm_config, cache_config)


def test_report_survives_vllms_connector_of_several():
    several = multi_connector.MultiKVConnectorStats()
    several["DynamoConnector"] = tier_connector.TierStats(data=REPORT)
    # 0.28 has no `to_dict`, and sends the object itself
    data = several.to_dict() if hasattr(several, "to_dict") else several.data
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(data))
    joined = multi_connector.MultiConnector.build_kv_connector_stats(sent)

    assert factory.KVConnectorFactory.get_connector_class_by_name("DynamoConnector") is (
        connector.DynamoConnector
    )
    assert joined.reduce() == {
        "DynamoConnector": {
            "host_blocks": 3, "host_hit_rate": 0.5, "disk_hit_rate": 0.0, "loaded_tokens": 64,
        }
    }  # fmt: skip


def test_blocks_have_the_same_names_in_every_process(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "x")  # so that what is set below is taken back
    monkeypatch.delenv("PYTHONHASHSEED")
    tier_connector.name_blocks_alike("sha256", os.environ, is_lasting=True)
    seeds = []
    for _ in range(2):  # as two processes do
        kv_cache_utils.init_none_hash(hashing.sha256)
        seeds.append(kv_cache_utils.NONE_HASH)

    assert seeds[0] == seeds[1]


@pytest.mark.parametrize(
    ("environ", "is_lasting", "num_warnings"),
    [({}, True, 1), ({}, False, 0), ({"PYTHONHASHSEED": "7"}, True, 0)],
)
def test_names_that_differ_in_each_process_are_warned_of(
    monkeypatch, environ, is_lasting, num_warnings
):
    warned = []
    monkeypatch.setattr(tier_connector._logger, "warning", lambda *words: warned.append(words))
    given = dict(environ)
    tier_connector.name_blocks_alike("xxhash", environ, is_lasting=is_lasting)

    assert len(warned) == num_warnings
    assert (
        environ == given
    )  # a known seed would let a tenant make blocks with the names of another's


def test_latest_report_counts():
    older, newer = tier_connector.TierStats(data=REPORT), tier_connector.TierStats(data={"x": 1})

    assert older.aggregate(newer) is newer
    assert newer.aggregate(tier_connector.TierStats(data={})) is newer
    newer.reset()
    assert newer.is_empty()
