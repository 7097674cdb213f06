"""What an extra brings is asked for by its name."""

import pytest

from dynamo.base import errors, extras


def test_a_module_is_loaded():
    assert extras.load("dynamo.base.errors", what="x", extra="x") is errors


def test_who_lacks_a_package_is_told_the_extra(monkeypatch, tmp_path):
    (tmp_path / "part_of_ours.py").write_text("import a_package_of_an_extra\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(
        errors.ConfigError,
        match=r"the part needs a_package_of_an_extra.*pip install 'pydynamo\[more\]'",
    ):
        extras.load("part_of_ours", what="the part", extra="more")


def test_a_module_of_ours_that_is_missing_is_a_mistake_of_ours():
    with pytest.raises(ModuleNotFoundError):
        extras.load("dynamo.nowhere", what="x", extra="x")
