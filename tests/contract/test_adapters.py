"""What every engine promises whose LoRA adapters come and go, over the mock engine; `tests/with_vllm` has vLLM."""

import pytest

from adapters_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from dynamo.engine import api
from mock_host import *  # noqa: F403 (the fixture `host`)


@pytest.fixture
def adapters(host):
    assert isinstance(host.engine, api.CanAdapt)
    return host.engine.adapters


@pytest.fixture
def directory(tmp_path):
    return tmp_path
