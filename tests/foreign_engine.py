"""Fixtures for an engine of a library that is really there: it takes long to start, so the tests of a module share one.

A module that imports them has the fixture `make_engine`, of the module's scope, and runs its tests in that loop.
"""

import os
from pathlib import Path

import pytest
import pytest_asyncio

from engine_suite import Host, Sink

__all__ = ["host", "shared"]


def model_directory():
    """Where the model is with which to test."""
    named = os.environ.get("DYN_TEST_MODEL")
    if not named:
        pytest.skip(
            "no model to test with: make test-sglang (or test-trtllm) MODEL=DIRECTORY",
            allow_module_level=True,
        )
    return Path(named)


class Forwarding:
    """The shared engine's sink: gives what it hears to the sink of the test that runs."""

    def __init__(self):
        self.to = Sink()
        for name in ("outputs", "failed", "kv_events", "died"):
            setattr(self, name, lambda *args, name=name: getattr(self.to, name)(*args))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(make_engine):
    engine, sink = make_engine(), Forwarding()
    facts = await engine.start(sink)
    yield engine, sink, facts
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def host(shared):
    engine, sink, facts = shared
    sink.to = Sink()
    yield Host(engine, sink.to, facts)

    assert not sink.to.deaths
