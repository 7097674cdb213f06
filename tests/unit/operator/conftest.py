"""An API server in memory, and a connection to it, for the tests of the operator's process."""

import pytest

from memory_cluster import MemoryCluster


@pytest.fixture
async def server():
    async with MemoryCluster() as opened:
        yield opened


@pytest.fixture
async def cluster(server):
    async with server.connect() as opened:
        yield opened
