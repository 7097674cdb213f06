import contextlib

import pytest
from routing_rig import World


@pytest.fixture
async def world():
    async with contextlib.AsyncExitStack() as stack:
        yield World(stack)
