"""Do honest clients notice? Hostile clients of every kind ask beside sixteen honest streams.

    PYTHONPATH=tests:tests/system python -m benchmarks.hostile --minutes 15      (make hostile MINUTES=15)

A frontend with API keys, two native decode workers, a native prefill worker, and a simulated worker whose model has a
hostile chat template. The honest ask sixteen questions over and over; each answer has to be whole and the same as
before the attack. The hostile (`benchmarks.hostile_clients`) have a key of their own tenant, or none; or they have
broken into a member; or they are another user of this host. Printed are the gaps between two pieces of honest streams,
the peak of memory of every process and of its children, the load of the machine, and what the hostile met. The exit
code is 0 if every honest answer was right, the p99 of gaps is at most a second, no process died, none took more memory
than its bound, and the other user achieved nothing.
"""

import argparse
import asyncio
import base64
import collections
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import deployment as systems
import httpx
import test_other_users

import processes
from benchmarks import hostile_clients
from dynamo.transfer import descriptors
from dynamo.worker import model_source

NUM_STREAMS = 16
NUM_TOKENS = 100
NUM_WORKERS = 2
HOSTILE_MODEL = "hostile"
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


class Memory:
    """The memory of processes and of their children, which come and go, in MB."""

    def __init__(self, systems_by_name: dict[str, systems.Process]) -> None:
        self._systems = systems_by_name
        self.child_peak_mb: dict[str, float] = {}

    def now(self) -> dict[str, tuple[float, float]]:
        """Return MB of each process that lives: now, and at its peak."""
        return {
            name: (systems.rss_bytes(process.pid) / 2**20, peak_mb(process.pid))
            for name, process in self._systems.items()
            if process.is_running
        }

    async def watch(self) -> None:
        """Note the peaks of children, twice a second."""
        while True:
            for name, process in self._systems.items():
                for child in processes.descendants(process.pid):
                    with contextlib.suppress(OSError, StopIteration):  # it has ended meanwhile
                        most_mb = max(self.child_peak_mb.get(name, 0.0), peak_mb(child))
                        self.child_peak_mb[name] = most_mb
            await asyncio.sleep(0.5)


def start_attack(target: dict[str, object], seconds: float, seed: int) -> subprocess.Popen[bytes]:
    """Start the hostile clients in a process of their own."""
    flags = ["--seconds", str(seconds), "--seed", str(seed)]
    command = [sys.executable, "-m", "benchmarks.hostile_clients", *flags]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps(target).encode())
    process.stdin.close()
    process.stdin = None  # `communicate` would close it again
    return process


def port_of(address: str) -> int:
    """Return the port of an address."""
    return int(address.rpartition(":")[2])


async def await_target(url: str, directory: str) -> dict[str, object]:
    """Wait for the workers, and return what the hostile know of them (`hostile_clients.Target`)."""
    headers = {"authorization": f"Bearer {HONEST_KEY}"}

    def has_all() -> bool:
        try:
            health = httpx.get(f"{url}/health", headers=headers, timeout=2).json()
        except httpx.TransportError:
            return False
        workers = [i for i in health.get("instances", ()) if i["endpoint"] == "generate"]
        return len({i["instance_id"] for i in workers}) == NUM_WORKERS + 1

    await asyncio.to_thread(
        systems.eventually, has_all, within_s=120, what="the workers at the frontend", every_s=0.1
    )
    async with asyncio.timeout(120):
        # Discovery has no event for it here: the prefill worker still starts.
        while (cluster := await test_other_users.addresses(directory))["metadata"] is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    metadata = descriptors.decode(base64.b64decode(cluster["metadata"]))
    return {
        "host": "127.0.0.1",
        "port": port_of(url),
        "worker_port": port_of(cluster["instances"]["dynamo/backend/generate"]),
        "transfer_port": port_of(metadata.addresses["tcp"]),
        "key": HOSTILE_KEY,
        "model": systems.MODEL,
        "hostile_model": HOSTILE_MODEL,
        "cluster": cluster,
    }


def make_hostile_model(directory: Path) -> Path:
    """Write the built-in model's files with a hostile chat template, and return the directory."""
    made = directory / HOSTILE_MODEL
    shutil.copytree(model_source.built_in(), made)
    config = json.loads((made / "tokenizer_config.json").read_text())
    config["chat_template"] = hostile_clients.hostile_template()
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


async def run(options: argparse.Namespace, directory: Path) -> bool:
    """Run the attack, print the table and return whether all was well."""
    keys = directory / "keys.toml"
    keys.write_text(KEYS)
    deployment = systems.Deployment(directory)
    try:
        frontend = deployment.frontend("--api-keys-file", str(keys))
        role = "--disaggregation-mode"
        workers = [deployment.native(role, "decode") for _ in range(NUM_WORKERS)]
        started: dict[str, systems.Process] = {"frontend": frontend}
        started |= {f"decode worker {number}": worker for number, worker in enumerate(workers)}
        started["prefill worker"] = deployment.native(role, "prefill")
        model = make_hostile_model(directory)
        started["simulated worker"] = deployment.mocker("--model", str(model))
        target = await await_target(frontend.url, deployment.environ["DYN_FILE_KV"])
        calm, attacked = Tally(), Tally()
        await during(frontend.url, calm, SETTLE_S)
        attacked.expected = calm.expected
        memory = Memory(started)
        before = memory.now()
        attack = start_attack(target, options.minutes * 60, options.seed)
        watching = asyncio.ensure_future(memory.watch())
        await during(frontend.url, attacked, options.minutes * 60)
        found, _ = await asyncio.to_thread(attack.communicate)
        watching.cancel()
        print(f"{'load average at the end':40} {os.getloadavg()[0]:.1f}")
        after_attack = Tally(expected=calm.expected)
        await during(frontend.url, after_attack, SETTLE_S)
        after = memory.now()
        hostile = json.loads(found or b"{}")
        is_well = report(calm, attacked, after_attack, before, after, hostile)
        for name, most_mb in memory.child_peak_mb.items():
            print(f"{f'children of {name}: MB, peak of any':40} {most_mb:.0f}")
        dead = [name for name in started if name not in after]
        print(f"{'dead':40} {', '.join(dead) or 'none'}")
        harmless = all(
            outcome.startswith(("refused", "skipped"))
            for outcome in hostile.get("another_user", ())
        )
        children_fit = all(most_mb <= MAX_MB for most_mb in memory.child_peak_mb.values())
        return is_well and harmless and children_fit and not dead
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
