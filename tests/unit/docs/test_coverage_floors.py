"""What `make coverage` refuses."""

import pytest

import coverage_floors
import deciders


def report(**files):
    """A report in coverage's form; each file has a hundred lines, of which the given ones are missed."""
    return {
        "files": {
            f"{name}.py": {
                "summary": {"num_statements": 100, "covered_lines": 100 - len(missed)},
                "missing_lines": missed,
            }
            for name, missed in files.items()
        }
    }


def test_enough_lines_pass():
    assert coverage_floors.shortfalls(report(decider=[7], rest=[*range(10)]), {"decider.py"}) == []


def test_too_few_lines_fail():
    sentences = coverage_floors.shortfalls(report(decider=[], rest=[*range(20)]), {"decider.py"})

    assert sentences == ["all lines: expected 92.0 %, got 90.00 %"]


def test_a_decider_below_its_floor_names_its_lines():
    sentences = coverage_floors.shortfalls(report(decider=[3, 5], rest=[]), {"decider.py"})

    assert sentences == ["deciders: expected 99.0 %, got 98.00 %", "decider.py: lines 3, 5"]


def test_a_decider_that_no_test_imports_fails():
    sentences = coverage_floors.shortfalls(report(rest=[]), {"decider.py"})

    assert "decider.py: a decider that no test imports" in sentences


def test_deciders_are_the_modules_that_mark_themselves():
    files = coverage_floors.decider_files()

    assert "src/dynamo/router/selection.py" in files
    assert "src/dynamo/router/kv_router.py" not in files
    assert deciders.is_decider('"""Decide.\n\nAnd do not act.\n"""  # decider\nimport ast\n')
    assert not deciders.is_decider('"""Act."""\nimport asyncio  # decider\n')


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import ast, os.path", ["os.path"]),
        ("def f():\n    from dynamo.runtime import events", ["dynamo.runtime.events"]),
        ("from dynamo.observability.metrics import Gauge", ["dynamo.observability.metrics.Gauge"]),
        ("from dynamo.runtime import naming\nimport timeit", []),
    ],
)
def test_imports_of_what_acts_are_found_everywhere(source, expected):
    assert deciders.acting_imports(source) == expected
