"""Parts of ours that need more than the plain installation: loaded when they are asked for, and not before.

So who does not use them neither installs what they need nor waits for its import.
"""

import importlib
from types import ModuleType

from dynamo.base import errors


def load(module: str, *, what: str, extra: str) -> ModuleType:
    """The module of ours with this name. Raises ConfigError if `what` needs what is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("dynamo"):
            raise  # a mistake of ours
        raise errors.ConfigError(
            f"{what} needs {error.name}, which is not installed: pip install 'pydynamo[{extra}]'"
        ) from error
