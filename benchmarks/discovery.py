"""What discovery costs, by etcd and by files: `python -m benchmarks.discovery`, with etcd installed.

Rates of writing; then a real frontend beside 1,000 workers that are
cloned from a real one's records: how long until it knows them all, and what it and etcd take when nothing happens.
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.systems import free_port
from dynamo.runtime.backends import file
from dynamo.runtime.backends.etcd import access, connection, discovery
from dynamo.runtime.discovery import REMOVED, Discovery

NUM_PUTS = 3_000
NUM_ROUNDS = 5
NUM_INSTANCES = 1_000
NUM_JOINING = 200
NUM_CHANGES = 10_000
IDLE_S = 30.0
LEASE_ID, LEASE_S = 1_000_000, 600
Join = Callable[[int], Awaitable[Discovery]]
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        etcd, address = stack.enter_context(_etcd(Path(directory)))
        asyncio.run(_puts(address))
        whereto, files = access.EtcdAccess(addresses=(address,)), Path(directory) / "kv"

        async def join_etcd(number: int) -> Discovery:
            return await discovery.EtcdDiscovery.open(whereto, number)

        async def join_files(number: int) -> Discovery:
            return await file.FileDiscovery.open(files, number)

        asyncio.run(_joins(join_etcd))
        asyncio.run(_changes("etcd", join_etcd))
        asyncio.run(_changes("file", join_files))
        asyncio.run(_fleets("etcd", _by_etcd(address)))
        asyncio.run(_fleets("file", {"DYN_FILE_KV": str(files), "DYN_LOG": "warn"}))
        asyncio.run(_among_many(stack, etcd, address))


@contextmanager
def _etcd(directory: Path) -> Iterator[tuple[int, str]]:
    """A server: its process id and its address."""
    address, peer = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    url = f"http://{address}"
    argv = ["etcd", "--data-dir", str(directory), "--listen-client-urls", url]
    argv += ["--advertise-client-urls", url, "--listen-peer-urls", peer]
    argv += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    with _process(argv, {}) as process:
        _await(f"{url}/health", lambda answer: answer["health"] == "true")
        yield process.pid, address


@contextmanager
def _process(argv: list[str], environ: dict[str, str]) -> "Iterator[subprocess.Popen[bytes]]":
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(argv, env=os.environ | environ, stdout=quiet, stderr=quiet)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def _puts(address: str) -> None:
    async with _connected(address) as etcd:
        await etcd.grant(LEASE_ID, LEASE_S)
        keys = (f"bench/{n}" for n in itertools.count())
        for num_at_once in (1, 32):
            cell = [
                await _rate(
                    lambda _: etcd.put(next(keys), b"x" * 200, LEASE_ID, after=0), num_at_once
                )
                for _ in range(NUM_ROUNDS)
            ]
            rates, costs = zip(*cell, strict=True)
            print(
                f"{num_at_once} at once: {max(rates):,.0f} ({_median(rates):,.0f}) puts/s,"
                f" {min(costs):.0f} ({_median(costs):.0f}) µs of client CPU each"
            )


async def _rate(put: Callable[[int], Awaitable[object]], num_at_once: int) -> tuple[float, float]:
    """Per second, and microseconds of our CPU each."""
    began, cpu = time.monotonic(), time.process_time()
    for start in range(0, NUM_PUTS, num_at_once):
        await asyncio.gather(*(put(n) for n in range(start, start + num_at_once)))
    cost_s = time.process_time() - cpu
    return NUM_PUTS / (time.monotonic() - began), 1e6 * cost_s / NUM_PUTS


async def _joins(join: Join) -> None:
    """What one watcher hears of, when many come at once; all of them live in this process."""
    watcher = await join(1)
    watch = watcher.watch("v1/")
    began = time.monotonic()
    members = await asyncio.gather(*(join(2 + n) for n in range(NUM_JOINING)))
    await asyncio.gather(*(member.put(f"v1/{n}", b"x") for n, member in enumerate(members)))
    await _hear(watch, NUM_JOINING)
    print(f"{NUM_JOINING} members joined, all told, in {time.monotonic() - began:.2f} s")
    await asyncio.gather(*(member.close() for member in members))
    await watch.aclose()
    await watcher.close()


async def _changes(backend: str, join: Join) -> None:
    """And when one that holds many keys comes and goes."""
    watcher, owner = await join(1), await join(2)
    watch = watcher.watch("v1/")
    hearing = asyncio.ensure_future(_hear(watch, NUM_CHANGES))
    for start in range(0, NUM_CHANGES, 500):
        keys = [f"v1/{n}" for n in range(start, start + 500)]
        await asyncio.gather(*(owner.put(key, b"x" * 200) for key in keys))
    began = time.monotonic()
    await hearing
    told = f"{NUM_CHANGES} keys: all told {time.monotonic() - began:.2f} s after the last came"
    began = time.monotonic()
    leaving = asyncio.ensure_future(owner.close())
    await _hear(watch, NUM_CHANGES)
    print(f"{backend}, {told}, and {time.monotonic() - began:.2f} s after their owner began to go")
    await leaving
    await watch.aclose()
    await watcher.close()


async def _fleets(backend: str, environ: dict[str, str]) -> None:
    """Two hundred simulated workers of one process, and a frontend that is there."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "dynamo.frontend", "--http-port", str(port)]
    with _process(argv, environ):
        await asyncio.to_thread(_await, f"{url}/live", lambda _: True)
        argv = [sys.executable, "-m", "dynamo.mocker", "--num-workers", str(NUM_JOINING)]
        began = time.monotonic()
        with _process(argv, environ):
            await asyncio.to_thread(
                _await, f"{url}/health", lambda health: _num_known(health) == NUM_JOINING
            )
            took_s = time.monotonic() - began
    print(f"{backend}: a frontend knows {NUM_JOINING} workers {took_s:.2f} s after their start")


