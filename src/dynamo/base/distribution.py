"""The installed distribution `dynamo-serving`: its version, and its extras, the optional parts that need more packages.

A module of an extra is imported only when its part is used, so a plain installation neither needs its packages nor
waits for their import. In a checkout of the repository an extra is installed by make, elsewhere by pip.
"""

import importlib
import importlib.metadata
import pathlib
from types import ModuleType

from dynamo.base import errors

NAME = "dynamo-serving"  # on the Python package index
_ROOT = pathlib.Path(__file__).parents[3]  # of the repository, if this file lies in a checkout


def version() -> str:
    return importlib.metadata.version(NAME)


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra: make's in a checkout, pip's elsewhere."""
    if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "src" / "dynamo").is_dir():
        return f"make setup EXTRAS={extra}"
    return f"pip install '{NAME}[{extra}]'"


def load_extra(module: str, *, feature: str, extra: str) -> ModuleType:
    """Import and return a module that comes with an extra, or needs its packages.

    Raises ConfigError, with the command that installs the extra, if one of its packages is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("dynamo"):
            raise  # a mistake in this code, not a missing package
        raise errors.ConfigError(
            f"{feature} needs {error.name}, which is not installed: {install_command(extra)}"
        ) from error
