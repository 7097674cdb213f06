"""Does anybody notice? Everything is killed, stopped and restarted at random, while clients ask.

    PYTHONPATH=tests python -m benchmarks.chaos --minutes 10 --mix etcd+nats+nats      (make chaos MINUTES=10 MIX=...)

Twenty requests a second go to two frontends with simulated workers. Every three seconds something is hurt, as long
as two workers and a frontend are well: a worker or a frontend by kill -9, by SIGSTOP (and SIGCONT some seconds later)
or by SIGTERM; etcd and nats-server, where the mix has them, killed and started again, or stopped. Each answer is
compared with the one that the same question got before anything was hurt. Then, by files and TCP, two clean cuts are
timed: a hundred streams whose one worker is killed, or stopped, go on at another.
"""

import argparse
import asyncio
import contextlib
import datetime
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator
from concurrent import futures
from pathlib import Path

import httpx

from benchmarks import balanced_clients as clients
from benchmarks import chaos_faults
from benchmarks import fleet as fleets

TICK_MS = 10
QUESTIONS = [f"Tell me story number {number}" for number in range(10)]
WORKER_FLAGS = ["--tick-ms", str(TICK_MS), "--graceful-shutdown-timeout", "0.2"]
CUT_FLAGS = ["--tick-ms", "50", "--max-num-batched-tokens", "100000"]  # a prompt takes one step
MODEL_DIR = Path(fleets.__file__).parents[1] / "src/dynamo/engine/native/storyteller"
NUM_FRONTENDS = 2
NUM_THREADS = 32
STALL_STEP_S = 0.1
MORE_FDS, MORE_MB = 8, 20.0  # that the elders may have in the end


async def load(
    balancer: clients.Balancer, tally: clients.Tally, rate: float, duration_s: float
) -> None:
    """Ask so often a second, whether answers come or not."""

    async def one(question: str) -> None:
        tally.count(question, await balancer.ask(question))

    began_at, asked = time.monotonic(), []
    for number in range(int(rate * duration_s)):
        await asyncio.sleep(max(0.0, began_at + number / rate - time.monotonic()))
        asked.append(asyncio.ensure_future(one(QUESTIONS[number % len(QUESTIONS)])))
    await asyncio.gather(*asked)


@contextlib.asynccontextmanager
async def balanced(fleet: fleets.Fleet) -> AsyncIterator[clients.Balancer]:
    """Who asks this fleet."""
    balancer = clients.Balancer(fleet.frontends)
    checking = asyncio.ensure_future(balancer.check())
    try:
        yield balancer
    finally:
        checking.cancel()
        balancer.close()


class Stalls:
    """For how long this process did not come to run: a machine that stands still prolongs every fault."""

    longest_s = 0.0

    async def watch(self) -> None:
        while True:
            began_at = time.monotonic()
            await asyncio.sleep(STALL_STEP_S)
            self.longest_s = max(self.longest_s, time.monotonic() - began_at - STALL_STEP_S)


async def elders(fleet: fleets.Fleet) -> dict[str, tuple[int, float]]:
    """Descriptors and MB of those that live through all of it, when nobody asks."""
    await asyncio.sleep(1)
    kinds = {"frontend": fleet.frontends[0], "worker": fleet.workers[0]}
    return {name: (one.num_fds, one.rss_mb) for name, one in kinds.items()}


