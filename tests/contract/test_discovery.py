"""What every Discovery promises, run over each of them."""

import asyncio
import itertools
import subprocess
import sys

import pytest

from dynamo.base import errors
from dynamo.runtime.backends import file, memory
from dynamo.runtime.backends.etcd import access
from dynamo.runtime.backends.etcd import discovery as etcd_discovery
from dynamo.runtime.backends.etcd.discovery import EtcdDiscovery
from dynamo.runtime.backends.kubernetes import discovery as kubernetes_discovery
from dynamo.runtime.discovery import Delete, Put
from etcd_server import EtcdServer
from played_pods import PlayedPods
from tcp_proxy import TcpProxy
from waiting import PATIENT_S

MORTAL = """
import pathlib, signal, sys
from dynamo.runtime.backends import lease_directory
directory = lease_directory.LeaseDirectory(pathlib.Path(sys.argv[1]), "dead")
directory.acquire()
for key in sys.argv[2:]:
    directory.write(key, b"{}")
print("ready", flush=True)
signal.pause()
"""

ETCD_TTL_S = 2  # the least that etcd grants, for members that are to die or be lost
MORTAL_IN_ETCD = """
import asyncio, sys
from dynamo.runtime.backends.etcd import access
from dynamo.runtime.backends.etcd.discovery import EtcdDiscovery
async def main():
    whereto = access.EtcdAccess(addresses=(sys.argv[1],))
    mortal = await EtcdDiscovery.open(whereto, int(sys.argv[2]), lease_ttl_s=int(sys.argv[3]))
    for key in sys.argv[4:]:
        await mortal.put(key, b"{}")
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def start_process(argv, processes):
    """A mortal, ready; how to kill it."""
    process = subprocess.Popen([sys.executable, "-c", *argv], stdout=subprocess.PIPE)
    processes.append(process)
    assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"

    def kill():
        process.kill()
        process.wait()

    return kill


def end_processes(processes):
    for process in processes:
        process.kill()
        process.communicate()


class MemoryHost:
    """Where members of one cluster live."""

    def __init__(self, request):
        self._cluster = memory.MemoryRegistry()
        self._members = []

    async def join(self):
        self._members.append(memory.MemoryDiscovery(self._cluster))
        return self._members[-1]

    async def start_mortal(self, *keys):
        """An owner of keys, and how to kill it."""
        mortal = await self.join()
        for key in keys:
            await mortal.put(key, b"{}")
        return mortal.kill

    async def close(self):
        for member in self._members:
            await member.close()


class FileHost:
    """The same, with a directory; the mortal is a process."""

    def __init__(self, request):
        self._directory = request.getfixturevalue("tmp_path") / "kv"
        self._ids = itertools.count(1)
        self._members = []
        self._processes = []

    async def join(self):
        self._members.append(await file.FileDiscovery.open(self._directory, next(self._ids)))
        return self._members[-1]

    async def start_mortal(self, *keys):
        return await start_process([MORTAL, self._directory, *keys], self._processes)

    async def close(self):
        end_processes(self._processes)
        await asyncio.gather(*(member.close() for member in self._members))


class EtcdHost:
    """The same, with a real etcd; the dead keep their keys until their lease ends."""

    def __init__(self, request):
        self._server = request.getfixturevalue("etcd")
        self._proxy = TcpProxy(self._server.port)
        self._ids = itertools.count(1)
        self._members = []
        self._processes = []

    async def join(self, address=None, lease_ttl_s=etcd_discovery.LEASE_TTL_S, **options):
        whereto = access.EtcdAccess(addresses=(address or self._server.address,))
        options["lease_ttl_s"] = lease_ttl_s
        member = await EtcdDiscovery.open(whereto, next(self._ids), **options)
        self._members.append(member)
        return member

    async def join_to_be_lost(self):
        """A member, and how to cut it off, so that its lease ends."""
        return await self.join(await self._proxy.start(), ETCD_TTL_S), self._proxy.drop

    async def start_mortal(self, *keys):
        argv = [MORTAL_IN_ETCD, self._server.address, str(next(self._ids)), str(ETCD_TTL_S), *keys]
        return await start_process(argv, self._processes)

    async def close(self):
        end_processes(self._processes)
        self._proxy.heal()
        await asyncio.gather(*(member.close() for member in self._members))
        await self._proxy.close()
        self._server.wipe()


class KubernetesHost:
    """The same, with the objects of a cluster; the mortal's container ends, and its pod is no longer ready."""

    def __init__(self, request):
        self._pods = PlayedPods()
        self._ids = itertools.count(1)

    async def join(self, **options):
        return await self._pods.start(f"pod-{next(self._ids)}", **options)

    async def join_to_be_lost(self):
        """A member, and how to make its pod unready, though its process lives."""
        name = f"pod-{next(self._ids)}"
        return await self._pods.start(name), lambda: self._pods.set_ready(name, False)

    async def start_mortal(self, *keys):
        name = f"pod-{next(self._ids)}"
        mortal = await self._pods.start(name)
        for key in keys:
            await mortal.put(key, b"{}")
        return lambda: self._pods.crash(name)

    async def close(self):
        await self._pods.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(
    params=[MemoryHost, FileHost, EtcdHost, KubernetesHost],
    ids=["memory", "file", "etcd", "kubernetes"],
)
async def host(request):
    host = request.param(request)
    yield host
    await host.close()


