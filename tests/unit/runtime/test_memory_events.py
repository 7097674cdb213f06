import asyncio
import weakref

from dynamo.runtime.backends import memory


async def test_events_of_one_loop_turn_arrive_in_one_batch():
    plane = memory.MemoryEventPlane(memory.MemoryBus(), 1)
    await plane.advertise("t")
    batches = []
    await plane.subscribe("t", batches.append)
    for i in range(3):
        plane.publish("t", b"%d" % i)
    before = list(batches)
    await asyncio.sleep(0)

    assert before == []
    assert [[e.payload for e in batch] for batch in batches] == [[b"0", b"1", b"2"]]


async def test_slow_listener_sees_missed_events_in_the_numbers():
    plane = memory.MemoryEventPlane(memory.MemoryBus(), 1)
    await plane.advertise("t")
    heard = []
    await plane.subscribe("t", heard.extend)
    for _ in range(memory.BATCH_LIMIT + 5):
        plane.publish("t", b"")
    await asyncio.sleep(0)
    plane.publish("t", b"")
    await asyncio.sleep(0)

    assert len(heard) == memory.BATCH_LIMIT + 1
    assert heard[-1].number == memory.BATCH_LIMIT + 5


async def test_closed_subscription_keeps_its_listener_no_longer():
    class Listener:
        def __call__(self, batch):
            pass

    plane, listener = memory.MemoryEventPlane(memory.MemoryBus(), 1), Listener()
    subscription = await plane.subscribe("t", listener)
    await subscription.close()
    kept = weakref.ref(listener)
    del listener, subscription

    assert kept() is None
