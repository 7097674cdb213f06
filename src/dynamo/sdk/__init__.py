"""Services as Python classes: a way to write commands, with the names of NVIDIA Dynamo's SDK of 0.3 (docs/sdk.md).

`from dynamo.sdk import service, endpoint, depends`: each name is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.sdk.declaration import api as api
    from dynamo.sdk.declaration import async_on_start as async_on_start
    from dynamo.sdk.declaration import depends as depends
    from dynamo.sdk.declaration import dynamo_context as dynamo_context
    from dynamo.sdk.declaration import dynamo_endpoint as dynamo_endpoint
    from dynamo.sdk.declaration import endpoint as endpoint
    from dynamo.sdk.declaration import on_shutdown as on_shutdown
    from dynamo.sdk.declaration import service as service
    from dynamo.sdk.settings import ServiceConfig as ServiceConfig

_MODULE_BY_NAME = {
    "ServiceConfig": "settings",
    "api": "declaration",
    "async_on_start": "declaration",
    "depends": "declaration",
    "dynamo_context": "declaration",
    "dynamo_endpoint": "declaration",
    "endpoint": "declaration",
    "on_shutdown": "declaration",
    "service": "declaration",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)
