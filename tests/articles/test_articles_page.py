"""docs/articles.md: each row has a known state, and one that works names the tests that hold it."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "articles.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| ([\w ]+) \| (.+) \|$", PAGE, re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
STATES = {"works", "environment", "another name", "refused", "state"}


@functools.cache
def names_in(path):
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_row_has_three_columns_and_a_known_state():
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]

    assert len(ROWS) == len(lines) > 60
    assert {state for _, state, _ in ROWS} <= STATES


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_row_that_works_or_refuses_names_existing_tests(row):
    _, state, held = row
    named = TEST.findall(held)

    assert named or state not in ("works", "refused")
    for path, name in named:
        assert name in names_in(path), f"{path} has no test {name}"
