"""The worker's system port, over a real socket."""

import asyncio
import json

import pytest

from dynamo.worker import system_port


class Worker:
    """What the port asks."""

    is_ready = True


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
async def port(worker):
    served = system_port.SystemPort(
        endpoints=("generate",),
        is_ready=lambda: worker.is_ready,
        uptime_s=lambda: 12.5,
        render=lambda: b"# metrics\n",
    )
    yield await served.start("127.0.0.1", 0)
    await served.close()


async def get(port, path):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), body


async def test_ready_worker_is_live_and_healthy(port):
    status, body = await get(port, "/health")

    assert status == 200
    assert json.loads(body) == {
        "status": "ready",
        "uptime": {"secs": 12, "nanos": 500_000_000},
        "endpoints": {"generate": "ready"},
    }


async def test_worker_that_is_not_ready_is_live_but_unhealthy(port, worker):
    worker.is_ready = False
    health, body = await get(port, "/health")
    live, _ = await get(port, "/live")

    assert (health, live) == (503, 200)
    assert json.loads(body)["endpoints"] == {"generate": "notready"}


async def test_metrics_are_served(port):
    assert await get(port, "/metrics") == (200, b"# metrics\n")
