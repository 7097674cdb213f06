"""vLLM's KV connectors: which ones `--connector` selects, and the one place where KV transfer parameters become a dict.

The names are short for vLLM's classes, kvbm for ours (`tier_connector`); any other class is written as vLLM calls it.
Several connectors are tried in their order (vLLM's MultiConnector), but NIXL before ours: blocks that a peer has
computed for this request wait to be read. A load that fails fails its request: `kv_transfer_engine` then submits it
again without parameters, so that the worker learns which engine failed; vLLM by itself would compute the prompt
silently. There is one such policy for all connectors, and with ours it is to compute: it has no engine to report.
"""  # decider

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynamo.base import errors
from dynamo.engine.adapters.vllm import plugin
from dynamo.protocols import kv_transfer

NIXL = "NixlConnector"
KVBM = "DynamoConnector"
KVBM_MODULE = "dynamo.llm.vllm_integration.connector"
LMCACHE = "LMCacheConnectorV1"
_SEVERAL = "MultiConnector"
_CLASSES = {"nixl": NIXL, "lmcache": LMCACHE, "kvbm": KVBM}
NONE, UNSET = "none", "null"  # `null` is what manifests write for an option that is not set
_HOST, _PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
_DEVICES = "UCX_NET_DEVICES"
# vLLM's flag with which all layers of attention keep every block, and the names of such layers and of their groups.
ONE_GROUP = "--disable-hybrid-kv-cache-manager"
_WHOLE_LAYERS = ("full_attention", "attention")
_WITH_BLOCKS = re.compile("full|sliding|chunked|^attention$", re.IGNORECASE)
# Of a finished request's parameters:
TIER_TOKENS = "kv_tier_tokens"  # loaded tokens by tier
TIER_READS = "kv_tier_reads"  # `tier_report.TierRead` of each copy that a traced request waited for
# Between two looks of NIXL's progress thread: 0.2 % of a core instead of all of it; its events wake it at once.
NIXL_PAUSE_US = 10_000