async def under_chaos(options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    """The table of one run, and whether it was well."""
    # Whoever is waited for must not keep others from being healed.
    asyncio.get_running_loop().set_default_executor(futures.ThreadPoolExecutor(NUM_THREADS))
    size = {"mix": options.mix, "num_frontends": NUM_FRONTENDS}
    with fleets.running(MODEL_DIR, options.workers, WORKER_FLAGS, **size) as fleet:
        await asyncio.to_thread(fleet.wait_until_well)
        async with balanced(fleet) as balancer:
            expected = {question: await balancer.ask(question) for question in QUESTIONS}
            await load(balancer, clients.Tally(expected), options.rate, 10)  # caches and pools fill
        before = await elders(fleet)
        tally = clients.Tally(expected)
        chaos = chaos_faults.Chaos(fleet, random.Random(options.seed))
        stalls = Stalls()
        watching = asyncio.ensure_future(stalls.watch())
        async with balanced(fleet) as balancer:
            duration_s = options.minutes * 60
            asking = load(balancer, tally, options.rate, duration_s)
            await asyncio.gather(chaos.run(duration_s, options.every), asking)
            await asyncio.to_thread(fleet.wait_until_well)
            await load(balancer, clients.Tally(expected), options.rate, 5)  # the broken are gone
        after = await elders(fleet)
        watching.cancel()
        table = {
            "mix": options.mix,
            "again, at the other frontend": balancer.num_again,
            "moved, by the first frontend": int(fleet.metric("model_migration_total")),
            **_told(tally, chaos),
            "longest stall of the machine, s": f"{stalls.longest_s:.2f}",
            **{f"{kind}: fds, MB before": f"{n}, {mb:.0f}" for kind, (n, mb) in before.items()},
            **{f"{kind}: fds, MB after": f"{n}, {mb:.0f}" for kind, (n, mb) in after.items()},
        }
        return table, is_well(tally) and not chaos.bad_exits and not _grew(before, after)


def _told(tally: clients.Tally, chaos: chaos_faults.Chaos) -> dict[str, object]:
    return {
        "faults": chaos.faults.total(),
        **{f"  {name}": number for name, number in sorted(chaos.faults.items())},
        "requests": tally.outcomes.total(),
        **{f"  {name}": tally.outcomes[name] for name in clients.OUTCOMES},
        **{f"    {wait}": number for wait, number in sorted(tally.hung.items())},
        "needless 503s": num_refused(tally),
        "errors": dict(tally.errors),
        "longest pause, median / p99 / max s": _spread(tally.pauses_s),
        "exits after SIGTERM that were not 0": dict(chaos.bad_exits),
    }


def _grew(before: dict[str, tuple[int, float]], after: dict[str, tuple[int, float]]) -> bool:
    return any(
        after[kind][0] > num_fds + MORE_FDS or after[kind][1] > mb + MORE_MB
        for kind, (num_fds, mb) in before.items()
    )


def num_refused(tally: clients.Tally) -> int:
    """Count the 503s: all are needless, because two workers and a frontend were well all the time."""
    return sum(number for error, number in tally.errors.items() if error.startswith("503"))


def is_well(tally: clients.Tally) -> bool:
    """Nothing hung, was corrupt or refused; of what its own frontend did not cut off, 99.9 % were answered."""
    found = tally.outcomes
    asked = found.total() - found["cut"]
    is_right = found["right"] >= 0.999 * asked and not num_refused(tally)
    return is_right and not found["hung"] and not found["corrupt"]


async def one_cut(fault: str, num_streams: int) -> str:
    """How long streams pause whose one worker is hurt, while another is there."""
    with fleets.running(MODEL_DIR, 1, CUT_FLAGS) as fleet:
        async with httpx.AsyncClient(
            base_url=fleet.url, timeout=None, limits=httpx.Limits(max_connections=None)
        ) as client:
            asked = [
                asyncio.ensure_future(_times(client, f"{QUESTIONS[0]} {number}"))
                for number in range(num_streams)
            ]
            fleet.add_worker()
            await asyncio.to_thread(fleet.wait_for_workers, 2)
            cut_at, wall = time.monotonic(), datetime.datetime.now(datetime.UTC)
            fleet.workers[0].signal(signal.Signals[fault])
            seen = await asyncio.gather(*asked)
        moved = fleet.log_times("the stream goes on")
        reissued = [(at - wall).total_seconds() for at in moved]
        return (
            f"{len(moved)} of {num_streams} streams moved; median / p99 / max s from the signal until another worker "
            f"has it: {_spread(reissued)}; the longest pause of a stream: "
            f"{_spread([_longest_pause(times, cut_at) for times in seen])}"
        )


async def _times(client: httpx.AsyncClient, question: str) -> list[float]:
    """When something came. It must come to its end."""
    times, last = [], b""
    async with client.stream(
        "POST", "/v1/chat/completions", json=clients.body(question, 250)
    ) as response:
        async for piece in response.aiter_raw():
            times.append(time.monotonic())
            last = piece
    if not last.endswith(b"data: [DONE]\n\n"):
        raise SystemExit(f"a stream ended with {last!r}")
    return times


def _longest_pause(times: list[float], cut_at: float) -> float:
    """From the cut on, in seconds; 0 of a stream that had ended before it."""
    after = [cut_at, *(at for at in times if at > cut_at)]
    return max((b - a for a, b in itertools.pairwise(after)), default=0.0)


def _spread(values: list[float]) -> str:
    ordered = sorted(values) or [0.0]
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"{ordered[len(ordered) // 2]:.3f} / {p99:.3f} / {ordered[-1]:.3f}"


def main() -> int:
    """0 if all was well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mix", choices=fleets.MIXES, default=fleets.DEFAULT_MIX)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--every", type=float, default=3.0, help="seconds from fault to fault")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=100, help="of each clean cut; 0: none")
    options = parser.parse_args()
    found, was_well = asyncio.run(under_chaos(options))
    for name, value in found.items():
        print(f"{name:40} {value}", flush=True)
    for fault in ("SIGKILL", "SIGSTOP") if options.streams else ():
        print(f"{fault}: {asyncio.run(one_cut(fault, options.streams))}", flush=True)
    return 0 if was_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
