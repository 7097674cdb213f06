"""What breaks around a real etcd, and that discovery outlives it. Leases are short, so that tests are."""

import asyncio
import base64
import contextlib
import functools
import itertools
import logging
import signal
import subprocess
import sys

import pytest

from dynamo.base import errors
from dynamo.protocols import instances
from dynamo.runtime import component
from dynamo.runtime.backends.etcd import access, connection
from dynamo.runtime.backends.etcd import discovery as etcd_discovery
from dynamo.runtime.backends.etcd.discovery import EtcdDiscovery
from dynamo.runtime.discovery import Delete, Put
from etcd_server import EtcdServer
from tcp_proxy import TcpProxy
from waiting import PATIENT_S, until

TTL_S = 2  # of a lease that ends in its test, and of a member that has to notice an outage soon
LASTING_TTL_S = etcd_discovery.LEASE_TTL_S  # of others: a busy machine may be late to refresh them
ECHO = instances.EndpointName("dynamo", "echo", "generate")
OWNER = """
import asyncio, sys
from dynamo.runtime.backends.etcd import access
from dynamo.runtime.backends.etcd.discovery import EtcdDiscovery
async def main():
    owner = await EtcdDiscovery.open(access.EtcdAccess(addresses=(sys.argv[1],)), 77, lease_ttl_s=2)
    await owner.put("v1/owner", b"here")
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def etcd(tmp_path):
    server = EtcdServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def join(etcd):
    """Makes a member, at etcd's address or others; all leave at the end."""
    ids, members = itertools.count(1), []

    async def join(*addresses, **options):
        whereto = access.EtcdAccess(addresses=addresses or (etcd.address,))
        options.setdefault("lease_ttl_s", LASTING_TTL_S)
        members.append(await EtcdDiscovery.open(whereto, next(ids), **options))
        return members[-1]

    yield join
    await asyncio.gather(*(member.close() for member in members))


@pytest.fixture
async def proxy(etcd):
    proxy = TcpProxy(etcd.port)
    yield proxy
    await proxy.close()


