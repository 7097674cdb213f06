"""What `make coverage` refuses."""

import coverage_floors


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


def test_the_deciders_of_the_contract_exist():
    files = coverage_floors.decider_files()

    assert files
    assert all((coverage_floors.ROOT / path).is_file() for path in files)
