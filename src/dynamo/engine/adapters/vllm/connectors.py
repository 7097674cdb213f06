"""Which of vLLM's connectors move KV blocks between workers, from `--connector`.

The names are short for vLLM's classes; a class that we have no short name for is taken as it is written. Several are
asked in their order (vLLM's MultiConnector). A load that fails fails its request: `remote` then asks again without, so
that the worker hears which engine not to trust; vLLM by itself would compute the prompt and tell nobody.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.base import errors

NIXL = "NixlConnector"
_CLASSES = {"nixl": NIXL, "lmcache": "LMCacheConnectorV1"}
_NONE = ("none", "null")
_HOST, _PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
_DEVICES = "UCX_NET_DEVICES"


def transfer_config(names: Sequence[str], engine_id: str) -> dict[str, Any] | None:
    """The fields of vLLM's KVTransferConfig; None for no connector. Raises ConfigError."""
    classes = [_class(name) for name in names if name not in _NONE]
    if len(classes) != len(names) and classes:
        raise errors.ConfigError(
            f"--connector {','.join(names)}: expected none alone, or connectors"
        )
    if not classes:
        return None
    whole = {"engine_id": engine_id, "kv_load_failure_policy": "fail"}
    if len(classes) == 1:
        return _one(classes[0]) | whole
    several = {"connectors": [_one(each) for each in classes]}
    return _one("MultiConnector") | {"kv_connector_extra_config": several} | whole


def lends(connector: str | None, extra: Mapping[str, Any]) -> bool:
    """Do prompts go from engine to engine by it? By NIXL they do; others share stores, or have ways of their own."""
    among = [one.get("kv_connector") for one in extra.get("connectors", ())]
    return NIXL in (connector, *among)


def side_channel(environ: Mapping[str, str], free_port: int) -> dict[str, str]:
    """What is to be set in the environment, so that this engine's NIXL is asked at a port of its own.

    Unless the user names a host, only this one can ask; then NIXL's UCX need not listen to the network either.
    """
    wanted = {_PORT: str(free_port)}
    if _HOST not in environ:
        wanted |= {_HOST: "127.0.0.1", _DEVICES: "lo"}
    return {name: value for name, value in wanted.items() if name not in environ}


def _class(name: str) -> str:
    if "Connector" in name:
        return name
    try:
        return _CLASSES[name]
    except KeyError:
        known = ", ".join((*_CLASSES, *_NONE))
        raise errors.ConfigError(
            f"--connector {name}: expected one of {known}, or the name of one of vLLM's connectors"
        ) from None


def _one(name: str) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both"}