@pytest.fixture(params=[EtcdHost, KubernetesHost], ids=["etcd", "kubernetes"])
async def remote_host(request):
    """A host that can lose a member that lives; a file's lock and this memory are lost with their process only."""
    host = request.param(request)
    yield host
    await host.close()


async def take(watch, count):
    """The next changes of a watch."""
    async with asyncio.timeout(PATIENT_S):
        return [await anext(watch) for _ in range(count)]


async def test_member_sees_its_own_keys_and_those_of_others(host):
    a, b = await host.join(), await host.join()
    await a.put("v1/instances/x/1", b"one")
    await b.put("v1/instances/x/2", b"\x00\xff\n")
    await b.put("v1/mdc/x/2", b"card")

    assert await a.get_prefix("v1/instances/") == {
        "v1/instances/x/1": b"one",
        "v1/instances/x/2": b"\x00\xff\n",
    }
    assert await b.get_prefix("v1/instances/") == await a.get_prefix("v1/instances/")
    assert await a.get_prefix("v2/") == {}


async def test_second_put_replaces_the_value(host):
    a = await host.join()
    await a.put("k", b"old")
    await a.put("k", b"new")

    assert await a.get_prefix("k") == {"k": b"new"}


async def test_delete_removes_a_key_and_ignores_an_absent_one(host):
    a = await host.join()
    await a.put("k", b"value")
    await a.delete("k")
    await a.delete("k")

    assert await a.get_prefix("") == {}


async def test_member_cannot_delete_keys_of_another(host):
    a, b = await host.join(), await host.join()
    await a.put("k", b"value")
    await b.delete("k")

    assert await b.get_prefix("") == {"k": b"value"}


async def test_watch_yields_a_snapshot_and_then_changes_in_order(host):
    a, b = await host.join(), await host.join()
    await a.put("v1/1", b"one")
    await a.put("v1/2", b"two")
    watch = b.watch("v1/")
    snapshot = await take(watch, 2)
    changes = []
    for change in (
        a.put("v1/3", b"three"),
        a.put("v1/1", b"uno"),
        a.delete("v1/2"),
        b.put("v1/2", b"dos"),
    ):
        await change
        changes += await take(watch, 1)

    assert sorted(snapshot, key=lambda put: put.key) == [
        Put(key="v1/1", value=b"one"),
        Put(key="v1/2", value=b"two"),
    ]
    assert changes == [
        Put(key="v1/3", value=b"three"),
        Put(key="v1/1", value=b"uno"),
        Delete(key="v1/2"),
        Put(key="v1/2", value=b"dos"),
    ]


async def test_watch_yields_its_prefix_only(host):
    a = await host.join()
    await a.put("v1/instances/1", b"")
    watch = a.watch("v1/mdc/")
    await a.put("v1/instances/2", b"")
    await a.put("v1/mdc/1", b"card")

    assert await take(watch, 1) == [Put(key="v1/mdc/1", value=b"card")]


async def test_slow_watch_ends_with_the_current_state(host):
    a, b = await host.join(), await host.join()
    watch = b.watch("k")
    await a.put("k1", b"0")
    seen = {change.key: change for change in await take(watch, 1)}
    for round_ in range(10):
        await a.put("k1", b"%d" % round_)
        await a.put("k2", b"%d" % round_)
    await a.delete("k1")
    await a.put("k3", b"end")
    while "k3" not in seen:
        seen |= {change.key: change for change in await take(watch, 1)}
    while seen["k1"] != Delete(key="k1") or seen["k2"] != Put(key="k2", value=b"9"):
        seen |= {change.key: change for change in await take(watch, 1)}

    assert await b.get_prefix("k") == {"k2": b"9", "k3": b"end"}


