"""Do honest clients notice? Hostile clients of every kind ask beside sixteen honest streams.

    PYTHONPATH=tests:tests/system python -m benchmarks.hostile --minutes 15      (make hostile MINUTES=15)

A frontend with API keys, and two native workers. The honest ask sixteen questions over and over; each answer has to be
whole and the same as before the attack. The hostile (`benchmarks.hostile_clients`) have a key of their own tenant, or
none. Printed are the gaps between two pieces of honest streams, the peak of memory of every process, and what the
hostile met. The exit code is 0 if every honest answer was right, the p99 of gaps is at most a second, no process died
and none took more memory than its bound.
"""

import argparse
import asyncio
import collections
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import deployment as systems
import httpx

NUM_STREAMS = 16
NUM_TOKENS = 100
NUM_WORKERS = 2
HONEST_KEY, HOSTILE_KEY = "sk-honest-0001", "sk-hostile-0001"
KEYS = f"""
[tenants.good]
[tenants.evil]
[[keys]]
name = "honest"
key = "{HONEST_KEY}"
tenant = "good"
[[keys]]
name = "hostile"
key = "{HOSTILE_KEY}"
tenant = "evil"
"""
MAX_P99_GAP_S = 1.0
MAX_MB = 2500.0  # of any process
SETTLE_S = 5.0


@dataclass
class Tally:
    """What the honest saw."""

    expected: dict[str, str] = field(default_factory=dict)
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)

    def spread(self, values: list[float]) -> str:
        """Return median, p99 and maximum in seconds."""
        ordered = sorted(values) or [0.0]
        return (
            f"{ordered[len(ordered) // 2]:.3f} / {percentile_99(ordered):.3f} / {ordered[-1]:.3f}"
        )


def percentile_99(values: list[float]) -> float:
    """Return the 99th percentile."""
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def text_of(stream: bytes) -> str | None:
    """Return the text of a stream; None if it is not whole."""
    events = [part.removeprefix(b"data: ") for part in stream.split(b"\n\n") if part]
    if not events or events[-1] != b"[DONE]":
        return None
    pieces = [json.loads(event) for event in events[:-1]]
    if any("error" in piece for piece in pieces):
        return None
    return "".join(
        piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"]
    )


async def ask(client: httpx.AsyncClient, question: str, tally: Tally) -> str | None:
    """Stream one answer and note its gaps; return its text, or None if it is not whole."""
    body = systems.chat(
        question, stream=True, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True
    )
    at, stream, is_first = time.monotonic(), b"", True
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                tally.outcomes[f"status {answer.status_code}"] += 1
                return None
            async for piece in answer.aiter_raw():
                now = time.monotonic()
                (tally.first_s if is_first else tally.gaps_s).append(now - at)
                at, is_first, stream = now, False, stream + piece
    except httpx.HTTPError as error:
        tally.outcomes[type(error).__name__] += 1
        return None
    return text_of(stream)


async def honest(url: str, tally: Tally, stop: asyncio.Event) -> None:
    """Ask all questions over and over until `stop` is set."""
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {HONEST_KEY}"}
    async with httpx.AsyncClient(
        base_url=url, timeout=60, limits=limits, headers=headers
    ) as client:

        async def repeat(question: str) -> None:
            while not stop.is_set():
                text = await ask(client, question, tally)
                right = tally.expected.setdefault(question, text or "")
                is_right = text is not None and text == right
                tally.outcomes[
                    "right" if is_right else "wrong" if text is not None else "broken"
                ] += 1

        questions = (f"Tell me story number {number}" for number in range(NUM_STREAMS))
        await asyncio.gather(*(repeat(question) for question in questions))


