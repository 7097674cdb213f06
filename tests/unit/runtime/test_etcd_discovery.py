"""What discovery over etcd keeps to itself; `tests/contract` has it with a real etcd."""

import asyncio

from dynamo.base import clock, errors
from dynamo.protocols import instances
from dynamo.runtime import instance_records
from dynamo.runtime.backends.etcd import access, discovery
from dynamo.testing import clock as virtual

NUM_KEYS = 20


class RefusingEtcd:
    """An etcd that takes nothing from this user any more."""

    async def put(self, key, value, lease_id, *, after):
        raise errors.ConfigError("etcd refuses: PERMISSION_DENIED")

    delete = put


class SlowEtcd:
    """An etcd that takes connections, and answers while `answers` is set."""

    def __init__(self):
        self.answers = asyncio.Event()
        self.answers.set()
        self.values = {}

    async def put(self, key, value, lease_id, *, after):
        await self.answers.wait()
        self.values[key] = value
        return True, 1

    async def delete(self, key, *, after):
        await self.answers.wait()
        del self.values[key]

    async def refresh(self, lease_id):
        return True

    async def revoke(self, lease_id):
        await self.answers.wait()
        self.values.clear()


def new_member(time=None):
    return discovery.EtcdDiscovery(
        access.EtcdAccess(addresses=("etcd:2379",)),
        1,
        lease_ttl_s=10,
        is_alive=lambda _key, _value: False,
        time=time or clock.SystemClock(),
    )


async def joined(time):
    """Return a member, its records with some keys, and their etcd."""
    member, etcd = new_member(time), SlowEtcd()
    member._etcd = etcd
    member._is_answering.set()
    records = instance_records.InstanceRecords(member, 1)
    for number in range(NUM_KEYS):
        record = instances.EventChannel(topic="t", instance_id=number, transport={})
        await records.put(f"v1/{number}", record)
    return member, records, etcd


async def test_process_with_many_keys_waits_once_for_an_etcd_that_hangs():
    time = virtual.VirtualClock()
    member, records, etcd = await joined(time)
    await member.put("v1/channel", b"")  # that the event plane removes at its end
    etcd.answers.clear()

    async def leave():
        await records.deregister()
        await member.delete("v1/channel")
        await member.close()

    leaving = asyncio.create_task(leave())
    await time.advance(discovery.LEAVE_TIMEOUT_S + 0.1)

    assert leaving.done()
    assert len(etcd.values) == NUM_KEYS + 1


async def test_keys_leave_in_the_reverse_order_of_their_coming():
    _, records, etcd = await joined(virtual.VirtualClock())
    removed = []
    etcd.delete = lambda key, *, after: asyncio.sleep(0, removed.append(key))
    await records.deregister()

    assert removed == [f"v1/{number}" for number in reversed(range(NUM_KEYS))]


async def test_key_that_etcd_was_slow_to_remove_is_removed_with_the_next_refresh():
    """A worker that falls asleep would else be listed for as long as it sleeps."""
    time = virtual.VirtualClock()
    member, records, etcd = await joined(time)
    etcd.answers.clear()
    withdrawing = asyncio.create_task(records.withdraw())
    await time.advance(discovery.LEAVE_TIMEOUT_S + 0.1)
    was_left = withdrawing.done() and len(etcd.values)
    etcd.answers.set()
    keeping = asyncio.create_task(member._lease.keep(etcd))
    await time.advance(4.0)
    keeping.cancel()

    assert was_left == NUM_KEYS
    assert etcd.values == {}


async def test_key_that_etcd_does_not_let_us_remove_is_no_error_of_its_owner(caplog):
    caplog.set_level("INFO")
    member = new_member()
    member._lease.set_key("k", b"1")
    member._etcd = RefusingEtcd()
    member._is_answering.set()
    await member.delete("k")

    assert "PERMISSION_DENIED" in caplog.text


async def test_refusal_of_an_etcd_that_came_back_is_said_once(caplog):
    """Such as after a change of its passwords; of two servers the other may still be away."""
    member = new_member()
    member._started.set_result(None)
    away = errors.Unavailable("etcd at a:2379: refused")
    refusal = errors.ConfigError("etcd at b:2379 refuses: authentication failed")
    for error in (away, refusal, away, refusal):
        member._report_outage(error, 1.0)

    assert ["authentication" in record.getMessage() for record in caplog.records] == [False, True]


class BusyEtcd:
    """An etcd that takes a second for each write, and forgets a lease that is not refreshed in time."""

    def __init__(self, time):
        self.time, self.ends_at, self.num_lost = time, -1.0, 0
        self.num_writing = self.most_writing = 0
        self.values = {}

    async def grant(self, lease_id, ttl_s):
        self.ends_at = self.time.now() + ttl_s

    async def refresh(self, lease_id):
        is_alive = self.time.now() < self.ends_at
        self.num_lost += not is_alive
        self.ends_at = self.time.now() + 10 if is_alive else -1.0
        return is_alive

    async def put(self, key, value, lease_id, *, after):
        self.num_writing += 1
        self.most_writing = max(self.most_writing, self.num_writing)
        await self.time.sleep(1.0)
        self.num_writing -= 1
        if self.time.now() >= self.ends_at:
            raise errors.Unavailable("NOT_FOUND: requested lease not found")
        self.values[key] = value
        return True, 1


async def test_lease_stays_alive_while_its_many_keys_are_put_back():
    time = virtual.VirtualClock()
    lease, etcd = discovery.EtcdLease(1, 10, time), BusyEtcd(time)
    for number in range(1000):
        lease.set_key(f"v1/{number}", b"")
    attaching = asyncio.create_task(lease.attach(etcd))
    while not attaching.done():
        await time.advance(1)
    await attaching

    assert time.now() > 2 * 10
    assert etcd.num_lost == 1  # before it was first taken
    assert len(etcd.values) == 1000


async def test_lease_is_refreshed_while_many_keys_wait_to_be_written():
    time = virtual.VirtualClock()
    lease, etcd = discovery.EtcdLease(1, 10, time), BusyEtcd(time)
    await lease.attach(etcd)
    for number in range(1000):
        lease.set_key(f"v1/{number}", b"")
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(lease.keep(etcd))
        writing = [group.create_task(lease.write(etcd, f"v1/{number}")) for number in range(1000)]
        while not all(write.done() for write in writing):
            await time.advance(1)
        keeping.cancel()

    assert etcd.num_lost == 1
    assert etcd.most_writing == 32
    assert len(etcd.values) == 1000


async def test_writes_of_one_key_come_one_after_the_other():
    time = virtual.VirtualClock()
    lease, etcd = discovery.EtcdLease(1, 10, time), BusyEtcd(time)
    await lease.attach(etcd)
    writes = []
    for number in range(3):
        lease.set_key("v1/key", str(number).encode())
        writes.append(asyncio.create_task(lease.write(etcd, "v1/key")))
        await time.advance(0.25)
    while not all(write.done() for write in writes):
        await time.advance(1)

    assert etcd.most_writing == 1
    assert etcd.values == {"v1/key": b"2"}
