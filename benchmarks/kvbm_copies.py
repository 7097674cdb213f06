"""The copies of cache tiers beside the plainest copies of the same bytes, in turns in one process.

host    blocks between the engine's memory, where the layers lie apart, and host memory, where a block is whole: beside
        one memcpy of as many bytes between the same two memories. CPU seconds.
gpu     with `--gpu`, instead of the two others: blocks between a GPU's memory and host memory, beside one copy of as
        many bytes between the GPU and page-locked memory. GB/s by the clock.
disk    blocks of 2 MiB written and read by the disk tier's threads, with checksums, beside `dd` with O_DIRECT on the
        same disk (which sums nothing), and beside NIXL's POSIX plugin under our file. Wall and CPU seconds.

The model has 16 layers and 8 KV heads of 128 in bfloat16: a block of 16 tokens is 1 MiB, 64 KiB per layer.
"""

import argparse
import concurrent.futures
import ctypes
import importlib.util
import mmap
import os
import random
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.transfer import LAYOUT, MIB
from dynamo.engine.native import device_memory
from dynamo.kvbm import host_memory
from dynamo.kvbm import storage as storages
from dynamo.kvbm.tiers import CachedBlock
from dynamo.transfer import api, descriptors, memory

DISK_BLOCK_BYTES = 2 * MIB
LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--disk", help="directory on the disk to measure (default: the system's)")
    parser.add_argument("--disk-blocks", type=int, default=128, help="of 2 MiB each")
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}")
    if args.gpu:
        bench_gpu(args.rounds)
        return
    bench_host(args.rounds)
    with tempfile.TemporaryDirectory(dir=args.disk) as directory:
        bench_disk(Path(directory), args.rounds, args.disk_blocks)


