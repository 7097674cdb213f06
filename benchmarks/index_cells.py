"""One run of the router-index benchmark for one system, in a process of its own: `index_cells.py ours|peer [BLOCKS]`.

It prints one JSON object: cell → figure. Either system's Python runs it, so what it measures is imported late.

The index holds BLOCKS different blocks of 64 workers: sequences of 128 blocks of which the first 64 are one of 256
shared prefixes, and 64 sequences that all workers hold. Everything is made anew from seeds when it is needed, so that
the memory of the process is the index's own. Times are CPU time of all threads; `wall` cells say so.
"""

import gc
import importlib
import json
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

NUM_WORKERS = 64
NUM_PREFIXES = 256
HALF = 64  # blocks
NUM_FINDS = 2000
NUM_ONES = 10_000
Chain = list[int]  # local hashes


def random_blocks(*seed: object) -> Chain:
    rnd = random.Random(repr(seed))
    return [rnd.getrandbits(63) for _ in range(HALF)]


def chain(number: int) -> Chain:
    """A sequence that one worker holds: a shared prefix and blocks of its own."""
    return random_blocks("prefix", number * 7919 % 100_003 % NUM_PREFIXES) + random_blocks(
        "own", number
    )


def common_chain(number: int) -> Chain:
    """A sequence that all workers hold."""
    return random_blocks("common", number) + random_blocks("common too", number)


class Ours:
    """The prefix index."""

    def __init__(self) -> None:
        self.api = importlib.import_module("dynamo.router.api")
        self.blocks = importlib.import_module("dynamo.protocols.blocks")
        self.events = importlib.import_module("dynamo.protocols.kv_events")
        self.msgspec = importlib.import_module("msgspec")
        self.index = importlib.import_module("dynamo.router.prefix_index").PrefixIndex()
        self.has_open_tiers = hasattr(self.index, "find_matches")

    def prepare(self, local: Chain, skip: int = 0) -> object:
        names = self.blocks.sequence_hashes(local)
        pairs = tuple(map(self.events.StoredBlock, names, local))[skip:]
        return self.events.Stored(parent_hash=names[skip - 1] if skip else None, blocks=pairs)

    def store(self, worker: int, event: object) -> None:
        self.index.apply(self.api.Worker(worker), event)

    def query(self, local: Chain) -> Chain:
        return self.blocks.sequence_hashes(local)

    def find(self, query: Chain) -> int:
        if not self.has_open_tiers:  # a checkout of before tiers were an open set
            return len(self.index.find(query).device)
        return len(self.index.find_matches(query).by_tier.get("device", ()))

    def remove(self, worker: int) -> None:
        self.index.remove_worker(self.api.Worker(worker))

    def hash_cells(self, token_ids: list[int]) -> Iterator[tuple[str, Callable[[], object]]]:
        packed = self.blocks.pack(token_ids)
        for size in (16, 64):
            yield (
                f"hash 8,192 tokens, blocks of {size}, µs",
                lambda size=size: self.blocks.sequence_hashes(
                    self.blocks.local_hashes(packed, size)
                ),
            )

    def own_cells(self) -> dict[str, float]:
        """What only ours has: decoding apart, and the sweep after a removal."""
        batch = self.events.EventBatch(
            worker_id=1, epoch=1, first_event_id=0, events=(self.prepare(chain(1)),)
        )
        body = self.msgspec.msgpack.encode(batch)
        decode = self.msgspec.msgpack.Decoder(self.events.EventBatch).decode
        decoded = cpu_us(lambda: decode(body), 2000) / 128
        steps: list[float] = []  # CPU time, because a busy machine interrupts
        is_over = False
        while not is_over:
            began = time.process_time()
            is_over = self.index.sweep(4)
            steps.append(1e6 * (time.process_time() - began))
        return {
            "decode an event, µs a block": decoded,
            "sweep after a removal, all steps, ms": sum(steps) / 1e3,
            "sweep after a removal, longest step, µs": max(steps),
        }


