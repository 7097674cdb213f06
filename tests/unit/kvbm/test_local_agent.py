"""Which ways to move blocks an engine opens."""

import sys

import pytest

from dynamo.base import errors
from dynamo.kvbm import local_agent


def make(*backends):
    settings = local_agent.TransferConfig(kv_transfer_backends=backends)
    return local_agent.make_agent("native", settings, None, lambda *said: None)


def test_a_way_that_nobody_knows_is_refused_by_name():
    with pytest.raises(errors.ConfigError, match="expected some of shm, tcp, nixl, got 'rdma'"):
        make("shm", "rdma")


def test_nixl_without_its_library_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "dynamo.transfer.backends.nixl.backend", None)

    with pytest.raises(errors.ConfigError, match=r"make setup EXTRAS=nixl"):
        make("shm", "nixl")
