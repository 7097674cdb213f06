"""What every engine promises whose LoRA adapters come and go, over the mock engine; `tests/with_vllm` has vLLM."""

import pytest

from dynamo.engine import api
from lora_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from mock_host import *  # noqa: F403 (the fixture `host`)


@pytest.fixture
def loras(host):
    assert isinstance(host.engine, api.HoldsLoras)
    return host.engine.loras


@pytest.fixture
def directory(tmp_path):
    return tmp_path
