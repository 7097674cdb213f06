"""The backends of an engine's local agent."""

import errno
import sys
import threading

import pytest

from dynamo.base import errors
from dynamo.kvbm import agents
from dynamo.transfer import agent, descriptors
from dynamo.transfer.backends import tcp
from transfer_peer import LAYOUT


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


class TakenPort:
    """A backend that cannot listen."""

    name, is_same_host = "taken", False

    def listen(self, exposed):
        raise errors.ConfigError("the port is taken")

    def close(self):
        pass


async def test_agent_that_cannot_start_listens_nowhere():
    """It is made anew for each copy, and for each try to connect."""
    own = agents.LocalAgent(
        lambda hear: agent.TransferAgent("decode-0", backends=[tcp.TcpBackend(), TakenPort()]),
        lambda *said: None,
    )
    memory = memoryview(bytearray(LAYOUT.num_bytes))
    await own.set_region(descriptors.Region(memory=memory, layout=LAYOUT))
    before = set(threading.enumerate())
    with pytest.raises(errors.ConfigError, match="the port is taken"):
        await own.get_started()

    assert [
        t.name for t in set(threading.enumerate()) - before if t.name == "transfer-accept"
    ] == []


async def test_agent_that_finds_no_free_file_can_start_later(monkeypatch):
    """Its callers try again after a ConfigError, and after no other."""
    own = agents.LocalAgent(
        lambda hear: agent.TransferAgent("decode-0", backends=[tcp.TcpBackend()]),
        lambda *said: None,
    )
    memory = memoryview(bytearray(LAYOUT.num_bytes))
    await own.set_region(descriptors.Region(memory=memory, layout=LAYOUT))

    def refuse():
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(agent.memory, "identify_host", refuse)
        with pytest.raises(errors.ConfigError, match="Too many open files"):
            await own.get_started()
    await own.get_started()
    metadata = own.metadata
    await own.close()

    assert metadata is not None