def bench_host(num_rounds: int) -> None:
    """Print how many CPU seconds copies between the engine and host memory take, beside a memcpy."""
    device = memory.private(LAYOUT.num_bytes)
    host = host_memory.HostMemory(LAYOUT.num_blocks, LAYOUT.block_bytes)
    list(host.provide())
    memory.Window(device).view[:] = bytes(LAYOUT.num_bytes)
    region = descriptors.Region(memory=device, layout=LAYOUT)
    copies = device_memory.RegionBlocks(region).attach(host.window.view)
    plain, window = memory.Window(device), host.window
    draw = random.Random(1)
    print("host: CPU ms, median of the rounds      offload   of memcpy     load   of memcpy")
    for num_blocks in (2, 64):
        for is_scattered in (False, True):
            everything = range(LAYOUT.num_blocks)
            blocks = (
                draw.sample(everything, num_blocks) if is_scattered else list(range(num_blocks))
            )
            slots = draw.sample(everything, num_blocks) if is_scattered else list(range(num_blocks))
            limit = api.TimeLimit(LIMIT_S)
            num_bytes = num_blocks * LAYOUT.block_bytes

            def copy(operation: api.TransferOperation) -> Callable[[], None]:
                return lambda: copies.move(operation, blocks, slots, limit)  # noqa: B023

            ways: dict[str, Callable[[], object]] = {
                "offload": copy(api.TransferOperation.WRITE),
                "load": copy(api.TransferOperation.READ),
                "out": lambda: ctypes.memmove(window.address, plain.address, num_bytes) and None,  # noqa: B023
                "in": lambda: ctypes.memmove(plain.address, window.address, num_bytes) and None,  # noqa: B023
            }
            took = take_turns(ways, num_rounds, repeats=64 // num_blocks)
            name = f"{num_bytes // MIB} MiB, {'scattered' if is_scattered else 'neighbours'}"
            print(
                f"  {name:<34} {1e3 * took['offload']:9.3f} {took['out'] / took['offload']:11.2f}"
                f" {1e3 * took['load']:8.3f} {took['in'] / took['load']:11.2f}"
            )


def bench_gpu(num_rounds: int) -> None:
    """Print how fast scattered blocks are copied between a GPU and host memory, beside one plain copy."""
    import torch

    shape = LAYOUT.num_layers, LAYOUT.num_blocks, LAYOUT.slab_bytes // 2
    cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    copies = device_memory.DeviceBlocks(cache).attach(memory.private(LAYOUT.num_bytes))
    draw, everything = random.Random(1), range(LAYOUT.num_blocks)
    copies.move(api.TransferOperation.WRITE, everything, everything, api.TimeLimit(LIMIT_S))
    print("gpu: GB/s, median of the rounds        offload      load   plain copy, out and in")
    for num_blocks in (1, 8, 128):
        blocks, slots = (draw.sample(everything, num_blocks) for _ in range(2))
        num_bytes = num_blocks * LAYOUT.block_bytes
        locked = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        on_gpu = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        limit = api.TimeLimit(LIMIT_S)
        ways: dict[str, Callable[[], object]] = {
            "offload": lambda: copies.move(api.TransferOperation.WRITE, blocks, slots, limit),  # noqa: B023
            "load": lambda: copies.move(api.TransferOperation.READ, blocks, slots, limit),  # noqa: B023
            "out": lambda: locked.copy_(on_gpu),  # noqa: B023
            "in": lambda: (on_gpu.copy_(locked), torch.cuda.synchronize()),  # noqa: B023
        }
        took = take_turns(ways, num_rounds, repeats=4, clock=time.perf_counter)
        rates = [num_bytes / took[name] / 1e9 for name in ways]
        name = f"{num_blocks} blocks of {LAYOUT.block_bytes // MIB} MiB"
        print(f"  {name:<34} {rates[0]:9.1f} {rates[1]:9.1f} {rates[2]:10.1f} {rates[3]:9.1f}")


def take_turns(
    ways: dict[str, Callable[[], object]],
    num_rounds: int,
    repeats: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Return the median seconds of each way, which take turns: CPU seconds, or those of another clock."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, way in ways.items():
            way()
            began_at = clock()
            for _ in range(repeats):
                way()
            times[name].append((clock() - began_at) / repeats)
    return {name: statistics.median(each) for name, each in times.items()}


def bench_disk(directory: Path, num_rounds: int, num_blocks: int) -> None:
    """Print how fast blocks are written and read, beside dd."""
    ours = storages.DiskFile(
        directory / "ours", {}, block_bytes=DISK_BLOCK_BYTES, num_slots=num_blocks
    )
    ways: dict[str, Callable[[str], None]] = {
        "dd, O_DIRECT": lambda verb: run_dd(directory / "dd", verb, num_blocks),
        "disk tier": lambda verb: run_tier(ours, verb, num_blocks),
    }
    if importlib.util.find_spec("nixl"):
        from benchmarks import nixl_posix

        theirs = nixl_posix.NixlPosixFile(
            directory / "nixl", {}, block_bytes=DISK_BLOCK_BYTES, num_slots=num_blocks
        )
        ways["disk tier by NIXL's POSIX plugin"] = lambda verb: run_tier(theirs, verb, num_blocks)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(max(3, num_rounds // 3)):
        for verb in ("write", "read"):
            for name, way in ways.items():
                cpu_began_at, began_at = cpu_s(), time.perf_counter()
                way(verb)
                took = time.perf_counter() - began_at, cpu_s() - cpu_began_at
                times.setdefault((verb, name), []).append(took)
    print("disk: MB a second, median and best, and MB a CPU second")
    num_mb = num_blocks * DISK_BLOCK_BYTES / 1e6
    for (verb, name), pairs in times.items():
        walls, cpus = zip(*pairs, strict=True)
        median, best = num_mb / statistics.median(walls), num_mb / min(walls)
        print(
            f"  {verb:<5} {name:<34} {median:8.0f} {best:8.0f} {num_mb / statistics.median(cpus):8.0f}"
        )


def cpu_s() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    uses = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(use.ru_utime + use.ru_stime for use in uses)


def run_dd(path: Path, verb: str, num_blocks: int) -> None:
    """Write or read as many bytes with dd; what it wrote is not cut off, as the tier's file is not."""
    words = (
        ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"]
        if verb == "write"
        else [f"if={path}", "of=/dev/null", "iflag=direct"]
    )
    subprocess.run(
        ["dd", f"bs={DISK_BLOCK_BYTES}", f"count={num_blocks}", *words],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def run_tier(storage: storages.DiskFile, verb: str, num_blocks: int) -> None:
    """Write or read all slots with the threads that the engine has for it."""
    num_threads = storage.num_threads
    with mmap.mmap(-1, num_threads * DISK_BLOCK_BYTES) as buffers:
        view = memoryview(buffers)

        def move(thread: int) -> None:
            content = view[thread * DISK_BLOCK_BYTES : (thread + 1) * DISK_BLOCK_BYTES]
            for slot in range(thread, num_blocks, num_threads):
                if verb == "write":
                    storage.write(slot, (CachedBlock(slot, slot, None),), (content,), 0)
                else:
                    block = CachedBlock(slot, slot, None)
                    assert not storage.read(slot, (block,), (content,)), "a block is damaged"
            content.release()

        with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(move, range(num_threads)))
        view.release()


if __name__ == "__main__":
    main()
