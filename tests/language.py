"""How plainly the code speaks: six shares of names and docstrings that a reader stumbles over.

    python tests/language.py                       # the shares, beside their aims
    python tests/language.py src/dynamo/router     # those of one package, with each place

`test_house` holds the shares. The aims are what the best Python packages of the field have: httpx, kopf, trio.
"""

import argparse
import ast
import collections
import dataclasses
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Callable

SRC = pathlib.Path(__file__).parents[1] / "src" / "dynamo"
PARTICIPLES = "told asked known wanted found made said given taken gone done left seen heard held kept sent got put"
PRONOUNS = (
    "one ones mine ours yours theirs other others what who whom whose it its they them this that these those thing "
    "things something somebody anybody nobody everybody rest whole beside"
)
VAGUE = frozenset([*PARTICIPLES.split(), *PRONOUNS.split()])
RIDDLE = re.compile(r"\b(who(m|se|ever|mever)?|somebody|nobody|everybody|anybody)\b", re.IGNORECASE)
OPENING = re.compile(
    r"(It|They|What|Who|Whom|Whose|Whether|From|Of|So|Such|Th(is|at|ese|ose)|Nobody|Somebody)\b"
)
SHORT_WORDS = 3
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """A parsed module, and the place of it that findings name."""

    def __init__(self, path: pathlib.Path, root: pathlib.Path) -> None:
        self.place = str(path.relative_to(root))
        self.text = path.read_text()
        self.nodes = list(ast.walk(ast.parse(self.text)))
        self.functions = [node for node in self.nodes if isinstance(node, Function)]

    def at(self, node: ast.AST, what: str) -> str:
        """Return a finding: file, line, and the words that were found."""
        return f"{self.place}:{getattr(node, 'lineno', 1)}: {what}"


def vague_bindings(sources: list[Source]) -> tuple[list[str], int]:
    """Find arguments, variables and attributes whose name is a participle or a pronoun; of all bindings."""
    findings, num_bindings = [], 0
    for source in sources:
        for node in source.nodes:
            name = _bound_name(node)
            num_bindings += name is not None
            if name is not None and name.strip("_").lower() in VAGUE:
                findings.append(source.at(node, name))
    return findings, num_bindings


def _bound_name(node: ast.AST) -> str | None:
    match node:
        case ast.arg(arg=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case _:
            return None


def riddle_words(sources: list[Source]) -> tuple[list[str], int]:
    """Find `who`, `nobody` and their kin in docstrings and comments; of all lines."""
    findings = []
    for source in sources:
        documented = (ast.Module, ast.ClassDef, *Function.__args__)
        for node in source.nodes:
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            findings += [source.at(node, match[0]) for match in RIDDLE.finditer(text or "")]
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.COMMENT and RIDDLE.search(token.string):
                findings.append(f"{source.place}:{token.start[0]}: {token.string}")
    return findings, sum(source.text.count("\n") for source in sources)


def repeated_classes(sources: list[Source]) -> tuple[list[str], int]:
    """Find public classes whose name stands in several places; of all public classes."""
    places = collections.defaultdict(list)
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(source.at(node, node.name))
    findings = [place for found in places.values() if len(found) > 1 for place in found]
    return findings, sum(map(len, places.values()))


def short_docstrings(sources: list[Source]) -> tuple[list[str], int]:
    """Find docstrings of functions with three words or fewer; of all docstrings of functions."""
    return _docstrings(sources, lambda text: len(text.split()) <= SHORT_WORDS)


def pronoun_docstrings(sources: list[Source]) -> tuple[list[str], int]:
    """Find docstrings of functions that open with a pronoun or `Of`; of all docstrings of functions."""
    return _docstrings(sources, lambda text: OPENING.match(text) is not None)


def _docstrings(sources: list[Source], is_finding: Callable[[str], bool]) -> tuple[list[str], int]:
    findings, num_docstrings = [], 0
    for source in sources:
        for node in source.functions:
            text = ast.get_docstring(node)
            num_docstrings += bool(text)
            if text and is_finding(text):
                findings.append(source.at(node, f"{node.name}: {text.splitlines()[0]}"))
    return findings, num_docstrings


def once_used_helpers(sources: list[Source]) -> tuple[list[str], int]:
    """Find private functions that their module calls once; of all private functions."""
    findings, num_private = [], 0
    for source in sources:
        calls = collections.Counter(
            node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            for node in source.nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
        )
        for node in source.functions:
            if node.name.startswith("_") and not node.name.startswith("__"):
                num_private += 1
                if calls[node.name] == 1:
                    findings.append(source.at(node, node.name))
    return findings, num_private


@dataclasses.dataclass(frozen=True)
class Measure:
    """One share: findings in so many of their kind, and the most that we want."""

    find: Callable[[list[Source]], tuple[list[str], int]]
    per: int
    aim: float


MEASURES = {
    "vague bindings, %": Measure(vague_bindings, 100, 0.6),
    "riddle words, per 1,000 lines": Measure(riddle_words, 1000, 0.8),
    "repeated class names, %": Measure(repeated_classes, 100, 3),
    "short docstrings, %": Measure(short_docstrings, 100, 2),
    "pronoun docstrings, %": Measure(pronoun_docstrings, 100, 1),
    "once-used helpers, %": Measure(once_used_helpers, 100, 45),
}


def read(root: pathlib.Path) -> list[Source]:
    """Parse all modules below a directory, in the order of their paths."""
    return [Source(path, root) for path in sorted(root.rglob("*.py"))]


def share(measure: Measure, sources: list[Source]) -> tuple[float, list[str]]:
    """Return a measure's share, and each finding with its place."""
    findings, base = measure.find(sources)
    return measure.per * len(findings) / max(1, base), findings


def main() -> None:
    """Print the shares of a directory; of one below `src/dynamo` also the findings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("root", type=pathlib.Path, nargs="?", default=SRC)
    root = parser.parse_args().root
    sources = read(root)
    for name, measure in MEASURES.items():
        figure, findings = share(measure, sources)
        sys.stdout.write(f"{name:30} {figure:6.2f}   (aim: {measure.aim})\n")
        if root != SRC:
            sys.stdout.writelines(f"    {finding}\n" for finding in findings)


if __name__ == "__main__":
    main()
