"""The mock engine under a suite: the fixture `host`."""

import pytest
from test_engine import make_mock

from engine_suite import Host, Sink

__all__ = ["host"]


@pytest.fixture
async def host():
    engine, sink = make_mock(), Sink()
    yield Host(engine, sink, await engine.start(sink))
    await engine.stop()
