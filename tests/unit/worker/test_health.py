"""The worker's system port, over a real socket."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest
from worker_fakes import client_of

from dynamo.kvbm import pool as pools
from dynamo.kvbm import tier_report, tiered_cache, tiers
from dynamo.protocols import load as loads
from dynamo.testing import clock
from dynamo.worker import health


class Worker:
    """What the port asks."""

    is_ready = True


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
async def port(worker):
    served = health.SystemPort(
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


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://evil.example:9090", "Host": "evil.example:9090"},  # DNS rebinding
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
async def test_page_in_a_browser_commands_no_worker(headers):
    done = []
    routes = {("POST", "/engine/sleep"): lambda request: done.append(request)}
    async with client_of(routes) as client:
        drain = await client.post("/engine/drain", headers=headers)
        sleep = await client.post("/engine/sleep", headers=headers)
        metrics = await client.get("/metrics", headers=headers)

    assert [drain.status_code, sleep.status_code, metrics.status_code] == [403, 403, 200]
    assert "a page in a browser" in drain.text
    assert not done


@pytest.mark.parametrize(
    ("has_tiers", "cpu_usage", "cpu_hit_rate"), [(False, "0.0", "0.00"), (True, "25.0", "12.50")]
)
async def test_statistics_are_logged_every_five_seconds_while_there_is_work(
    caplog, has_tiers, cpu_usage, cpu_hit_rate
):
    time, counts = clock.VirtualClock(), SimpleNamespace(num_prompt_tokens=0, num_output_tokens=0)
    load = [
        loads.ForwardPassMetrics(
            worker_stats=loads.WorkerStats(
                request_active_slots=1, request_total_slots=8, num_requests_waiting=2
            ),
            kv_stats=loads.KvStats(
                kv_active_blocks=1, kv_total_blocks=500, gpu_prefix_cache_hit_rate=0.8
            ),
        )
    ]
    idle = [
        msgspec.structs.replace(
            load[0],
            worker_stats=loads.WorkerStats(
                request_active_slots=0, request_total_slots=8, num_requests_waiting=0
            ),
        )
    ]
    now = idle
    pool = pools.BlockPool(8)
    host = tiers.Tier(tiered_cache.HOST, 4, pool.events)
    cache = tiered_cache.TieredCache(pool, host, None, block_size=4, block_bytes=64)
    host.confirm(host.reserve((tiers.CachedBlock(1, 1, None),), 0))
    cache.num_copied[tiered_cache.HOST, tiered_cache.DEVICE] = 1
    cache.counts["host_lookups"] = 8
    reports = (None, tier_report.make_report(pool, cache))[has_tiers]
    log = asyncio.ensure_future(health.log_statistics(counts, lambda: now, time, lambda: reports))
    with caplog.at_level("INFO", logger="dynamo"):
        await time.advance(5)
        counts.num_prompt_tokens, counts.num_output_tokens, now = 193, 151, load
        await time.advance(5)
        now = idle
        await time.advance(20)
    log.cancel()
    first, second, *rest = [record.getMessage() for record in caplog.records]

    assert first == (
        "Avg prompt throughput: 38.6 tokens/s, Avg generation throughput: 30.2 tokens/s, Running: 1 reqs,"
        " Swapped: 0 reqs, Pending: 2 reqs, GPU KV cache usage: 0.2%,"
        f" CPU KV cache usage: {cpu_usage}%."
    )
    assert second == f"Prefix cache hit rate: GPU: 80.00%, CPU: {cpu_hit_rate}%"
    assert len(rest) == 2  # once more, to say that nothing runs
