"""What a token costs between a worker and a frontend: CPU per token on both sides of the request plane.

    python -m benchmarks.request_plane [--streams 256] [--ticks 300] [--tick-ms 5] [--loop asyncio|uvloop]
        [--nats URL] [--secured]

Two processes, TCP on loopback; with `--nats` the same through a NATS server, with `--secured` with a cluster token,
with TLS and with both, in turns with TCP. Each tick the worker
sends one token on every stream and then sleeps, as an engine's step would; the frontend's receivers only count. The
medians of several runs are printed, in µs of CPU time per token. With pauses between the ticks caches are cold and each
tick pays for two wake-ups; `--tick-ms 0` shows the bare path.
"""

import argparse
import asyncio
import importlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import credentials
from dynamo.base import clock, errors, ids
from dynamo.protocols import generate
from dynamo.runtime import requests
from dynamo.runtime.backends import tcp
from dynamo.runtime.backends.nats import services

ENDPOINT = "bench/backend/generate"


class Counter:
    """A receiver that counts."""

    def __init__(self, num_streams: int) -> None:
        self.num_tokens = 0
        self.num_open = num_streams
        self.over = asyncio.Event()

    def receive(self, output: generate.Output) -> None:
        self.num_tokens += len(output.token_ids)

    def replied(self, body: object) -> None:
        raise AssertionError("nobody replies here")

    def ended(self, error: errors.DynamoError | None) -> None:
        self.num_open -= 1
        if not self.num_open:
            self.over.set()


async def join(url: str, number: int) -> requests.RequestPlane:
    """Over TCP, secured as said (`credentials.WAYS`), or through the NATS server at this address."""
    if url in credentials.WAYS:
        return tcp.TcpRequestPlane(credentials=credentials.of(url), item_type=generate.Output)
    nats = services.NatsServices(
        (url,),
        namespace="bench",
        instance_id=ids.InstanceId(number),
        start_timeout_s=5,
        time=clock.SystemClock(),
    )
    await nats.connect()
    return nats.new_requests(generate.Output)


async def worker(
    pipe: Connection, url: str, num_streams: int, num_ticks: int, tick_s: float
) -> None:
    plane = await join(url, 1)
    calls: list[requests.Call] = []
    ready = asyncio.Event()

    def handler(call: requests.Call) -> None:
        calls.append(call)
        if len(calls) == num_streams:
            ready.set()

    pipe.send(await plane.serve(ENDPOINT, handler))
    while True:
        await ready.wait()
        ready.clear()
        began = time.process_time()
        for tick in range(num_ticks):
            for call in calls:
                call.send(generate.Output((tick,)))
            await asyncio.sleep(tick_s)
        for call in calls:
            call.finish()
        calls.clear()
        pipe.send(time.process_time() - began)


async def frontend(
    pipes: dict[str, Connection], num_streams: int, num_ticks: int, num_runs: int
) -> None:
    joined = {url: (await join(url, 2), pipe.recv()) for url, pipe in pipes.items()}
    costs: dict[str, list[tuple[float, float]]] = {url: [] for url in pipes}
    for _ in range(num_runs):
        for url, (plane, address) in joined.items():
            costs[url].append(await one_run(plane, address, pipes[url], num_streams, num_ticks))
    for url, pairs in costs.items():
        asked, answered = zip(*pairs, strict=True)
        print(
            f"{url}: frontend {statistics.median(asked):.2f} (best {min(asked):.2f}) µs/token,"
            f" worker {statistics.median(answered):.2f} (best {min(answered):.2f}) µs/token"
        )


async def one_run(
    plane: requests.RequestPlane, address: str, pipe: Connection, num_streams: int, num_ticks: int
) -> tuple[float, float]:
    """CPU µs per token of the frontend and of the worker."""
    counter = Counter(num_streams)
    for _ in range(num_streams):
        await plane.open(address, ENDPOINT, None, counter)
    began = time.process_time()
    await counter.over.wait()
    used_s = time.process_time() - began
    assert counter.num_tokens == num_streams * num_ticks
    return used_s / counter.num_tokens * 1e6, pipe.recv() / counter.num_tokens * 1e6


def run(loop: str, main: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
    factory = importlib.import_module(loop).new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(*arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--ticks", type=int, default=300)
    parser.add_argument("--tick-ms", type=float, default=5)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--nats", help="the address of a NATS server")
    parser.add_argument("--secured", action="store_true", help="with token and TLS, too")
    options = parser.parse_args()
    with credentials.prepared():
        measure(options)


def measure(options: argparse.Namespace) -> None:
    size = (options.streams, options.ticks)
    pipes, processes = {}, []
    ways = credentials.WAYS if options.secured else credentials.WAYS[:1]
    for url in (*ways, options.nats) if options.nats else ways:
        pipes[url], theirs = multiprocessing.Pipe()
        arguments = (options.loop, worker, theirs, url, *size, options.tick_ms / 1000)
        processes.append(
            multiprocessing.get_context("spawn").Process(target=run, args=arguments, daemon=True)
        )
        processes[-1].start()
    run(options.loop, frontend, pipes, *size, options.runs)
    for process in processes:
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