class Peer:
    """The real Dynamo's radix tree through its Python bindings."""

    def __init__(self) -> None:
        self.llm = importlib.import_module("dynamo.llm")
        self.tree = self.llm.RadixTree()
        self.num_events = 0

    def prepare(self, local: Chain, skip: int = 0) -> object:
        self.num_events += 1
        pairs = [{"block_hash": name ^ 1, "tokens_hash": name} for name in local]
        parent = pairs[skip - 1]["block_hash"] if skip else None
        data = {"stored": {"parent_hash": parent, "blocks": pairs[skip:]}}
        event = {"event_id": self.num_events, "data": data, "dp_rank": 0}
        return json.dumps(event).encode()

    def store(self, worker: int, event: object) -> None:
        self.tree.apply_event(worker, event)

    def query(self, local: Chain) -> Chain:
        return local

    def find(self, query: Chain) -> int:
        return len(self.tree.find_matches(query, False).scores)

    def remove(self, worker: int) -> None:
        self.tree.remove_worker(worker)

    def hash_cells(self, token_ids: list[int]) -> Iterator[tuple[str, Callable[[], object]]]:
        for size in (16, 64):
            yield (
                f"hash 8,192 tokens, blocks of {size}, µs",
                lambda size=size: self.llm.compute_block_hash_for_seq(token_ids, size),
            )

    def own_cells(self) -> dict[str, float]:
        return {}


def cpu_us(work: Callable[[], object], rounds: int) -> float:
    began = time.process_time()
    for _ in range(rounds):
        work()
    return 1e6 * (time.process_time() - began) / rounds


def rss_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


def fill(system: Ours | Peer, num_sequences: int) -> float:
    """Store everything; CPU µs per stored block, events being ready."""
    spent = 0.0
    for number in range(num_sequences):
        event = system.prepare(chain(number))
        began = time.process_time()
        system.store(number % NUM_WORKERS, event)
        spent += time.process_time() - began
    for number in range(64):
        for worker in range(NUM_WORKERS):
            system.store(worker, system.prepare(common_chain(number)))
    return 1e6 * spent / num_sequences / (2 * HALF)


def finds(system: Ours | Peer, num_sequences: int) -> dict[str, float]:
    rnd = random.Random(2)
    made = {
        "64 shared, 64 of one worker": lambda: chain(rnd.randrange(num_sequences)),
        "all 64 workers hold it": lambda: common_chain(rnd.randrange(64)),
        "64 shared, then unknown": lambda: chain(rnd.randrange(num_sequences))[:HALF] + [1] * HALF,
        "unknown": lambda: common_chain(rnd.randrange(10**6, 10**7)),
    }
    cells = {}
    for name, make in made.items():
        spent, found = [], 0
        for _ in range(NUM_FINDS):
            query = system.query(make())
            began = time.process_time()
            found += system.find(query)
            spent.append(time.process_time() - began)
        print(f"{name}: {found / NUM_FINDS:.1f} workers found", file=sys.stderr)
        cells[f"find 128 blocks: {name}, µs"] = 1e6 * statistics.fmean(spent)
    return cells


def store_ones(system: Ours | Peer) -> float:
    """Blocks that come one at a time, as in decoding; CPU µs each."""
    grown = [random_blocks("grown", number) for number in range(NUM_ONES // HALF)]
    events = [
        (number % NUM_WORKERS, system.prepare(local[: length + 1], length))
        for length in range(HALF)
        for number, local in enumerate(grown)
    ]
    began = time.process_time()
    for worker, event in events:
        system.store(worker, event)
    return 1e6 * (time.process_time() - began) / len(events)


def main() -> None:
    system = Ours() if sys.argv[1] == "ours" else Peer()
    num_blocks = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    num_sequences = (num_blocks - NUM_PREFIXES * HALF - 64 * 2 * HALF) // HALF
    rnd = random.Random(3)
    token_ids = [rnd.randrange(150_000) for _ in range(8192)]
    cells = {name: cpu_us(work, 300) for name, work in system.hash_cells(token_ids)}
    gc.collect()
    before = rss_bytes()
    cells["store, 128 blocks an event, µs a block"] = fill(system, num_sequences)
    cells["memory, bytes a block"] = (rss_bytes() - before) / num_blocks
    cells |= finds(system, num_sequences)
    cells["store, 1 block an event, µs"] = store_ones(system)
    began = time.perf_counter()
    system.remove(0)
    cells["remove one worker of 64, wall µs"] = 1e6 * (time.perf_counter() - began)
    cells |= system.own_cells()
    print(json.dumps(cells))


if __name__ == "__main__":
    main()
