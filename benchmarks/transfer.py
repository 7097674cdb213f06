"""KV blocks between two processes, beside the plainest copies of the same bytes in the same run.

`shm` beside a memcpy within one process, `tcp` beside a loop of `sendall` and `recv_into` over one loopback connection. The
pool is that of a model with 16 layers and 8 KV heads of 128 in bfloat16: a block of 16 tokens is 1 MiB, 64 KiB per layer.
Everything takes turns, so that a busy machine is busy for all; medians of the rounds' seconds.
"""

import argparse
import asyncio
import ctypes
import multiprocessing
import random
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

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
Copy = Callable[[], Awaitable[None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    peer.start()
    try:
        asyncio.run(measure(ours, rounds))
    finally:
        ours.send("stop")
        peer.join()


def serve(control: Connection) -> None:
    """The other process: an agent per backend, and the loop that answers the plain copies."""
    asyncio.run(_serve(control))


async def _serve(control: Connection) -> None:
    agents = [await start("shm"), await start("tcp")]
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer_plainly, args=(listening,), daemon=True).start()
    control.send(([a.export_metadata() for a in agents], listening.getsockname()[1]))
    await asyncio.to_thread(control.recv)
    for each in agents:
        await each.close()


async def start(backend: str) -> agent.Agent:
    """One with a pool full of bytes."""
    made = agent.Agent(
        backend, backends=[shm.ShmBackend() if backend == "shm" else tcp.TcpBackend()]
    )
    pool = made.allocate(LAYOUT.num_bytes)
    pool[:] = random.Random(7).randbytes(MIB) * (len(pool) // MIB)
    made.register(descriptors.Region(memory=pool, layout=LAYOUT))
    await made.start()
    return made


def answer_plainly(listening: socket.socket) -> None:
    """Whoever sends a length gets so many bytes."""
    sock, _ = listening.accept()
    source = memoryview(bytearray(random.Random(7).randbytes(MIB) * 64))
    while asked := sock.recv(8, socket.MSG_WAITALL):
        sock.sendall(source[: int.from_bytes(asked)])


async def measure(control: Connection, rounds: int) -> None:
    metadata, port = await asyncio.to_thread(control.recv)
    agents = [await start("shm"), await start("tcp")]
    peers = [
        await mine.connect(theirs, deadline_s=DEADLINE_S)
        for mine, theirs in zip(agents, metadata, strict=True)
    ]
    plain = socket.create_connection(("127.0.0.1", port))
    print("| bytes | copy | ms | GB/s | of the plain copy |\n|---|---|---|---|---|")
    for num_blocks in (2, 64):
        copies = {
            "memcpy": memcpy(num_blocks * MIB),
            "shm, neighbours": pull(agents[0], peers[0], num_blocks, is_scattered=False),
            "shm, scattered": pull(agents[0], peers[0], num_blocks, is_scattered=True),
            "sendall, recv_into": receive_plainly(plain, num_blocks * MIB),
            "tcp, neighbours": pull(agents[1], peers[1], num_blocks, is_scattered=False),
            "tcp, scattered": pull(agents[1], peers[1], num_blocks, is_scattered=True),
        }
        report(num_blocks * MIB, await take_turns(copies, rounds, repeats=64 // num_blocks))
    plain.close()
    for mine in agents:
        await mine.close()


async def take_turns(copies: dict[str, Copy], rounds: int, repeats: int) -> dict[str, float]:
    """Median seconds of one copy, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in copies}
    for _ in range(rounds + 1):  # the first one touches the pages
        for name, copy in copies.items():
            begun = time.perf_counter()
            for _ in range(repeats):
                await copy()
            seconds[name].append((time.perf_counter() - begun) / repeats)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def report(num_bytes: int, seconds: dict[str, float]) -> None:
    for name, taken in seconds.items():
        plain = seconds["memcpy" if name.startswith(("memcpy", "shm")) else "sendall, recv_into"]
        print(
            f"| {num_bytes // MIB} MiB | {name} | {taken * 1e3:.2f} | {num_bytes / taken / 1e9:.1f} | {plain / taken:.2f} |"
        )


def memcpy(num_bytes: int) -> Copy:
    target, source = (memory.Window(memory.private(64 * MIB)) for _ in range(2))
    source.view[:] = b"x" * len(source.view)

    async def copy() -> None:
        ctypes.memmove(target.address, source.address, num_bytes)

    return copy


def pull(mine: agent.Agent, peer: api.Peer, num_blocks: int, *, is_scattered: bool) -> Copy:
    chosen = random.Random(num_blocks).sample(range(LAYOUT.num_blocks), num_blocks)
    remote = chosen if is_scattered else range(num_blocks)
    transfer = mine.prepare(api.Operation.READ, peer, range(num_blocks), remote)

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
