"""The suite of LoRA adapter stores over the mock engine; `tests/with_vllm` has vLLM."""

import pytest

from lora_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from mock_host import *  # noqa: F403 (the fixture `host`)


@pytest.fixture
def loras(host):
    return host.engine.capabilities.lora_adapters


@pytest.fixture
def directory(tmp_path):
    return tmp_path
