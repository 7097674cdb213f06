"""The suite of sleep controllers over the mock engine; `tests/with_vllm` has vLLM."""

import pytest

from dynamo.base import errors
from mock_host import *  # noqa: F403 (the fixture `host`)
from sleeper_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)

PROMPT = list(range(3, 43))


@pytest.fixture
def sleeper(host):
    return host.engine.capabilities.sleep


async def test_a_sleeping_mock_engine_refuses_requests(host, sleeper):
    """So that a worker which asks it then is found out."""
    await sleeper.sleep(1)
    await sleeper.wake_up(["weights"])

    with pytest.raises(errors.Conflict, match="it misses kv_cache"):
        host.submit("a", PROMPT, max_tokens=4)
