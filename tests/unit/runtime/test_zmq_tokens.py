"""What a publisher does with another token."""

import asyncio

from dynamo.base import errors, membership
from dynamo.runtime.backends import memory, zmq
from waiting import PATIENT_S, until

OLD, NEW = b"o" * 40, b"n" * 40


class ChangedFiles:
    """Credentials whose files have been read again."""

    def __init__(self, credentials):
        self.latest = credentials

    def current(self):
        return self.latest


def make_publisher(monkeypatch, discovery):
    """Return the files of a token, and a plane that follows them closely."""
    monkeypatch.setattr(membership, "CHECK_S", 0.01)
    files = ChangedFiles(membership.Credentials(token=OLD))
    credentials = membership.Credentials(token=OLD, files=files)
    return files, zmq.ZmqEventPlane(discovery, 2, credentials=credentials)


async def test_address_of_a_publisher_with_a_new_token_is_published_after_a_refusal(monkeypatch):
    registry = memory.MemoryRegistry()
    discovery = memory.MemoryDiscovery(registry)
    files, publisher = make_publisher(monkeypatch, discovery)
    await publisher.advertise("n/c/e")
    before, put = registry.view.get_prefix(""), discovery.put
    refusals = [errors.ConfigError("no space left on device")]

    async def refuse_first(key, value):
        if refusals:
            raise refusals.pop()
        await put(key, value)

    discovery.put = refuse_first
    files.latest = membership.Credentials(token=NEW, second_token=OLD)
    await until(lambda: registry.view.get_prefix("") != before)
    await publisher.close()


async def test_topic_that_is_advertised_while_addresses_change_keeps_no_token_from_being_followed(
    monkeypatch,
):
    discovery = memory.MemoryDiscovery(memory.MemoryRegistry())
    files, publisher = make_publisher(monkeypatch, discovery)
    await publisher.advertise("n/c/first")
    put, is_waiting, goes_on = discovery.put, asyncio.Event(), asyncio.Event()

    async def wait(key, value):
        is_waiting.set()
        await goes_on.wait()
        await put(key, value)

    monkeypatch.setattr(discovery, "put", wait)
    files.latest = membership.Credentials(token=NEW, second_token=OLD)
    async with asyncio.timeout(PATIENT_S):
        await is_waiting.wait()
    advertising = asyncio.create_task(publisher.advertise("n/c/second"))
    await asyncio.sleep(0)  # until it has begun
    goes_on.set()
    await advertising
    replaced = publisher._publisher
    files.latest = membership.Credentials(token=b"3" * 40, second_token=NEW)
    await until(lambda: publisher._publisher is not replaced or not publisher._tasks)
    is_following = len(publisher._tasks) > 0
    await publisher.close()

    assert is_following


async def test_plane_that_ends_while_a_new_address_is_published_closes_the_former_socket(
    monkeypatch,
):
    discovery = memory.MemoryDiscovery(memory.MemoryRegistry())
    files, publisher = make_publisher(monkeypatch, discovery)
    await publisher.advertise("n/c/e")
    former, is_waiting = publisher._publisher, asyncio.Event()

    async def wait(key, value):
        is_waiting.set()
        await asyncio.Event().wait()

    discovery.put = wait
    files.latest = membership.Credentials(token=NEW, second_token=OLD)
    async with asyncio.timeout(PATIENT_S):
        await is_waiting.wait()
    await publisher._tasks.close()
    is_closed = former._socket.closed
    former.close()  # else the end of the plane would block
    await publisher.close()

    assert is_closed
