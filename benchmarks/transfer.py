"""KV blocks between two processes, beside the plainest copies of the same bytes in the same run.

`shm` beside a memcpy within one process, `tcp` beside a loop of `sendall` and `recv_into` over one loopback connection,
and, where it is installed, `nixl` beside the memcpy: our backend on the real library (UCX on one host reads by CMA).
The pool is that of a model with 16 layers and 8 KV heads of 128 in bfloat16: a block of 16 tokens is 1 MiB, 64 KiB per
layer. *Neighbours* are blocks in a row, *scattered* ones random. Everything takes turns, so that a busy machine is busy
for all. Each process keeps to a CPU of its own, as two busy workers do: on one CPU a plain loop over TCP is twice as
fast as on two, and left alone the scheduler changes its mind (`--loose`). CPU seconds are those of both processes
together, medians of the rounds; on a shared machine they are the figure to trust. Wall seconds are medians, and the
best behind the comma. At last, how late the event loop is while blocks are pulled without a pause: the inter-token
latency of the others pays for it.
"""

import argparse
import asyncio
import ctypes
import importlib
import importlib.util
import multiprocessing
import os
import random
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from benchmarks import credentials
from dynamo.transfer import agent, api, descriptors, memory
from dynamo.transfer.backends import shm, tcp

MIB = 2**20
LAYOUT = descriptors.Layout(
    num_blocks=256,
    block_size=16,
    num_layers=16,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
)
DEADLINE_S = 30.0
TICK_S = 0.001
LATENESS_TICKS = 500
SHORT_BYTES = 256 * 1024  # as `backends.tcp` sets it on loopback
WAYS = ("shm", "tcp", "tls", *(("nixl",) if importlib.util.find_spec("nixl") else ()))
Copy = Callable[[], Awaitable[None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--loose", action="store_true", help="let the scheduler place the two processes"
    )
    asked = parser.parse_args()
    with credentials.prepared():
        run(asked.rounds, is_loose=asked.loose)


def run(rounds: int, *, is_loose: bool) -> None:
    cpus = [None, None] if is_loose else sorted(os.sched_getaffinity(0))[:2] * 2
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, cpus[1]))
    peer.start()
    try:
        asyncio.run(measure(ours, rounds, cpus[0]))
    finally:
        ours.send("stop")
        peer.join()


def keep_to(cpu: int | None) -> None:
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})


def serve(control: Connection, cpu: int | None) -> None:
    """The other process: an agent per backend, and the loop that answers the plain copies."""
    keep_to(cpu)
    asyncio.run(_serve(control))


async def _serve(control: Connection) -> None:
    agents = [await start(way) for way in WAYS]
    ports = [answering_port(num_buffered) for num_buffered in (None, SHORT_BYTES)]
    control.send(([a.export_metadata() for a in agents], ports, os.getpid()))
    await asyncio.to_thread(control.recv)
    for each in agents:
        await each.close()


async def start(way: str) -> agent.TransferAgent:
    """One with a pool full of bytes."""
    made = agent.TransferAgent(way, backends=[make_backend(way)])
    pool = made.allocate(LAYOUT.num_bytes)
    pool[:] = random.Random(7).randbytes(MIB) * (len(pool) // MIB)
    made.register(descriptors.Region(memory=pool, layout=LAYOUT))
    await made.start()
    return made


def make_backend(way: str) -> api.Backend:
    if way == "nixl":
        return importlib.import_module("dynamo.transfer.backends.nixl").NixlBackend()
    shown = credentials.of("tls" if way == "tls" else "open")
    return shm.ShmBackend() if way == "shm" else tcp.TcpBackend(credentials=shown)


def answering_port(num_buffered: int | None) -> int:
    listening = socket.create_server(("127.0.0.1", 0))
    if num_buffered is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_buffered)
    threading.Thread(target=answer_plainly, args=(listening,), daemon=True).start()
    return int(listening.getsockname()[1])


def answer_plainly(listening: socket.socket) -> None:
    """Whoever sends a length gets so many bytes."""
    sock, _ = listening.accept()
    source = memoryview(bytearray(random.Random(7).randbytes(MIB) * 64))
    while asked := sock.recv(8, socket.MSG_WAITALL):
        sock.sendall(source[: int.from_bytes(asked)])


