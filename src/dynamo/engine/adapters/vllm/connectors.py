"""vLLM's KV connectors: which ones `--connector` selects, and the one place where KV transfer parameters become a dict.

The names are short for vLLM's classes; any other class is written as vLLM calls it. Several connectors are tried in
their order (vLLM's MultiConnector). A load that fails fails its request: `kv_transfer_engine` then submits it again
without parameters, so that the worker learns which engine failed; vLLM by itself would compute the prompt silently.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.base import errors
from dynamo.engine.adapters.vllm import plugin
from dynamo.protocols import kv_transfer

NIXL = "NixlConnector"
_CLASSES = {"nixl": NIXL, "lmcache": "LMCacheConnectorV1"}
_NONE = ("none", "null")
_HOST, _PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
_DEVICES = "UCX_NET_DEVICES"
NIXL_PAUSE_US = (
    1000  # between two looks of NIXL's progress thread: some 2 % of a core instead of all of it
)


def transfer_config(names: Sequence[str], engine_id: str) -> dict[str, Any] | None:
    """Return the fields of vLLM's KVTransferConfig; None for no connector. Raises ConfigError."""
    classes = [_class_of(name) for name in names if name not in _NONE]
    if len(classes) != len(names) and classes:
        raise errors.ConfigError(
            f"--connector {','.join(names)}: expected none alone, or connectors"
        )
    if not classes:
        return None
    common = {"engine_id": engine_id, "kv_load_failure_policy": "fail"}
    if len(classes) == 1:
        return _connector(classes[0]) | common
    several = {"connectors": [_connector(each) for each in classes]}
    return _connector("MultiConnector") | {"kv_connector_extra_config": several} | common


def can_export(connector: str | None, extra: Mapping[str, Any]) -> bool:
    """Return whether engines pass prompts to each other by this connector.

    Only NIXL does: the others share stores, or have ways of their own.
    """
    names = [each.get("kv_connector") for each in extra.get("connectors", ())]
    return NIXL in (connector, *names)


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
    if fields is None:
        return None
    is_prefilled = fields.get("do_remote_prefill") is True
    return kv_transfer.KvTransferParams(do_remote_prefill=is_prefilled, connector=fields)


def _class_of(name: str) -> str:
    if "Connector" in name:
        return name
    try:
        return _CLASSES[name]
    except KeyError:
        names = ", ".join((*_CLASSES, *_NONE))
        raise errors.ConfigError(
            f"--connector {name}: expected one of {names}, or the name of one of vLLM's connectors"
        ) from None


def _connector(name: str) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both"}