async def _hear(watch: AsyncIterator[object], number: int) -> None:
    for _ in range(number):
        await anext(watch)


async def _among_many(stack: ExitStack, etcd: int, address: str) -> None:
    environ = _by_etcd(address)
    worker = [sys.executable, "-m", "dynamo.mocker"]
    template = stack.enter_context(_process(worker, environ))
    async with _connected(address) as direct:
        keys = await _records(direct)
        idle = _cpu_s(etcd)
        await asyncio.sleep(IDLE_S)
        print(f"etcd with one worker: {100 * (_cpu_s(etcd) - idle) / IDLE_S:.2f} % of a core")
        await _clone(direct, keys)
        port = free_port()
        argv = [sys.executable, "-m", "dynamo.frontend", "--http-port", str(port)]
        began = time.monotonic()
        frontend = stack.enter_context(_process(argv, environ))
        await asyncio.to_thread(_await, f"http://127.0.0.1:{port}/health", _knows_all)
        print(f"a frontend knows {NUM_INSTANCES} instances after {time.monotonic() - began:.2f} s,")
        print(f"  {_cpu_s(frontend.pid):.2f} s of CPU since its start")
        before = _cpu_s(frontend.pid), _cpu_s(etcd), _cpu_s(template.pid)
        await asyncio.sleep(IDLE_S)
        after = _cpu_s(frontend.pid), _cpu_s(etcd), _cpu_s(template.pid)
        for name, b, a in zip(("frontend", "etcd", "one worker"), before, after, strict=True):
            print(f"  idle, {name}: {100 * (a - b) / IDLE_S:.2f} % of a core")


async def _records(direct: connection.EtcdConnection) -> dict[str, bytes]:
    """What the real worker has put, once it has put all."""
    watch = direct.watch("v1/mdc/", 1)
    await anext(watch)
    await watch.aclose()
    records, _ = await direct.read("v1/")
    return {key: value for key, value in records.items() if value != REMOVED}


async def _clone(direct: connection.EtcdConnection, keys: dict[str, bytes]) -> None:
    """Under one lease, so that etcd's idle time is that of one worker's keepalive and a frontend's."""
    for n in range(1, NUM_INSTANCES):
        for key, value in keys.items():
            record = json.loads(value) | {"instance_id": n}
            cloned = f"{key.rpartition('/')[0]}/{n:x}"
            await direct.put(cloned, json.dumps(record).encode(), LEASE_ID, after=0)


def _await(url: str, is_so: Callable[[Any], bool]) -> None:
    """Until the JSON that is there is so."""
    while True:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(url, timeout=5) as answer,
        ):
            if is_so(json.load(answer)):
                return
        time.sleep(0.05)


def _knows_all(health: Any) -> bool:
    return _num_known(health) >= NUM_INSTANCES


def _num_known(health: Any) -> int:
    return len({i["instance_id"] for i in health["instances"] if i["endpoint"] == "generate"})


def _by_etcd(address: str) -> dict[str, str]:
    return {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": address, "DYN_LOG": "warn"}


def _connected(address: str):
    return connection.connect(access.EtcdAccess(addresses=(address,)), address)


def _cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _median(values: tuple[float, ...]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
