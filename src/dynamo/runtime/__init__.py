"""The runtime: discovery, request plane, event plane, and small HTTP servers; it knows no language model.

This module is the public face for services of users, with the names of NVIDIA Dynamo's Python bindings:
`from dynamo.runtime import DistributedRuntime, dynamo_worker`. They are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.runtime.component import DistributedRuntime as DistributedRuntime
    from dynamo.runtime.decorators import dynamo_endpoint as dynamo_endpoint
    from dynamo.runtime.decorators import dynamo_worker as dynamo_worker
    from dynamo.runtime.naming import Client as Client
    from dynamo.runtime.naming import Component as Component
    from dynamo.runtime.naming import Endpoint as Endpoint
    from dynamo.runtime.naming import Namespace as Namespace
    from dynamo.runtime.request_context import Context as Context

_MODULE_BY_NAME = {
    "DistributedRuntime": "component",
    "Client": "naming",
    "Component": "naming",
    "Context": "request_context",
    "Endpoint": "naming",
    "Namespace": "naming",
    "dynamo_endpoint": "decorators",
    "dynamo_worker": "decorators",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that importing a part of the runtime does not import all of it."""
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)
