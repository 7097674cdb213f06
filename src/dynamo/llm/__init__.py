"""The names under which users of NVIDIA Dynamo import its parts for engines, imported when they are first used."""

import importlib
from typing import Any

_MODULE_BY_NAME = dict.fromkeys(
    (
        "ModelInput",
        "ModelRuntimeConfig",
        "ModelType",
        "fetch_llm",
        "fetch_model",
        "register_llm",
        "register_model",
        "unregister_llm",
        "unregister_model",
    ),
    "dynamo.llm.models",
) | {
    "KvEventPublisher": "dynamo.llm.publishers",
    "WorkerMetricsPublisher": "dynamo.llm.publishers",
    "KvRouter": "dynamo.llm.routers",
    "KvRouterConfig": "dynamo.llm.routers",
    "RouterQueueLimitExceeded": "dynamo.llm.exceptions",
    "RouterMode": "dynamo.runtime.naming",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use: the connector for vLLM needs none of them."""
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
