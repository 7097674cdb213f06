"""A graph of services: found from `module:Class` or `file.py:Class`, by links or else by what depends on what."""

import importlib
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from dynamo.base import errors
from dynamo.sdk import declaration

_TARGET = re.compile(r"(?P<module>[\w./-]+|.+\.py):(?P<name>[A-Za-z_]\w*)")

_ERRORS_OF_VALUES = (TypeError, ValueError, LookupError, ArithmeticError, AssertionError)
_ERRORS_OF_MODULES = (ImportError, NameError, AttributeError, OSError, RuntimeError)


def is_target(text: str) -> bool:
    """Return whether a word names a graph, not a model."""
    return _TARGET.fullmatch(text) is not None


def load(target: str, directory: Path) -> list[declaration.DeclaredService]:
    """Import a graph and return its services, the one that was named first. Raises ConfigError."""
    match = _TARGET.fullmatch(target)
    if match is None:
        got = repr(target) if target else "nothing"
        raise errors.ConfigError(
            f"expected a graph, module:Class such as graphs.agg:Frontend, got {got}"
        )
    sys.path.insert(0, str(directory))
    module_name = _module_name(match["module"], directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            raise errors.ConfigError(
                f"{target}: importing {module_name} in {directory} failed: {error}"
            ) from error
        raise errors.ConfigError(
            f"{target} is read as a graph, module:Class, but there is no module {module_name} in {directory}"
            " (--working-dir names another directory); a model is a directory or a hub name, without a tag"
        ) from error
    except (SyntaxError, *_ERRORS_OF_MODULES, *_ERRORS_OF_VALUES) as error:
        raise errors.ConfigError(
            f"{target}: importing {module_name} failed: {_describe(error)}"
        ) from error
    root = getattr(module, match["name"], None)
    if root is None:
        raise errors.ConfigError(f"{module.__file__}: has no class {match['name']}")
    specs = services(declaration.spec_of(root))
    for spec in specs:
        spec.check()
    return specs


def _describe(error: Exception) -> str:
    """Return an error of the graph's module, with its kind and the line that raised it."""
    if isinstance(error, SyntaxError):
        return str(error)  # which names its line
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if not frame.filename.startswith("<frozen ")][-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def _module_name(text: str, directory: Path) -> str:
    """Return the module that a word or a path names. Raises ConfigError for a file outside the directory."""
    if "/" not in text and not text.endswith(".py"):
        return text
    # an absolute path replaces the directory
    path = (directory / text.removesuffix(".py")).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise errors.ConfigError(
            f"{text}: expected a file in {directory} (--working-dir names another directory)"
        )
    return ".".join(path.relative_to(directory.resolve()).parts)


def services(root: declaration.DeclaredService) -> list[declaration.DeclaredService]:
    """Return the services of a graph: those that links reach, and without any link what they depend on."""
    specs, waiting = [root], [root]
    has_links = bool(root.links)
    while waiting:
        spec = waiting.pop(0)
        for cls in spec.links if has_links else spec.dependencies.values():
            neighbour = declaration.spec_of(cls)
            if neighbour not in specs:
                specs.append(neighbour)
                waiting.append(neighbour)
    return specs


def find(specs: Sequence[declaration.DeclaredService], name: str) -> declaration.DeclaredService:
    """Return the service of this name. Raises ConfigError."""
    for spec in specs:
        if spec.name == name:
            return spec
    names = ", ".join(spec.name for spec in specs)
    raise errors.ConfigError(f"--service-name {name}: expected one of {names}")
