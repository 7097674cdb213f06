"""The version of the distribution, and what a message recommends when an extra is missing."""

import importlib.metadata
import tomllib

import pytest

from dynamo.base import distribution, errors


@pytest.fixture
def no_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(distribution, "_ROOT", tmp_path)


def test_version_equals_the_one_in_pyproject():
    project = tomllib.loads((distribution._ROOT / "pyproject.toml").read_text())["project"]

    assert (distribution.NAME, distribution.version()) == (project["name"], project["version"])


def test_in_a_checkout_make_installs_an_extra():
    assert distribution.install_command("etcd") == "make setup EXTRAS=etcd"


@pytest.mark.usefixtures("no_checkout")
def test_outside_a_checkout_pip_installs_an_extra():
    assert distribution.install_command("etcd") == "pip install 'dynamo-serving[etcd]'"


def test_module_with_installed_packages_is_imported():
    assert distribution.load_extra("dynamo.base.errors", feature="x", extra="x") is errors


def test_missing_package_raises_a_config_error_with_its_extra(monkeypatch, tmp_path):
    (tmp_path / "part_of_ours.py").write_text("import a_package_of_an_extra\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(
        errors.ConfigError,
        match=r"the part needs a_package_of_an_extra, .*: make setup EXTRAS=more",
    ):
        distribution.load_extra("part_of_ours", feature="the part", extra="more")


def test_missing_own_module_raises_no_config_error():
    with pytest.raises(ModuleNotFoundError):
        distribution.load_extra("dynamo.nowhere", feature="x", extra="x")


def test_importlib_finds_the_distribution():
    assert importlib.metadata.version("dynamo-serving")
