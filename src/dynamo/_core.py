"""The names that services import from the module of NVIDIA Dynamo's bindings, such as `Context`: those of `_PUBLIC`."""

import importlib
from typing import Any

_PUBLIC = ("dynamo.runtime", "dynamo.llm", "dynamo.llm.exceptions")


def __getattr__(name: str) -> Any:
    """Import a name from the public module that has it, on its first use."""
    for module in _PUBLIC if not name.startswith("_") else ():
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError:
            continue
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
