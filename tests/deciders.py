"""The modules that decide without I/O: each says so by `# decider` behind its docstring, and imports nothing that acts.

`test_house` holds the imports, and `coverage_floors` that tests reach the lines.
"""

import ast
import pathlib
import re

SRC = pathlib.Path(__file__).parents[1] / "src" / "dynamo"
ACTING = re.compile(
    r"(asyncio|socket|threading|time|random|os|logging|torch|dynamo\.observability"
    r"|dynamo\.runtime\.(backends|client|component|discovery|events|requests))(\.|$)"
)


def is_decider(source: str) -> bool:
    """Return whether a module marks itself, on the line where its docstring ends."""
    end = ast.parse(source).body[0].end_lineno
    return source.splitlines()[end - 1].endswith('"""  # decider')


def acting_imports(source: str) -> list[str]:
    """Return what a module imports, anywhere in it, of the modules that act."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return list(filter(ACTING.match, names))


PATHS = [path for path in sorted(SRC.rglob("*.py")) if is_decider(path.read_text())]
