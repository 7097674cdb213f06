"""The request of a client that disconnects is cancelled at the worker."""

import asyncio

import httpx
from deployment import MODEL, chat, rss_bytes

from waiting import PATIENT_S, eventually

ENDLESS = {"max_tokens": 1900, "ignore_eos": True}  # at 200 ms a token longer than a test waits
NUM_CLIENTS = 1000


def test_blocks_are_freed_when_the_client_disconnects(deployment):
    worker, frontend = deployment.mocker("--tick-ms", "200"), deployment.frontend()
    frontend.await_models([MODEL])
    with frontend.stream(**ENDLESS) as lines:
        next(lines)
        eventually(lambda: worker.metric("kvstats_active_blocks") > 0, what="blocks")

    eventually(lambda: worker.metric("kvstats_active_blocks") == 0, what="blocks are free")
    assert worker.metric("inflight_requests") == 0
    assert worker.metric("cancellation_total") == 1


async def leave_after_the_first_token(client, url):
    body = chat("Tell me a story", stream=True, **ENDLESS)
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_lines():
            return


async def leave_many(url, num_clients):
    limit = asyncio.Semaphore(32)

    async def one(client):
        async with limit:
            await leave_after_the_first_token(client, url)

    async with httpx.AsyncClient(timeout=PATIENT_S) as client:
        await asyncio.gather(*(one(client) for _ in range(num_clients)))


def test_thousand_disconnected_clients_leave_nothing_behind(deployment):
    worker, frontend = deployment.mocker("--speedup-ratio", "1"), deployment.frontend()
    frontend.await_models([MODEL])
    asyncio.run(leave_many(frontend.url, 100))  # caches and pools have their size now
    before = rss_bytes(frontend.pid) + rss_bytes(worker.pid)
    asyncio.run(leave_many(frontend.url, NUM_CLIENTS))
    eventually(lambda: worker.metric("inflight_requests") == 0, what="no requests")
    grown = rss_bytes(frontend.pid) + rss_bytes(worker.pid) - before

    assert worker.metric("kvstats_active_blocks") == 0
    assert worker.metric("cancellation_total") == NUM_CLIENTS + 100
    assert grown < 8 * 2**20
    assert frontend.chat(max_tokens=4).status_code == 200
