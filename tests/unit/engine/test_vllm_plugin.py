"""The children of a killed worker are killed, too."""

import multiprocessing
import os
import signal
import sys
import time
import types

import pytest

from dynamo.engine.adapters.vllm import connectors, plugin
from waiting import PATIENT_S


def wait_as_vllm_does(started):
    plugin.adopt()
    started.send(os.getpid())
    time.sleep(10 * PATIENT_S)


def own_a_child(started):
    multiprocessing.get_context("spawn").Process(target=wait_as_vllm_does, args=(started,)).start()
    time.sleep(10 * PATIENT_S)


@pytest.mark.skipif(
    sys.platform != "linux", reason="only the kernel of Linux ends a child with its parent"
)
def test_a_child_ends_with_its_killed_parent(monkeypatch):
    monkeypatch.setenv(plugin.OWNED, "1")
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    parent = multiprocessing.get_context("spawn").Process(target=own_a_child, args=(there,))
    parent.start()
    there.close()
    assert here.poll(PATIENT_S)
    child = here.recv()
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()

    assert here.poll(
        PATIENT_S
    )  # the pipe's other end is closed: all processes that had it have ended
    with pytest.raises(EOFError):
        here.recv()
    assert child != parent.pid


def test_a_vllm_of_another_program_is_not_changed(monkeypatch):
    monkeypatch.delenv(plugin.OWNED, raising=False)
    monkeypatch.setattr(plugin.process_setup, "dies_with", lambda pid: pytest.fail("asked"))

    plugin.adopt()


class AgentConfig:
    """NIXL's, whose Python interface sets the delay to 0."""

    def __init__(self):
        self._delay_us = None

    @property
    def pthrDelay(self):
        return self._delay_us

    @pthrDelay.setter
    def pthrDelay(self, delay_us):
        self._delay_us = delay_us


def test_progress_thread_of_nixl_pauses_unless_it_was_given_a_delay(monkeypatch):
    bindings = types.SimpleNamespace(nixlAgentConfig=AgentConfig)
    monkeypatch.setitem(sys.modules, "nixl", types.ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", types.SimpleNamespace(nixlBind=bindings))
    plugin.pause_nixl(connectors.NIXL_PAUSE_US)
    polling, chosen = bindings.nixlAgentConfig(), bindings.nixlAgentConfig()
    polling.pthrDelay, chosen.pthrDelay = 0, 7

    assert (polling.pthrDelay, chosen.pthrDelay) == (10_000, 7)
