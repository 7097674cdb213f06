"""What a new connection of the request plane costs: in the open, with a token, with TLS, with both.

    python -m benchmarks.connecting [--connections 40] [--runs 5]

Two processes on loopback, in turns; each connection carries one request. CPU is that of the side that answers.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

from benchmarks import credentials
from dynamo.runtime import requests
from dynamo.runtime.backends import tcp

ENDPOINT = "bench/backend/hello"


def answer(pipe: Connection) -> None:
    asyncio.run(_answer(pipe))


async def _answer(pipe: Connection) -> None:
    """Serve in each way; tell our CPU seconds whenever asked."""
    planes = {way: tcp.TcpRequestPlane(credentials=credentials.of(way)) for way in credentials.WAYS}
    pipe.send({way: await plane.serve(ENDPOINT, hello) for way, plane in planes.items()})
    while await asyncio.to_thread(pipe.recv):
        pipe.send(time.process_time())


def hello(call: requests.Call) -> None:
    call.reply("hello")
    call.finish()


async def ask(pipe: Connection, num_connections: int, num_runs: int) -> None:
    addresses: dict[str, str] = pipe.recv()
    shown = {way: credentials.of(way) for way in addresses}
    cpu_ms: dict[str, list[float]] = {way: [] for way in addresses}
    wall_ms: dict[str, list[float]] = {way: [] for way in addresses}
    for _ in range(num_runs):
        for way, address in addresses.items():
            pipe.send(True)
            began = pipe.recv()
            for _ in range(num_connections):
                plane = tcp.TcpRequestPlane(credentials=shown[way])
                began_at = time.perf_counter()
                await requests.call(plane, address, ENDPOINT, None, reply_type=str, timeout_s=10)
                wall_ms[way].append((time.perf_counter() - began_at) * 1e3)
                await plane.close()
            pipe.send(True)
            cpu_ms[way].append((pipe.recv() - began) / num_connections * 1e3)
    pipe.send(False)
    print("| | answering side, CPU ms | first answer after, ms |\n|---|---|---|")
    for way in addresses:
        middle, wall = statistics.median(cpu_ms[way]), statistics.median(wall_ms[way])
        print(
            f"| {way} | {middle:.2f}, {min(cpu_ms[way]):.2f} | {wall:.1f}, {min(wall_ms[way]):.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, default=40)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with credentials.prepared():
        pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        answerer = multiprocessing.get_context("spawn").Process(target=answer, args=(theirs,))
        answerer.start()
        asyncio.run(ask(pipe, options.connections, options.runs))
        answerer.join(10)
        answerer.terminate()


if __name__ == "__main__":
    main()
