"""A frontend among 1,000 registered workers under etcd: it knows all of them, in bounded memory."""

import asyncio
import json

import pytest
from deployment import MODEL, rss_bytes

from dynamo.runtime.backends.etcd import access, discovery
from etcd_server import EtcdServer
from waiting import PATIENT_S

pytestmark = pytest.mark.system
NUM_INSTANCES = 1000
MOST_BYTES = 150e6
PUTS_AT_ONCE = 50  # the lease is kept alive between them


@pytest.fixture
def etcd(tmp_path):
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.stop()


async def clone_the_worker(etcd, number):
    """Register so many more workers with the records of the one that is there. Returns what holds them."""
    registry = await discovery.EtcdDiscovery.open(access.EtcdAccess(addresses=(etcd.address,)), 1)
    for key, value in (await registry.get_prefix("v1/")).items():
        for first in range(2, number + 2, PUTS_AT_ONCE):
            puts = (
                registry.put(
                    f"{key.rpartition('/')[0]}/{i:x}",
                    json.dumps(json.loads(value) | {"instance_id": i}).encode(),
                )
                for i in range(first, min(first + PUTS_AT_ONCE, number + 2))
            )
            await asyncio.gather(*puts)
    return registry


async def test_frontend_knows_a_thousand_instances_in_bounded_memory(deployment, etcd, monkeypatch):
    monkeypatch.setattr(discovery, "PUT_TIMEOUT_S", PATIENT_S)
    deployment.environ |= {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": etcd.url}
    frontend = deployment.frontend("--router-mode", "kv")
    deployment.mocker()
    frontend.await_models([MODEL])
    frontend.await_workers(1)
    registry = await clone_the_worker(etcd, NUM_INSTANCES - 1)
    try:
        await asyncio.to_thread(frontend.await_workers, NUM_INSTANCES)
        answers = [frontend.chat(max_tokens=4) for _ in range(3)]
        num_bytes = rss_bytes(frontend.pid)
    finally:
        await registry.close()

    assert [answer.status_code for answer in answers] == [200] * 3
    assert num_bytes < MOST_BYTES