def transfer_config(
    names: Sequence[str], engine_id: str, tier_options: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the fields of vLLM's KVTransferConfig; None for no connector. Raises ConfigError.

    `tier_options` are those of kvbm (`tier_setup.TierConfig`), by name.
    """
    classes = [_class_of(name) for name in names if name != NONE]
    if len(classes) != len(names) and classes:
        raise errors.ConfigError(
            f"--connector {','.join(names)}: expected none alone, or connectors"
        )
    if not classes:
        return None
    policy = "recompute" if KVBM in classes else "fail"
    common = {"engine_id": engine_id, "kv_load_failure_policy": policy}
    classes.sort(key=lambda name: name == KVBM)
    fields = [_connector(each, tier_options or {}) for each in classes]
    if len(fields) == 1:
        return fields[0] | common
    several = {"kv_connector_extra_config": {"connectors": fields}}
    return _connector(_SEVERAL, {}) | several | common


def can_export(transfer: Any) -> bool:
    """Return whether engines with this KVTransferConfig, or None, pass prompts to each other.

    Only NIXL does: the others share stores, or have ways of their own.
    """
    return NIXL in _all_connectors(transfer)


def has_tiers(transfer: Any) -> bool:
    """Return whether our connector keeps blocks in tiers below vLLM's memory."""
    return KVBM in _all_connectors(transfer)


def keeps_loads_apart(transfer: Any) -> bool:
    """Return whether no connector has blocks of an adapter that another one with its name would find.

    NIXL keeps none, and ours name them by the number of the load (`tier_scheduler`).
    """
    return {NIXL, KVBM, _SEVERAL}.issuperset(_all_connectors(transfer))


def check_device(transfer: Any, device_type: str) -> None:
    """Raise ConfigError for a connector that does not work on vLLM's type of device.

    LMCache starts on a CPU, but has no connector for it: each request waits 3 s for an answer, and nothing is cached.
    """
    if device_type == "cpu" and LMCACHE in _all_connectors(transfer):
        raise errors.ConfigError(
            f"--connector lmcache ({LMCACHE}): expected a GPU, because LMCache has no connector for a CPU and would"
            " delay each request by 3 s; --connector kvbm keeps blocks in host memory here"
        )


def check_layers(vllm_config: Any) -> None:
    """Raise ConfigError for a model whose configuration says that some layers do not keep every block."""
    model = vllm_config.model_config
    layer_kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    local = layer_kinds.difference(_WHOLE_LAYERS)
    is_unified = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    if local and not (is_unified and _can_unify(local)):
        raise errors.ConfigError(explain_groups(model.model, layer_kinds))


def explain_groups(model: str, kinds: Iterable[str]) -> str:
    """Return why a model with such layers, or groups in vLLM's cache, has no tiers, and how to serve it."""
    names = sorted(set(kinds))
    with_flag = f"add {ONE_GROUP}, with which they do, or " if _can_unify(names) else ""
    return (
        f"--connector kvbm (DynamoConnector): expected a model whose layers all keep every KV block, but {model} has"
        f" {', '.join(names)}; {with_flag}serve it without tiers: --connector none, or no --kv-transfer-config"
    )


def _can_unify(kinds: Iterable[str]) -> bool:
    """Return whether all layers are of attention, though some only over a window."""
    return all(map(_WITH_BLOCKS.search, kinds))


def find_tier_report(stats: Any) -> Any:
    """Return the report of our connector in vLLM's scheduler statistics, as plain values; None if there is none."""
    payload = getattr(stats, "kv_connector_stats", None) or {}
    payload = payload.get(KVBM, payload)  # under its name beside others
    payload = payload.get("data", payload)
    return payload if "tiers" in payload else None


def side_channel(environ: Mapping[str, str], free_port: int) -> dict[str, str]:
    """Return the environment variables that give this engine's NIXL a port of its own, and a quiet thread.

    Unless the user names a host, only this host can reach it; then NIXL's UCX need not listen to the network either.
    """
    variables = {
        _PORT: str(free_port),
        plugin.NIXL_PAUSE: str(NIXL_PAUSE_US),
        "UCX_RCACHE_MAX_UNRELEASED": "1024",  # vLLM's, which is too late if NIXL has been imported
    }
    if _HOST not in environ:
        variables |= {_HOST: "127.0.0.1", _DEVICES: "lo"}
    return {name: value for name, value in variables.items() if name not in environ}


def encode_params(params: kv_transfer.KvTransferParams | None) -> dict[str, Any] | None:
    """Return the parameters of a request as vLLM's connector reads them."""
    if params is None:
        return None
    if params.connector is not None:
        return params.connector
    if params.do_remote_decode:
        return {"do_remote_decode": True}
    return {"do_remote_prefill": False, "do_remote_decode": False}


def decode_params(fields: dict[str, Any] | None) -> kv_transfer.KvTransferParams | None:
    """Return the parameters that vLLM's connector gave with an output."""
    if fields is None or not fields.keys() - {TIER_TOKENS, TIER_READS}:
        return None
    is_prefilled = fields.get("do_remote_prefill") is True
    return kv_transfer.KvTransferParams(do_remote_prefill=is_prefilled, connector=fields)


def _class_of(name: str) -> str:
    if "Connector" in name:
        return name
    try:
        return _CLASSES[name]
    except KeyError:
        names = ", ".join((*_CLASSES, NONE, f"{UNSET} alone"))
        raise errors.ConfigError(
            f"--connector {name}: expected one of {names}, or the name of one of vLLM's connectors"
        ) from None


def _all_connectors(transfer: Any) -> tuple[str | None, ...]:
    if transfer is None:
        return ()
    children = transfer.kv_connector_extra_config.get("connectors", ())
    return transfer.kv_connector, *(each.get("kv_connector") for each in children)


def _connector(name: str, tier_options: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"kv_connector": name, "kv_role": "kv_both"}
    if name == KVBM:
        fields |= {
            "kv_connector_module_path": KVBM_MODULE,
            "kv_connector_extra_config": dict(tier_options),
        }
    return fields
