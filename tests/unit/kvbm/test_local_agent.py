"""The backends of an engine's local agent."""

import sys

import pytest

from dynamo.base import errors
from dynamo.kvbm import agents


def make(*backends):
    settings = agents.TransferConfig(kv_transfer_backends=backends)
    return agents.make_agent("native", settings, None, lambda *said: None)


def test_unknown_backend_is_refused_by_name():
    with pytest.raises(errors.ConfigError, match="expected some of shm, tcp, nixl, got 'rdma'"):
        make("shm", "rdma")


def test_missing_nixl_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dynamo.transfer.backends.nixl", None)

    with pytest.raises(errors.ConfigError, match=r"make setup EXTRAS=nixl"):
        make("shm", "nixl")