@pytest.fixture
def owner(etcd):
    """A process that holds the key v1/owner."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, etcd.address], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


async def take(watch, count):
    async with asyncio.timeout(PATIENT_S):
        return [await anext(watch) for _ in range(count)]


async def until_there(etcd, keys):
    async with asyncio.timeout(PATIENT_S):
        while (await asyncio.to_thread(etcd.held)).keys() != keys:
            await asyncio.sleep(0.02)


async def told_until(watch, put):
    """All that a watch says up to this."""
    told = []
    while not told or told[-1] != put:
        told += await take(watch, 1)
    return told


@pytest.mark.parametrize("is_empty", [False, True], ids=["with its data", "empty"])
async def test_restart_of_etcd_changes_no_snapshot(etcd, join, is_empty):
    a, b = await join(), await join()
    await a.put("v1/a", b"a")
    await b.put("v1/b", b"b")
    watch = b.watch("v1/")
    await take(watch, 2)
    etcd.stop()
    if is_empty:
        etcd.lose_data()
    etcd.start()
    await until_there(etcd, {"v1/a", "v1/b"})
    await a.put("v1/news", b"")

    assert await take(watch, 1) == [Put(key="v1/news", value=b"")]
    assert await b.get_prefix("v1/") == {"v1/a": b"a", "v1/b": b"b", "v1/news": b""}


async def test_member_that_does_not_return_with_etcd_expires(etcd, join, owner):
    a = await join(lease_ttl_s=TTL_S)
    await a.put("v1/a", b"")
    watch = a.watch("v1/")
    await take(watch, 2)
    etcd.stop()
    owner.kill()
    etcd.lose_data()
    etcd.start()

    assert await take(watch, 1) == [Delete(key="v1/owner")]
    assert await a.get_prefix("v1/") == {"v1/a": b""}


async def test_etcd_stopped_for_longer_than_a_lease_changes_no_snapshot(etcd, join, caplog):
    a, b = await join(lease_ttl_s=TTL_S), await join(lease_ttl_s=3 * TTL_S)
    await a.put("v1/a", b"")
    watch = b.watch("v1/")
    await take(watch, 1)
    etcd.freeze()
    await asyncio.sleep(1.25 * TTL_S)  # the fault itself
    await until(lambda: caplog.text.count("serving goes on with what is known") == 2)
    etcd.thaw()
    await a.put("v1/news", b"")

    assert await take(watch, 1) == [Put(key="v1/news", value=b"")]
    await until_there(etcd, {"v1/a", "v1/news"})


async def test_process_stopped_for_longer_than_its_lease_keeps_its_id(join, owner):
    a = await join()
    watch = a.watch("v1/")
    await take(watch, 1)
    owner.send_signal(signal.SIGSTOP)
    gone = await take(watch, 1)
    owner.send_signal(signal.SIGCONT)

    assert gone == [Delete(key="v1/owner")]
    assert await take(watch, 1) == [Put(key="v1/owner", value=b"here")]


async def test_partitioned_member_expires_and_keeps_its_view(join, proxy):
    cut_off, other = await join(await proxy.start(), lease_ttl_s=TTL_S), await join()
    await cut_off.put("v1/cut", b"")
    await other.put("v1/other", b"")
    inside, outside = cut_off.watch("v1/"), other.watch("v1/")
    await take(inside, 2)
    await take(outside, 2)
    proxy.drop()
    forgotten = await take(outside, 1)
    proxy.heal()
    back = await take(outside, 1)
    await other.put("v1/news", b"")

    assert forgotten == [Delete(key="v1/cut")]
    assert back == [Put(key="v1/cut", value=b"")]
    assert await take(inside, 1) == [Put(key="v1/news", value=b"")]


@pytest.mark.parametrize("is_answer_lost", [False, True], ids=["late", "answer lost"])
@pytest.mark.parametrize("write", ["put", "delete"])
async def test_write_that_comes_late_undoes_no_later_one(join, monkeypatch, write, is_answer_lost):
    """As from a connection that was given up while a network kept what it had sent."""
    member, lost = await join(), []
    call = connection.EtcdConnection._call

    async def lose(etcd, method, request, answer):
        if not lost and write in str(request) and etcd is member._etcd:
            lost.append((etcd, method, request, answer))
            if is_answer_lost:
                await call(etcd, method, request, answer)
            raise errors.Unavailable("no answer")
        return await call(etcd, method, request, answer)

    await member.put("v1/key", b"first")
    monkeypatch.setattr(connection.EtcdConnection, "_call", lose)
    if write == "put":
        await member.put("v1/key", b"second")
    else:
        await member.delete("v1/key")
    await member.put("v1/key", b"third")
    with contextlib.suppress(errors.Unavailable):
        await call(*lost[0])  # which comes now

    assert await member.get_prefix("v1/") == {"v1/key": b"third"}


async def test_changes_during_a_partition_arrive_after_compaction(etcd, join, proxy):
    cut_off, other = await join(await proxy.start(), lease_ttl_s=TTL_S), await join()
    await other.put("v1/goes", b"")
    await other.put("v1/changes", b"old")
    watch = cut_off.watch("v1/")
    await take(watch, 2)
    proxy.drop()
    await other.delete("v1/goes")
    await other.put("v1/changes", b"middle")
    await other.put("v1/changes", b"new")
    etcd.compact()
    proxy.heal()

    assert await take(watch, 2) == [
        Put(key="v1/changes", value=b"new"),
        Delete(key="v1/goes"),
    ]


@pytest.mark.parametrize(
    ("revision", "error"),
    [(1, connection.HistoryLost), (1_000_000, errors.Unavailable)],
    ids=["forgotten", "of another etcd"],
)
async def test_watch_from_an_unknown_revision_ends(etcd, join, revision, error):
    member = await join()
    for value in (b"1", b"2", b"3"):
        await member.put("k", value)
    etcd.compact()
    whereto = access.EtcdAccess(addresses=(etcd.address,))
    async with connection.connect(whereto, etcd.address) as direct:
        with pytest.raises(error):
            await anext(direct.watch("k", revision))


async def test_ten_thousand_changes_at_once_all_arrive(etcd, join, monkeypatch):
    monkeypatch.setattr(connection, "CALL_S", PATIENT_S)  # of 500 calls the last waits for all
    watch = (await join()).watch("v1/")
    whereto = access.EtcdAccess(addresses=(etcd.address,))
    async with connection.connect(whereto, etcd.address) as direct:
        await direct.grant(5000, 60 * 60)
        for start in range(0, 10_000, 500):
            keys = [f"v1/{n:05}" for n in range(start, start + 500)]
            await asyncio.gather(*(direct.put(key, b"x" * 200, 5000, after=0) for key in keys))
        told = {change.key for change in await take(watch, 10_000)}
        await direct.revoke(5000)
        gone = {change.key for change in await take(watch, 10_000)}

    assert told == gone == {f"v1/{n:05}" for n in range(10_000)}


async def test_two_hundred_members_join_and_leave_at_once(join, monkeypatch):
    monkeypatch.setattr(connection, "CALL_S", PATIENT_S)  # as above
    for limit in ("PUT_TIMEOUT_S", "LEAVE_TIMEOUT_S"):
        monkeypatch.setattr(etcd_discovery, limit, PATIENT_S)
    watch = (await join()).watch("v1/")
    members = await asyncio.gather(*(join(start_timeout_s=PATIENT_S) for _ in range(200)))
    puts = (member.put(f"v1/{n}", b"") for n, member in enumerate(members))
    await asyncio.gather(*puts)
    joined = await take(watch, 200)
    await asyncio.gather(*(member.close() for member in members))
    left = await take(watch, 200)

    assert (
        {put.key for put in joined}
        == {gone.key for gone in left}
        == {f"v1/{n}" for n in range(200)}
    )


async def test_next_endpoint_is_tried_when_one_fails(etcd, join, proxy):
    first = await proxy.start()
    member = await join("127.0.0.1:1", first, etcd.address)
    await member.put("v1/a", b"")
    watch = member.watch("v1/")
    await take(watch, 1)
    proxy.drop()
    proxy.cut()
    await member.put("v1/b", b"")

    assert await take(watch, 1) == [Put(key="v1/b", value=b"")]


async def test_any_server_of_a_cluster_may_die(tmp_path):
    servers = [EtcdServer(tmp_path / name, name=name) for name in ("one", "two", "three")]
    try:
        for server in servers:
            server.cluster = servers
            server.start(wait=False)
        for server in servers:
            await asyncio.to_thread(server.await_health)
        whereto = access.EtcdAccess(addresses=tuple(server.address for server in servers))
        a, b = [await EtcdDiscovery.open(whereto, n, lease_ttl_s=10) for n in (1, 2)]
        watch = b.watch("v1/")
        for number, server in enumerate(servers):
            server.stop()
            await a.put(f"v1/{number}", b"")

            assert await take(watch, 1) == [Put(key=f"v1/{number}", value=b"")]
            server.start(wait=False)
            await asyncio.to_thread(server.await_health)
        await a.close()
        await b.close()
    finally:
        for server in servers:
            server.stop()


async def test_puts_and_deletes_during_an_outage_are_applied_after_it(etcd, join):
    a = await join()
    await a.put("v1/old", b"")
    etcd.stop()
    putting = asyncio.create_task(a.put("v1/new", b""))
    await a.delete("v1/old")
    etcd.start()
    await putting

    await until_there(etcd, {"v1/new"})


async def test_outage_blocks_neither_reads_nor_close(etcd, join, monkeypatch):
    monkeypatch.setattr("dynamo.runtime.backends.etcd.discovery.READ_TIMEOUT_S", 0.5)
    a = await join()
    await a.put("v1/a", b"")
    etcd.stop()

    with pytest.raises(errors.Unavailable, match=r"not done within 0\.5 s: etcd at"):
        await a.get_prefix("v1/")
    async with asyncio.timeout(PATIENT_S):
        await a.close()


async def test_absent_etcd_is_named_once_with_what_to_do(join, unused_tcp_port, caplog):
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(errors.ConfigError, match=r"no etcd within 1 s.*--discovery-backend file"),
    ):
        await join(f"127.0.0.1:{unused_tcp_port}", start_timeout_s=1)

    said = [record.message for record in caplog.records if record.name.startswith("dynamo")]
    assert len(said) == 1
    assert f"127.0.0.1:{unused_tcp_port}" in said[0]
    assert "--discovery-backend file" in said[0]


async def test_etcd_may_start_after_the_member(etcd, join):
    etcd.stop()
    joining = asyncio.create_task(join())
    etcd.start()

    await (await joining).put("v1/a", b"")


async def test_member_cancelled_while_it_waits_for_etcd_ends_at_once(join, unused_tcp_port):
    joining = asyncio.create_task(join(f"127.0.0.1:{unused_tcp_port}"))
    await asyncio.sleep(0)
    joining.cancel()
    async with asyncio.timeout(PATIENT_S):
        await asyncio.wait((joining,))

    assert joining.cancelled()


async def test_too_large_value_is_refused_alone(etcd, join):
    a = await join()
    await a.put("v1/a", b"")
    with pytest.raises(errors.ConfigError, match="expected at most 1048576 bytes"):
        await a.put("v1/large", bytes(4 << 20))

    await a.put("v1/b", b"")
    assert etcd.held().keys() == {"v1/a", "v1/b"}


async def test_refused_value_leaves_the_key_to_its_owner(etcd, join):
    member, other = await join(), await join()
    await member.put("v1/a", b"1")
    await member.put("v1/b", b"1")
    for key in ("v1/a", "v1/b"):
        with pytest.raises(errors.ConfigError):
            await member.put(key, bytes(connection.VALUE_LIMIT + 1))
    await member.delete("v1/b")
    etcd.stop()
    await until(lambda: member._etcd is None)
    etcd.start()
    await member.put("v1/c", b"1")  # when all that it has is written again

    assert await other.get_prefix("v1/") == {"v1/a": b"1", "v1/c": b"1"}


async def test_prefix_is_read_anew_if_it_is_compacted_between_two_pages(etcd, join, monkeypatch):
    monkeypatch.setattr(connection, "PAGE_KEYS", 2)
    member = await join()
    for i in range(5):
        await member.put(f"v1/{i}", b"1")
    read, num_reads = connection.EtcdConnection._call, 0

    async def compact_once(self, method, request, answer):
        nonlocal num_reads
        if method == "KV/Range" and request.limit:
            num_reads += 1
            if num_reads == 2:
                await member.put("v1/5", b"1")
                etcd.compact()
        return await read(self, method, request, answer)

    monkeypatch.setattr(connection.EtcdConnection, "_call", compact_once)

    assert len(await member.get_prefix("v1/")) == 6


async def test_wrong_password_is_refused_at_once(etcd):
    enable_users(etcd)
    for known in ({"username": "root", "password": "wrong"}, {}):
        whereto = access.EtcdAccess(addresses=(etcd.address,), **known)
        with pytest.raises(errors.ConfigError, match="refuses"):
            await EtcdDiscovery.open(whereto, 1)
    whereto = access.EtcdAccess(addresses=(etcd.address,), username="root", password="s3cret")
    member = await EtcdDiscovery.open(whereto, 1)
    await member.put("v1/a", b"a")

    assert await take(member.watch("v1/"), 1) == [Put(key="v1/a", value=b"a")]
    await member.close()


async def test_refused_prefix_disturbs_neither_the_lease_nor_other_watches(
    etcd, caplog, monkeypatch
):
    monkeypatch.setattr(etcd_discovery, "_REFUSED_PAUSE_S", 0.05)
    etcd.call("auth/user/add", name="worker", password="s3cret")
    etcd.call("auth/role/add", name="worker")
    etcd.call("auth/user/grant", user="worker", role="worker")
    allow(etcd, "worker", "v1/")
    enable_users(etcd)
    etcd.log_in("root", "s3cret")
    whereto = access.EtcdAccess(addresses=(etcd.address,), username="worker", password="s3cret")
    member = await EtcdDiscovery.open(whereto, 1)
    refused, others = member.watch("public/"), member.watch("v1/")
    limits, other = (asyncio.ensure_future(anext(watch)) for watch in (refused, others))
    async with asyncio.timeout(PATIENT_S):
        while "stays unknown" not in caplog.text:
            await asyncio.sleep(0.02)
        await member.put("v1/a", b"a")
        assert await other == Put(key="v1/a", value=b"a")
    assert "trying to come back" not in caplog.text

    allow(etcd, "worker", "public/")
    etcd.call("kv/put", key=encoded("public/limits"), value=encoded("1"))
    async with asyncio.timeout(PATIENT_S):
        assert await limits == Put(key="public/limits", value=b"1")
    assert caplog.text.count("stays unknown") == 1
    await member.close()


async def test_refused_key_is_named_and_hinders_no_other_key(etcd, proxy, caplog):
    etcd.call("auth/user/add", name="worker", password="s3cret")
    etcd.call("auth/role/add", name="worker")
    etcd.call("auth/user/grant", user="worker", role="worker")
    for prefix in ("v1/", "other/"):
        allow(etcd, "worker", prefix)
    enable_users(etcd)
    etcd.log_in("root", "s3cret")
    address = await proxy.start()
    whereto = access.EtcdAccess(addresses=(address,), username="worker", password="s3cret")
    member = await EtcdDiscovery.open(whereto, 1, lease_ttl_s=TTL_S)
    for key in ("other/a", "v1/b", "v1/c"):
        await member.put(key, b"")
    proxy.drop()
    await until_there(etcd, set())
    etcd.call("auth/role/revoke", role="worker", key=encoded("other/"), range_end=encoded("other0"))
    proxy.heal()

    await until_there(etcd, {"v1/b", "v1/c"})
    await member.delete("v1/c")
    await until_there(etcd, {"v1/b"})
    assert caplog.text.count("'other/a' is not written: etcd at") == 1
    allow(etcd, "worker", "other/")
    await until_there(etcd, {"v1/b", "other/a"})
    await member.close()


async def test_etcd_without_room_is_followed_on_and_takes_removals(tmp_path, caplog):
    etcd = EtcdServer(tmp_path, "--quota-backend-bytes", str(1 << 20))
    etcd.start()
    try:
        whereto = access.EtcdAccess(addresses=(etcd.address,))
        member, other = [await EtcdDiscovery.open(whereto, number) for number in (1, 2)]
        for key in ("v1/a", "v1/b"):
            await member.put(key, b"1")
        watch = other.watch("v1/")
        await other.put("v1/other", b"1")
        await take(watch, 3)
        with pytest.raises(AssertionError, match="database space exceeded"):
            fill(etcd)
        etcd.stop()
        await until(lambda: member._etcd is None and other._etcd is None)
        etcd.start(wait=False)  # it says that it is not healthy
        await until(lambda: caplog.text.count("is not written: etcd at") == 3)
        await member.delete("v1/b")
        assert await take(watch, 1) == [Delete(key="v1/b")]

        await member.close()
        assert await take(watch, 1) == [Delete(key="v1/a")]
        assert {key for key in etcd.held() if not key.startswith("fill/")} == {"v1/other"}
        await other.close()
    finally:
        etcd.stop()


async def test_member_that_closes_while_it_removes_keys_takes_all_its_keys_away(etcd, join):
    member = await join()
    for number in range(9):
        await member.put(f"v1/{number}", b"")
    removing = [asyncio.create_task(member.delete(f"v1/{number}")) for number in range(5)]
    await asyncio.sleep(0)  # until they have begun
    await member.close()
    await asyncio.gather(*removing)

    assert etcd.held() == {}


async def test_call_on_a_channel_that_was_closed_gets_no_answer(etcd):
    whereto = access.EtcdAccess(addresses=(etcd.address,))
    async with connection.connect(whereto, etcd.address) as etcd_connection:
        pass

    with pytest.raises(errors.Unavailable, match="closed"):
        await etcd_connection.delete("v1/a", after=1)


@pytest.mark.parametrize("is_cut", [False, True], ids=["silent", "cut"])
async def test_call_that_gets_no_answer_cancels_nothing_but_itself(
    etcd, proxy, monkeypatch, is_cut
):
    address = await proxy.start()
    async with connection.connect(access.EtcdAccess(addresses=(address,)), address) as direct:
        proxy.drop()
        monkeypatch.setattr(connection, "CALL_S", PATIENT_S if is_cut else 0.2)
        if is_cut:
            asyncio.get_running_loop().call_later(0.05, proxy.cut)
        with pytest.raises(errors.Unavailable, match=f"etcd at {address}: "):
            await direct.check()

    assert asyncio.current_task().cancelling() == 0
    async with asyncio.timeout(PATIENT_S), asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))


async def test_caller_who_is_cancelled_ends_the_call(proxy):
    address = await proxy.start()
    async with connection.connect(access.EtcdAccess(addresses=(address,)), address) as direct:
        others = asyncio.all_tasks()
        proxy.drop()
        calling = asyncio.create_task(direct.check())
        while len(asyncio.all_tasks() - others) < 2:
            await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait((calling,))

        assert calling.cancelled()
        assert asyncio.all_tasks() == others


async def test_certificates_authenticate_both_sides(tmp_path):
    environ = make_certificates(tmp_path)
    flags = ("--cert-file", tmp_path / "server.pem", "--key-file", tmp_path / "server.key")
    flags += ("--trusted-ca-file", tmp_path / "ca.pem", "--client-cert-auth")
    server = EtcdServer(tmp_path / "etcd", *flags, scheme="https")
    server.start(wait=False)
    try:
        member = await EtcdDiscovery.open(access.read([server.url], environ), 1)
        await member.put("v1/a", b"a")

        assert await member.get_prefix("v1/") == {"v1/a": b"a"}
        await member.close()

        stranger = access.read([server.url], {"ETCD_AUTH_CA": environ["ETCD_AUTH_CA"]})
        with pytest.raises(errors.ConfigError, match=r"no etcd within 5 s.*ETCD_AUTH_CLIENT_CERT"):
            await EtcdDiscovery.open(stranger, 2, start_timeout_s=5)
        plain = access.read([server.address], {})
        with pytest.raises(errors.ConfigError, match=r"no etcd within 5 s.*may want TLS: https://"):
            await EtcdDiscovery.open(plain, 2, start_timeout_s=5)
    finally:
        server.stop()


async def test_expired_auth_token_is_renewed(tmp_path):
    subprocess.run(
        ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "key"],
        cwd=tmp_path,
        check=True,
    )
    subprocess.run(
        ["openssl", "ec", "-in", "key", "-pubout", "-out", "pub"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    keys = f"pub-key={tmp_path / 'pub'},priv-key={tmp_path / 'key'}"
    token = f"jwt,{keys},sign-method=ES256,ttl=1s"
    server = EtcdServer(tmp_path / "etcd", "--auth-token", token)
    server.start()
    try:
        enable_users(server)
        whereto = access.EtcdAccess(addresses=(server.address,), username="root", password="s3cret")
        member = await EtcdDiscovery.open(whereto, 1)
        await asyncio.sleep(1.5)  # until the token is over
        await member.put("v1/a", b"a")

        assert await member.get_prefix("v1/") == {"v1/a": b"a"}
        await member.close()
    finally:
        server.stop()


def fill(server):
    """Write keys until there is no room."""
    for number in itertools.count():
        server.call("kv/put", key=encoded(f"fill/{number}"), value=encoded("x" * 50_000))


def allow(server, role, prefix):
    """Let a role read and write all keys below a prefix that ends in a slash."""
    end = prefix[:-1] + "0"  # the character after the slash
    right = {"permType": "READWRITE", "key": encoded(prefix), "range_end": encoded(end)}
    server.call("auth/role/grant", name=role, perm=right)


def encoded(text):
    return base64.b64encode(text.encode()).decode()


def enable_users(server):
    server.call("auth/user/add", name="root", password="s3cret")
    server.call("auth/role/add", name="root")
    server.call("auth/user/grant", user="root", role="root")
    server.call("auth/enable")


def make_certificates(directory):
    """An authority, a server's and a client's; the variables that name the latter."""

    def openssl(*argv):
        subprocess.run(["openssl", *argv], cwd=directory, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    (directory / "san").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("req", *curve, *request)
        authority = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san")
        openssl("x509", "-req", "-in", f"{name}.csr", *authority, "-out", f"{name}.pem")
    files = {"CA": "ca.pem", "CLIENT_CERT": "client.pem", "CLIENT_KEY": "client.key"}
    return {f"ETCD_AUTH_{name}": str(directory / file) for name, file in files.items()}


@pytest.fixture
async def runtimes(etcd, proxy, monkeypatch):
    """Two runtimes over TCP: a worker that reaches etcd through the proxy, and a client."""
    monkeypatch.setattr(
        EtcdDiscovery, "open", functools.partial(EtcdDiscovery.open, lease_ttl_s=TTL_S)
    )
    monkeypatch.setattr(etcd_discovery, "UNCONFIRMED_S", 1.0)
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                await component.DistributedRuntime.open(
                    component.RuntimeConfig(
                        discovery_backend="etcd", etcd_endpoints=(address,), event_plane="memory"
                    )
                )
            )
            for address in (await proxy.start(), etcd.address)
        ]


async def serve_echo(runtime):
    def echo(call):
        call.reply("here")
        call.finish()

    return await runtime.register(ECHO, echo)


async def until_etcd_has_lost(etcd, key):
    async with asyncio.timeout(PATIENT_S):
        while key in await asyncio.to_thread(etcd.held):
            await asyncio.sleep(0.02)


async def test_worker_that_etcd_has_lost_is_asked_while_it_answers(runtimes, etcd, proxy):
    worker, asker = runtimes
    instance = await serve_echo(worker)
    client = asker.client(ECHO)
    await client.wait_for_instances(PATIENT_S)
    assert await client.call("", reply_type=str) == "here"

    proxy.drop()
    await until_etcd_has_lost(etcd, instance.key)
    await asyncio.sleep(2.0)  # longer than an unknown owner is kept

    assert await client.call("", reply_type=str) == "here"
    await worker.requests.close()
    async with asyncio.timeout(PATIENT_S):
        while client.instances:
            await asyncio.sleep(0.02)


async def test_worker_that_was_never_asked_is_found_alive_after_etcd_has_lost_it(
    runtimes, etcd, proxy
):
    worker, asker = runtimes
    instance = await serve_echo(worker)
    client = asker.client(ECHO)
    await client.wait_for_instances(PATIENT_S)

    proxy.drop()
    await until_etcd_has_lost(etcd, instance.key)
    await asyncio.sleep(2.0)

    assert await client.call("", reply_type=str) == "here"
