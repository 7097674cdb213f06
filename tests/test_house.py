"""The house rules that no linter knows.

Each failure names the file and the rule. Budgets are in pyproject.toml; the commit that moves one has the reason.
"""

import ast
import pathlib
import re
import tomllib

import pytest

import deciders
import language

SRC = pathlib.Path(__file__).parents[1] / "src" / "dynamo"
FILES = sorted(SRC.rglob("*.py"))
HOUSE = tomllib.loads((SRC.parents[1] / "pyproject.toml").read_text())["tool"]["house"]
BUDGET: dict[str, int] = HOUSE["lines"]  # the most lines of each package; of the whole, their sum
# The most that each measure of `language` may show. A limit only falls, to its aim in `language.MEASURES`.
LANGUAGE = {
    "vague bindings, %": 0.6,
    "riddle words, per 1,000 lines": 0.8,
    "repeated class names, %": 3,
    "short docstrings, %": 2,
    "pronoun docstrings, %": 1,
    "once-used helpers, %": 45,
}
LARGE: dict[str, int] = {}  # file -> lines it may keep; entries only shrink
FACES: set[str] = {  # the __init__ files that may export names: the public face, and nothing else
    "llm/__init__.py",  # `from dynamo.llm import register_model`, likewise
    "runtime/__init__.py",  # `from dynamo.runtime import DistributedRuntime`, as in Dynamo's bindings; lazily
    "sdk/__init__.py",  # `from dynamo.sdk import service`, as in Dynamo's SDK of 0.3
}
NAMELESS = re.compile(r"(core_)?utils?|help\w+|common|misc|manager")


@pytest.fixture(scope="module")
def sources():
    return language.read(SRC)


def package(path: pathlib.Path) -> str:
    """Return the package of a file, or `modules` for a file beside the packages."""
    first, *deeper = path.relative_to(SRC).parts
    return first if deeper else "modules"


def test_every_line_counts_in_one_budget():
    assert {package(path) for path in FILES} == BUDGET.keys()


@pytest.mark.parametrize("name", BUDGET)
def test_package_stays_in_budget(name):
    lines = sum(len(f.read_text().splitlines()) for f in FILES if package(f) == name)

    assert lines <= BUDGET[name]


def test_number_of_files_stays_in_budget():
    assert len(FILES) <= HOUSE["most_files"]


@pytest.mark.parametrize("name", language.MEASURES)
def test_language_stays_within_its_limit(name, sources):
    figure, findings = language.share(language.MEASURES[name], sources)

    assert figure <= LANGUAGE[name], (
        f"{name}: {len(findings)}; `python tests/language.py` lists them"
    )
    assert LANGUAGE[name] >= language.MEASURES[name].aim, (
        "the limit has passed its aim: leave it there"
    )


def test_names_of_tests_are_unique():
    names = [path.name for path in pathlib.Path(__file__).parent.rglob("test_*.py")]

    assert sorted(set(names)) == sorted(names)  # pytest cannot collect two of one name together


def test_make_runs_each_target_even_if_a_file_has_its_name():
    makefile = (pathlib.Path(__file__).parents[1] / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)

    assert not set(targets) - set(phony.split())
    assert "/tmp" not in makefile  # where another user's folder of the name may lie


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_file(path):
    rel, source = str(path.relative_to(SRC)), path.read_text()
    tree = ast.parse(source)

    assert ast.get_docstring(tree), f"{rel}: says nothing of itself"
    assert len(source.splitlines()) <= LARGE.get(rel, 500), f"{rel}: find the second thing in it"
    assert not NAMELESS.fullmatch(path.stem), f"{rel}: name what it does"
    if path.name == "__init__.py" and rel not in FACES:
        assert len(tree.body) == 1, f"{rel}: an __init__ is a map, not a door"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_across_packages_are_of_modules(path):
    rel = str(path.relative_to(SRC))
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("dynamo"):
            continue
        parts = node.module.split(".")[1:]
        if parts and parts[0] == package(path):
            continue
        names = [alias.name for alias in node.names]
        for name in names:  # a module, so that each use shows its origin
            target = SRC.joinpath(*parts, name)
            is_module = target.with_suffix(".py").exists() or target.is_dir()
            assert is_module, f"{rel}: imports the name {name} across packages"
        assert not any(x.startswith("_") for x in [*parts, *names]), (
            f"{rel}: imports what is private"
        )


@pytest.mark.parametrize("path", deciders.PATHS, ids=lambda p: str(p.relative_to(SRC)))
def test_deciders_do_no_io(path):
    assert deciders.acting_imports(path.read_text()) == []


TESTS = pathlib.Path(__file__).parent
REQUESTS = {"get", "post", "put", "delete", "request", "stream", "Client", "AsyncClient"}


def impatient_bound(call: ast.Call) -> ast.expr | None:
    """Return the node of a wait that is bounded by a number of seconds of its own, or by httpx's five."""
    name = ast.unparse(call.func)
    bounds = {one.arg: one.value for one in call.keywords}
    is_request = name.startswith("httpx.") and name.removeprefix("httpx.") in REQUESTS
    if is_request and "timeout" not in bounds and None not in bounds:
        return call
    found = [bounds[word] for word in ("timeout", "within_s") if word in bounds]
    if name.endswith((".kubectl", "requests.call")) and "timeout_s" in bounds:
        found.append(bounds["timeout_s"])
    if name == "asyncio.timeout" or name.endswith(".wait_for_instances"):
        found += call.args[:1]
    if name == "asyncio.wait_for" and len(call.args) == 2:
        found.append(call.args[1])
    return next(
        (one for one in found if isinstance(one, ast.Constant) and (one.value or 0) >= 1), None
    )


def test_tests_wait_with_patience():
    """A number of seconds is what an idle machine needs, and fails on a busy one: see `tests/waiting.py`."""
    found = []
    for path in TESTS.rglob("*.py"):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            bound = impatient_bound(node) if isinstance(node, ast.Call) else None
            if bound is not None and "# promised" not in lines[bound.lineno - 1]:
                found.append(f"{path.relative_to(TESTS)}:{bound.lineno}")

    assert not found, (
        "expected PATIENT_S, or a comment `# promised: ...` that says what holds within it"
    )
