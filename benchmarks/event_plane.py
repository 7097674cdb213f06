"""What an event costs over ZeroMQ, in the open and encrypted: CPU per event of a publisher and a listener.

    python -m benchmarks.event_plane [--events 2000] [--runs 7]

Two processes; bursts of 100 events, each after the last was heard, in turns between the planes. An event of 200 bytes
tells of a few blocks, one of 10,000 of a long prompt's.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import msgspec

from benchmarks import credentials
from dynamo.protocols import instances
from dynamo.runtime import discovery, events
from dynamo.runtime.backends import memory, zmq

TOPIC = "bench/backend/kv_events"
BURST = 100
SIZES = (200, 10_000)
WAYS = ("open", "token")


def tell(pipe: Connection) -> None:
    asyncio.run(_tell(pipe))


async def _tell(pipe: Connection) -> None:
    """Publish as many of a size as is asked for; gives our CPU seconds."""
    registry = memory.MemoryDiscovery(memory.MemoryRegistry())
    planes = {
        way: zmq.ZmqEventPlane(registry, number, credentials=credentials.of(way))
        for number, way in enumerate(WAYS, 1)
    }
    for plane in planes.values():
        await plane.advertise(TOPIC)
    pipe.send([*(await registry.get_prefix(instances.EVENT_CHANNELS)).values()])
    while asked := pipe.recv():
        way, size = asked
        began = time.process_time()
        for _ in range(BURST):
            planes[way].publish(TOPIC, bytes(size))
        await asyncio.sleep(0)
        pipe.send(began)
        pipe.recv()  # it has been heard; what zmq's own thread did counts
        pipe.send(time.process_time() - began)


class Ear:
    def __init__(self) -> None:
        self.num_heard = 0
        self.is_enough = asyncio.Event()

    def __call__(self, batch: list[events.Event]) -> None:
        self.num_heard += len(batch)
        if self.num_heard >= BURST:
            self.is_enough.set()


async def listen(pipe: Connection, num_events: int, num_runs: int) -> None:
    ears: dict[str, Ear] = {}
    planes: list[zmq.ZmqEventPlane] = []
    for way, value in zip(WAYS, pipe.recv(), strict=True):
        registry = memory.MemoryDiscovery(memory.MemoryRegistry())
        await _announce(registry, value)
        planes.append(zmq.ZmqEventPlane(registry, 9, credentials=credentials.of(way)))
        ears[way] = Ear()
        await planes[-1].subscribe(TOPIC, ears[way])
    await asyncio.sleep(1)  # until the handshakes are over
    costs: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for _ in range(num_runs):
        for size in SIZES:
            for way, ear in ears.items():
                costs.setdefault((size, way), []).append(
                    await one_run(pipe, ear, (way, size), num_events // BURST)
                )
    pipe.send(None)
    for plane in planes:
        await plane.close()
    report(costs)


async def _announce(registry: discovery.Discovery, value: bytes) -> None:
    record = msgspec.json.decode(value, type=instances.EventChannel)
    await registry.put(record.key, value)


async def one_run(
    pipe: Connection, ear: Ear, asked: tuple[str, int], num_bursts: int
) -> tuple[float, float]:
    """CPU µs per event of the publisher and of the listener."""
    told_s = heard_s = 0.0
    for _ in range(num_bursts):
        ear.num_heard = 0
        ear.is_enough.clear()
        began = time.process_time()
        pipe.send(asked)
        await asyncio.wait_for(ear.is_enough.wait(), 30)
        heard_s += time.process_time() - began
        pipe.recv()
        pipe.send("heard")
        told_s += pipe.recv()
    return told_s / num_bursts / BURST * 1e6, heard_s / num_bursts / BURST * 1e6


def report(costs: dict[tuple[int, str], list[tuple[float, float]]]) -> None:
    print("| bytes | plane | publisher, µs an event | listener |\n|---|---|---|---|")
    for (size, way), pairs in costs.items():
        told, heard = zip(*pairs, strict=True)
        print(
            f"| {size} | {way} | {statistics.median(told):.1f}, {min(told):.1f}"
            f" | {statistics.median(heard):.1f}, {min(heard):.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    with credentials.prepared():
        pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        teller = multiprocessing.get_context("spawn").Process(target=tell, args=(theirs,))
        teller.start()
        asyncio.run(listen(pipe, options.events, options.runs))
        teller.join(10)
        teller.terminate()


if __name__ == "__main__":
    main()
