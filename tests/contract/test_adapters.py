"""What every engine promises whose LoRA adapters come and go, over the mock engine; `tests/with_vllm` has vLLM."""

import pytest
from test_engine import make_mock

from adapters_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from dynamo.engine import api
from engine_suite import Host, Sink


@pytest.fixture
async def host():
    engine, sink = make_mock(), Sink()
    yield Host(engine, sink, await engine.start(sink))
    await engine.stop()


@pytest.fixture
def adapters(host):
    assert isinstance(host.engine, api.CanAdapt)
    return host.engine.adapters


@pytest.fixture
def directory(tmp_path):
    return tmp_path
