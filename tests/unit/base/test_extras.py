"""What an extra brings is asked for by its name."""

import sys

import pytest

from dynamo.base import errors, extras


def test_a_module_is_loaded():
    assert extras.load("dynamo.base.errors", what="x", extra="x") is errors


def test_who_lacks_a_package_is_told_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "dynamo.runtime.backends.etcd.connection", raising=False)
    monkeypatch.delitem(sys.modules, "dynamo.runtime.backends.etcd.discovery", raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)

    with pytest.raises(
        errors.ConfigError, match=r"etcd discovery needs grpc.*pip install 'pydynamo\[etcd\]'"
    ):
        extras.load("dynamo.runtime.backends.etcd.discovery", what="etcd discovery", extra="etcd")


def test_a_module_of_ours_that_is_missing_is_a_mistake_of_ours():
    with pytest.raises(ModuleNotFoundError):
        extras.load("dynamo.nowhere", what="x", extra="x")
