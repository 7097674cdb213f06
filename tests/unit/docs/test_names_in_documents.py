"""The documents name modules, files and links that exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[3]
SRC = ROOT / "src" / "dynamo"
FOLDERS = ("docs", "examples", "src", "training")
DOCUMENTS = [
    path
    for path in [
        *ROOT.glob("*.md"),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
    ]
    if path.name != "CHANGELOG.md"  # tells of what was
]
PACKAGES = "|".join(sorted(path.parent.name for path in SRC.glob("*/__init__.py")))
MODULE = re.compile(rf"`(?:python -m )?(?:dynamo\.)?((?:{PACKAGES})(?:\.\w+)+)")
FILE = re.compile(r"(?<![\w./-])((?:src|tests|benchmarks|training|deploy|\.ci)/[\w./*-]*\w)")
TEST = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
SECTION_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
NOT_MODULES = {"backend.generate", "frontend.env"}  # an endpoint, and a file of settings


def is_module(name):
    """Return whether a dotted name, from below `dynamo`, is a module or a name that stands in one."""
    parts = name.split(".")
    for num_parts in range(len(parts), 0, -1):
        path = SRC.joinpath(*parts[:num_parts])
        attributes = parts[num_parts:]
        if path.is_dir():
            return not attributes
        if path.with_suffix(".py").is_file():
            text = path.with_suffix(".py").read_text()
            return all(re.search(rf"\b{attribute}\b", text) for attribute in attributes)
    return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_names_modules_and_files_that_exist(document):
    text = document.read_text()
    modules = set(MODULE.findall(text)) - NOT_MODULES
    files = set(FILE.findall(text))

    absent_tests = {
        (path, name)
        for path, name in TEST.findall(text)
        if f"def {name}(" not in (ROOT / path).read_text()
    }

    assert not {name for name in modules if not is_module(name)}
    assert not {name for name in files if not list(ROOT.glob(name))}
    assert not absent_tests
    assert not {link for link in LINK.findall(text) if not (document.parent / link).exists()}


def anchors_of(document):
    """Return the names by which links reach the sections of a document, as GitHub makes them of headings."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    titles = [re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(text)]
    return {title.replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_sections_name_a_heading(document):
    links = SECTION_LINK.findall(document.read_text())

    absent = [
        f"{path}#{anchor}"
        for path, anchor in links
        if (target := document.parent / path if path else document).suffix == ".md"
        and anchor not in anchors_of(target)
    ]

    assert not absent


def test_each_decision_has_a_number_of_its_own():
    numbers = [path.name[:4] for path in (ROOT / "docs" / "decisions").glob("*.md")]

    assert sorted(set(numbers)) == sorted(numbers)