def peak_mb(pid: int) -> float:
    """Return the most memory that the process has had."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) / 1024 for row in rows if row.startswith("VmHWM:"))


def memory(processes: dict[str, systems.Process]) -> dict[str, tuple[float, float]]:
    """Return MB of each process that lives: now, and at its peak."""
    return {
        name: (systems.rss_bytes(process.pid) / 2**20, peak_mb(process.pid))
        for name, process in processes.items()
        if process.is_running
    }


def start_attack(url: str, worker_port: int, seconds: float, seed: int) -> subprocess.Popen[bytes]:
    """Start the hostile clients in a process of their own."""
    port = url.rpartition(":")[2]
    flags = ["--port", port, "--worker-port", str(worker_port), "--key", HOSTILE_KEY]
    flags += ["--model", systems.MODEL, "--seconds", str(seconds), "--seed", str(seed)]
    command = [sys.executable, "-m", "benchmarks.hostile_clients", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ)


def await_workers(url: str) -> int:
    """Wait for the workers, and return the port of the request plane of one."""
    headers = {"authorization": f"Bearer {HONEST_KEY}"}
    found: list[dict[str, object]] = []

    def is_so() -> bool:
        try:
            health = httpx.get(f"{url}/health", headers=headers, timeout=2).json()
        except httpx.TransportError:
            return False
        found[:] = [i for i in health.get("instances", ()) if i["endpoint"] == "generate"]
        return len({i["instance_id"] for i in found}) == NUM_WORKERS

    systems.eventually(is_so, within_s=60, what="the workers at the frontend", every_s=0.1)
    addresses = [text for text in map(str, iterate_texts(found[0])) if ":" in text]
    return next(int(port) for text in addresses if (port := text.rpartition(":")[2]).isdigit())


def iterate_texts(value: object) -> itertools.chain[object] | list[object]:
    """Return all scalars within a JSON value."""
    if isinstance(value, dict):
        return itertools.chain.from_iterable(map(iterate_texts, value.values()))
    if isinstance(value, list):
        return itertools.chain.from_iterable(map(iterate_texts, value))
    return [value]


async def run(options: argparse.Namespace, directory: Path) -> bool:
    """Run the attack, print the table and return whether all was well."""
    keys = directory / "keys.toml"
    keys.write_text(KEYS)
    deployment = systems.Deployment(directory)
    try:
        frontend = deployment.frontend("--api-keys-file", str(keys))
        workers = [deployment.native() for _ in range(NUM_WORKERS)]
        worker_port = await asyncio.to_thread(await_workers, frontend.url)
        processes: dict[str, systems.Process] = {"frontend": frontend}
        processes |= {f"worker {number}": worker for number, worker in enumerate(workers)}
        calm, attacked = Tally(), Tally()
        await during(frontend.url, calm, SETTLE_S)
        attacked.expected = calm.expected
        before = memory(processes)
        attack = start_attack(frontend.url, worker_port, options.minutes * 60, options.seed)
        await during(frontend.url, attacked, options.minutes * 60)
        told, _ = await asyncio.to_thread(attack.communicate)
        after_attack = Tally(expected=calm.expected)
        await during(frontend.url, after_attack, SETTLE_S)
        after = memory(processes)
        is_well = report(calm, attacked, after_attack, before, after, json.loads(told or b"{}"))
        dead = [name for name in processes if name not in after]
        print(f"{'dead':40} {', '.join(dead) or 'none'}")
        return is_well and not dead
    finally:
        deployment.end()


async def during(url: str, tally: Tally, seconds: float) -> None:
    """Let the honest ask for this time."""
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    await honest(url, tally, stop)


def report(
    calm: Tally,
    attacked: Tally,
    after_attack: Tally,
    before: dict[str, tuple[float, float]],
    after: dict[str, tuple[float, float]],
    hostile: dict[str, dict[str, int]],
) -> bool:
    """Print what was measured; return whether it is within the bounds."""
    for name, tally in (("calm", calm), ("attack", attacked), ("after", after_attack)):
        print(f"{f'{name}: answers':40} {dict(tally.outcomes)}")
        print(f"{f'{name}: gap, median / p99 / max s':40} {tally.spread(tally.gaps_s)}")
        print(f"{f'{name}: first, median / p99 / max s':40} {tally.spread(tally.first_s)}")
    for name, (now_mb, most_mb) in after.items():
        print(
            f"{f'{name}: MB before, after, peak':40} {before[name][0]:.0f}, {now_mb:.0f}, {most_mb:.0f}"
        )
    for kind, outcomes in hostile.items():
        print(f"{f'hostile: {kind}':40} {outcomes}")
    return (
        set(attacked.outcomes) | set(after_attack.outcomes) == {"right"}
        and percentile_99(attacked.gaps_s) <= MAX_P99_GAP_S
        and all(most_mb <= MAX_MB for _, most_mb in after.values())
    )


def main() -> int:
    """Return 0 if all was well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostile-") as directory:
        is_well = asyncio.run(run(options, Path(directory)))
    print("well" if is_well else "NOT WELL")
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