async def measure(control: Connection, rounds: int, cpu: int | None) -> None:
    allowed = os.sched_getaffinity(0)
    keep_to(cpu)
    metadata, ports, peer_pid = await asyncio.to_thread(control.recv)
    agents = {way: await start(way) for way in WAYS}
    peers = {
        way: await mine.connect(theirs, deadline_s=DEADLINE_S)
        for (way, mine), theirs in zip(agents.items(), metadata, strict=True)
    }
    plain, short = (socket.create_connection(("127.0.0.1", port)) for port in ports)
    print(
        "| bytes | copy | CPU ms | CPU, of plain | wall ms | wall, of plain |\n|---|---|---|---|---|---|"
    )
    for num_blocks in (2, 64):
        copies = {
            "memcpy": memcpy(num_blocks * MIB),
            "sendall, recv_into": receive_plainly(plain, num_blocks * MIB),
            "the same, short send buffer": receive_plainly(short, num_blocks * MIB),
        }
        for way, mine in agents.items():
            for word, is_scattered in (("neighbours", False), ("scattered", True)):
                copies[f"{way}, {word}"] = pull(
                    mine, peers[way], num_blocks, is_scattered=is_scattered
                )
        repeats = 64 // num_blocks
        report(num_blocks * MIB, await take_turns(copies, rounds, repeats, peer_pid))
    plain.close()
    short.close()
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), allowed)
    print("\n| pulling | event loop late by, ms: median | p99 |\n|---|---|---|")
    for way, mine in agents.items():
        await report_lateness(way, mine, peers[way])
    for mine in agents.values():
        await mine.close()


@dataclass(frozen=True)
class Taken:
    """Seconds of one copy, a value per round."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


async def take_turns(
    copies: dict[str, Copy], rounds: int, repeats: int, peer_pid: int
) -> dict[str, Taken]:
    taken = {name: Taken() for name in copies}
    for turn in range(rounds + 1):
        for name, copy in copies.items():
            cpu, wall = cpu_s(peer_pid), time.perf_counter()
            for _ in range(repeats):
                await copy()
            if turn:  # the first one touches the pages
                taken[name].wall.append((time.perf_counter() - wall) / repeats)
                taken[name].cpu.append((cpu_s(peer_pid) - cpu) / repeats)
    return taken


def cpu_s(peer_pid: int) -> float:
    """Of this process and the peer so far: Linux names the clock of a process by its id (clock_getcpuclockid)."""
    return time.process_time() + time.clock_gettime((~peer_pid << 3) | 2)


def report(num_bytes: int, taken: dict[str, Taken]) -> None:
    for name, times in taken.items():
        plain = taken[
            "memcpy" if name.startswith(("memcpy", "shm", "nixl")) else "sendall, recv_into"
        ]
        cpu, wall = statistics.median(times.cpu), statistics.median(times.wall)
        of_cpu, of_wall = statistics.median(plain.cpu) / cpu, statistics.median(plain.wall) / wall
        best, of_best = min(times.wall), min(plain.wall) / min(times.wall)
        print(
            f"| {num_bytes // MIB} MiB | {name} | {cpu * 1e3:.3f} | {of_cpu:.2f}"
            f" | {wall * 1e3:.3f}, {best * 1e3:.3f} | {of_wall:.2f}, {of_best:.2f} |"
        )


async def report_lateness(way: str, mine: agent.TransferAgent, peer: agent.ConnectedPeer) -> None:
    copy = pull(mine, peer, LAYOUT.num_blocks, is_scattered=True)
    copying = asyncio.create_task(repeat(copy))
    late_s = []
    for _ in range(LATENESS_TICKS):
        began = time.perf_counter()
        await asyncio.sleep(TICK_S)
        late_s.append(time.perf_counter() - began - TICK_S)
    copying.cancel()
    await asyncio.wait([copying])
    assert copying.cancelled(), copying.exception()
    p50, p99 = (statistics.quantiles(late_s, n=100)[i - 1] * 1e3 for i in (50, 99))
    print(f"| {way}, scattered | {p50:.2f} | {p99:.2f} |")


async def repeat(copy: Copy) -> None:
    while True:
        await copy()


def memcpy(num_bytes: int) -> Copy:
    target, source = (memory.Window(memory.private(64 * MIB)) for _ in range(2))
    source.view[:] = b"x" * len(source.view)

    async def copy() -> None:
        ctypes.memmove(target.address, source.address, num_bytes)

    return copy


def pull(
    mine: agent.TransferAgent, peer: agent.ConnectedPeer, num_blocks: int, *, is_scattered: bool
) -> Copy:
    chosen = random.Random(num_blocks).sample(range(LAYOUT.num_blocks), num_blocks)
    remote = chosen if is_scattered else range(num_blocks)
    transfer = mine.prepare(api.TransferOperation.READ, peer, range(num_blocks), remote)

    async def copy() -> None:
        await transfer.post(deadline_s=DEADLINE_S)

    return copy


def receive_plainly(sock: socket.socket, num_bytes: int) -> Copy:
    target = memoryview(bytearray(num_bytes))

    async def copy() -> None:
        sock.sendall(num_bytes.to_bytes(8))
        num_received = 0
        while num_received < num_bytes:
            num_received += sock.recv_into(target[num_received:])

    return copy


if __name__ == "__main__":
    main()
