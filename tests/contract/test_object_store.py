"""What every object store promises, held in memory and in JetStream."""

import asyncio
import random

import pytest

import nats_server as servers
from dynamo.base import errors
from dynamo.runtime import services
from dynamo.runtime.backends import memory
from dynamo.runtime.backends.nats import jetstream
from waiting import PATIENT_S

NORMAL = services.ObjectStoreBounds()
BIG = random.Random(1).randbytes(700_000)  # several chunks


@pytest.fixture(params=["memory", "nats"])
async def open_store(request, tmp_path):
    """Opens sides of one store."""
    if request.param == "memory":
        stores = {}
        yield lambda bounds=NORMAL: stores.setdefault(0, memory.MemoryObjectStore(bounds))
        return
    server = servers.NatsServer(tmp_path / "nats")
    server.start()
    nats = await servers.connect(server.url)
    yield lambda bounds=NORMAL: jetstream.NatsObjectStore(nats, bounds)
    await nats.close()
    server.stop()


@pytest.mark.parametrize("body", [b"", b"short", BIG], ids=["empty", "short", "big"])
async def test_stored_object_is_read_by_another_process(open_store, body):
    url = await open_store().put("sha256-abc", body)

    assert await open_store().get(url, timeout_s=PATIENT_S) == body


async def test_same_object_may_be_stored_by_many(open_store):
    urls = await asyncio.gather(*(open_store().put("k", BIG) for _ in range(4)))

    assert len(set(urls)) == 1
    assert await open_store().get(urls[0], timeout_s=PATIENT_S) == BIG


async def test_absent_object_is_unavailable(open_store):
    store = open_store()
    url = await store.put("there", b"x")
    with pytest.raises(errors.Unavailable):
        await store.get(url.replace("there", "elsewhere"), timeout_s=PATIENT_S)


async def test_too_long_object_is_refused(open_store):
    store = open_store(services.ObjectStoreBounds(max_object_bytes=10))
    with pytest.raises(errors.LocalProtocolError, match=r"11 bytes.*10"):
        await store.put("k", b"x" * 11)


async def test_full_store_is_an_error(open_store):
    store = open_store(services.ObjectStoreBounds(max_bytes=500_000))
    with pytest.raises(errors.Unavailable):
        await store.put("k", BIG)


@pytest.fixture
async def nats(tmp_path):
    server = servers.NatsServer(tmp_path / "nats")
    server.start()
    nats = await servers.connect(server.url)
    yield nats
    await nats.close()
    server.stop()


async def test_only_old_objects_are_stored_again(nats):
    patient = jetstream.NatsObjectStore(nats)
    hasty = jetstream.NatsObjectStore(nats, services.ObjectStoreBounds(max_age_s=0.0))
    await patient.put("k", b"x")
    stored = [await _version(nats)]
    await patient.put("k", b"x")
    stored.append(await _version(nats))
    await hasty.put("k", b"x")
    stored.append(await _version(nats))

    assert stored[0] == stored[1] != stored[2]


async def _version(nats):
    bucket = await nats.jetstream.object_store(jetstream.BUCKET)
    return (await bucket.get_info("k")).nuid


async def test_unused_objects_expire(nats):
    store = jetstream.NatsObjectStore(nats, services.ObjectStoreBounds(max_age_s=0.5))
    url = await store.put("k", b"x")

    async with asyncio.timeout(PATIENT_S):
        while True:
            try:
                # The server removes the pieces before their description: then `get` waits for them in vain.
                await store.get(url, timeout_s=1.0)
            except errors.Unavailable as error:
                if "no such object" in str(error):
                    break


async def test_too_long_object_is_not_read(nats):
    url = await jetstream.NatsObjectStore(nats).put("k", b"x" * 100)
    careful = jetstream.NatsObjectStore(nats, services.ObjectStoreBounds(max_object_bytes=10))
    with pytest.raises(errors.Unavailable, match="100 bytes"):
        await careful.get(url, timeout_s=PATIENT_S)


async def test_address_of_another_store_is_named(nats):
    with pytest.raises(errors.Unavailable, match="expected an object of"):
        await jetstream.NatsObjectStore(nats).get("http://x/y", timeout_s=1)


async def test_store_without_a_server_is_unavailable_in_time(tmp_path):
    server = servers.NatsServer(tmp_path / "nats")
    server.start()
    nats = await servers.connect(server.url)
    server.stop()
    with pytest.raises(errors.Unavailable):
        await jetstream.NatsObjectStore(nats).get("nats://dynamo-files/k", timeout_s=0.5)
    await nats.close()


async def test_store_without_jetstream_is_unavailable(tmp_path):
    server = servers.NatsServer(tmp_path / "nats", jetstream=False)
    server.start()
    nats = await servers.connect(server.url)
    with pytest.raises(errors.Unavailable):
        await jetstream.NatsObjectStore(nats).put("k", b"x")
    await nats.close()
    server.stop()