async def test_closed_watch_does_not_affect_others(host):
    a = await host.join()
    ended, lasting = a.watch("k"), a.watch("k")
    await a.put("k1", b"")
    await take(ended, 1)
    await take(lasting, 1)
    waiting = asyncio.ensure_future(anext(ended))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    await a.put("k2", b"")

    assert waiting.cancelled()
    assert await take(lasting, 1) == [Put(key="k2", value=b"")]


async def test_leaving_member_removes_its_keys(host):
    a, b = await host.join(), await host.join()
    await a.put("a", b"")
    await b.put("b", b"")
    watch = b.watch("a")
    await take(watch, 1)
    await a.close()

    assert await b.get_prefix("") == {"b": b""}
    assert await take(watch, 1) == [Delete(key="a")]


async def test_closed_member_refuses_puts_and_closes_twice(host):
    a = await host.join()
    await a.close()
    await a.close()

    with pytest.raises(errors.LocalProtocolError, match="closed"):
        await a.put("k", b"")


async def test_keys_of_a_killed_member_expire(host):
    kill = await host.start_mortal("v1/x/dead", "v1/y/dead")
    a, b = await host.join(), await host.join()
    await b.put("v1/x/alive", b"{}")
    watches = [a.watch("v1/"), b.watch("v1/")]
    for watch in watches:
        await take(watch, 3)
    kill()
    async with asyncio.timeout(PATIENT_S):
        told = [await take(watch, 2) for watch in watches]

    for changes in told:
        assert set(changes) == {Delete(key="v1/x/dead"), Delete(key="v1/y/dead")}


async def test_snapshot_omits_keys_of_dead_members(host):
    kill = await host.start_mortal("v1/x/dead")
    a = await host.join()
    assert await a.get_prefix("") == {"v1/x/dead": b"{}"}

    kill()
    if isinstance(host, EtcdHost):  # which knows of the death when the lease ends
        await take(a.watch(""), 2)
    late = await host.join()
    await late.put("v1/x/late", b"{}")

    assert await late.get_prefix("") == {"v1/x/late": b"{}"}
    assert await take(late.watch(""), 1) == [Put(key="v1/x/late", value=b"{}")]


async def lose_owner(host, is_alive):
    """Let discovery lose the living owner of a key; return the watch of a reader that judges by `is_alive`."""
    reader, bystander = await host.join(is_alive=lambda _key, _value: is_alive()), await host.join()
    owner, lose = await host.join_to_be_lost()
    await owner.put("v1/lost", b"1")
    watch, seen = reader.watch("v1/"), bystander.watch("v1/")
    for each in (watch, seen):
        await take(each, 1)
    lose()
    assert await take(seen, 1) == [Delete(key="v1/lost")]
    return watch


async def test_key_that_discovery_has_lost_stays_until_its_owner_answers_no_more(remote_host):
    answers = iter([True] * 3)
    watch = await lose_owner(remote_host, lambda: next(answers, False))
    changes = await take(watch, 1)
    while changes[-1] != Delete(key="v1/lost"):  # it may be said first that it is not confirmed
        changes += await take(watch, 1)

    assert not list(answers)  # it stayed as long as these lasted
    assert changes[:-1] in ([], [Put(key="v1/lost", value=b"1", is_confirmed=False)])


async def test_lost_key_of_an_unknown_owner_vanishes_after_a_while(remote_host, monkeypatch):
    for module in (etcd_discovery, kubernetes_discovery):
        monkeypatch.setattr(module, "UNCONFIRMED_S", 0.05)
    watch = await lose_owner(remote_host, lambda: None)
    changes = await take(watch, 1)
    while changes[-1] != Delete(key="v1/lost"):  # a slow watcher misses that it was doubted
        changes += await take(watch, 1)

    assert changes[:-1] in ([], [Put(key="v1/lost", value=b"1", is_confirmed=False)])


async def test_key_that_its_owner_deletes_vanishes_though_the_owner_answers(remote_host):
    reader, owner = (
        await remote_host.join(is_alive=lambda _key, _value: True),
        await remote_host.join(),
    )
    await owner.put("v1/left", b"1")
    watch = reader.watch("v1/")
    await take(watch, 1)
    await owner.delete("v1/left")

    assert await take(watch, 1) == [Delete(key="v1/left")]
