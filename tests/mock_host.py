"""The fixture `host`: a worker host with the mock engine."""

import pytest
from test_engine import make_mock

from engine_suite import Host, Sink

__all__ = ["host"]


@pytest.fixture
async def host():
    engine, sink = make_mock(), Sink()
    yield Host(engine, sink, await engine.start(sink))
    await engine.stop()
