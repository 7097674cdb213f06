"""What it brings to compute long prompts in a worker of their own, and what it costs: native engine, built-in model.

Two worker processes in both forms: *aggregated* (each computes prompts and answers) and *split* (one computes prompts,
one answers). Eight streams run all the time; long prompts arrive beside them, one after the other. The time between two
tokens of the running streams is what a reader sees; the time to the first token of a long prompt is its price.

    python -m benchmarks.disagg --rounds 3
    python -m benchmarks.disagg --forms lengths estimated     who decides better where a prompt is computed
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks import systems

NUM_STREAMS = 8
STREAM_PROMPT, LONG_PROMPT, SHORT_PROMPT = 32, 1500, 64
ALWAYS = ("--max-local-prefill-length", "0", "--max-prefill-queue-size", "1000")
SPLIT = (("--is-prefill-worker",), ("--disaggregation-mode", "decode", *ALWAYS))
AGGREGATED = (("--disaggregation-mode", "agg"),) * 2
DECODE = ("--disaggregation-mode", "decode")
FORMS = {
    "aggregated": AGGREGATED,
    "split": SPLIT,
    "lengths": (("--is-prefill-worker",), (*DECODE, "--disagg-policy", "lengths")),
    "estimated": (("--is-prefill-worker",), (*DECODE, "--disagg-policy", "estimated")),
}
# So few that warming up has used them all: a page that is touched for the first time costs more than to copy to it.
POOL = ("--num-gpu-blocks-override", "1200")
NUM_WARM = 14
SETTLE_S = 3.0  # for workers to connect, and for the first steps to be warm


@dataclass(slots=True)
class Measured:
    """Of one run. All times in seconds."""

    gaps: list[float] = field(default_factory=list)  # between tokens of the running streams
    first_tokens: list[float] = field(default_factory=list)  # of the prompts that arrive
    num_tokens: int = 0
    num_prompt_tokens: int = 0  # of the prompts that arrived
    wall_s: float = 0.0
    cpu_s: float = 0.0  # that the workers took

    @property
    def tokens_per_core_s(self) -> float:
        """All that were computed, of prompts and of answers."""
        return (self.num_prompt_tokens + self.num_tokens) / self.cpu_s


@contextlib.contextmanager
def serving(
    workers: tuple[tuple[str, ...], ...], log_path: Path, **variables: str
) -> Iterator[tuple[str, list[int]]]:
    """A frontend and these workers; gives the URL, and the workers' process ids. All write to one log."""
    port = systems.free_port()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        log = stack.enter_context(log_path.open("w"))
        environ = systems.environment(sys.executable, directory) | {"OMP_NUM_THREADS": "1"}
        environ |= variables
        commands = [["dynamo.frontend", "--http-port", str(port)]]
        commands += [["dynamo.native", "--model-name", "m", *POOL, *flags] for flags in workers]
        running = [
            systems.launch(stack, [sys.executable, "-m", *command], environ, log)
            for command in commands
        ]
        url = f"http://127.0.0.1:{port}"
        num_answering = sum("--is-prefill-worker" not in flags for flags in workers)
        systems.wait_for_workers(url, num_answering, running, log_path)
        time.sleep(SETTLE_S)
        yield url, [worker.pid for worker in running[1:]]


async def tokens(
    client: httpx.AsyncClient, url: str, prompt: list[int], max_tokens: int
) -> AsyncIterator[float]:
    """When each token of an answer came."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "nvext": {"ignore_eos": True},
    }
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                yield time.perf_counter()


async def read_on(client: httpx.AsyncClient, url: str, seed: int, found: Measured) -> None:
    """One stream after the other, until cancelled."""
    for i in itertools.count():
        last = None
        async for now in tokens(client, url, prompt(STREAM_PROMPT, (seed, i)), 1000):
            found.num_tokens += 1
            if last is not None:
                found.gaps.append(now - last)
            last = now


@contextlib.contextmanager
def log_file() -> Iterator[Path]:
    """Where processes may write."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "log"


def cpu_s(pids: list[int]) -> float:
    """Processor time that these have taken so far, in user code and for it."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def warm_up(url: str) -> None:
    """Both workers compute, and touch all blocks."""
    async with httpx.AsyncClient(timeout=60) as client:
        for i in range(2 * NUM_WARM):
            async for _ in tokens(client, url, prompt(LONG_PROMPT, ("warm", i)), 2):
                pass


async def measure(
    url: str, pids: list[int], *, num_streams: int, length: int, duration_s: float
) -> Measured:
    """Prompts of this length arrive one after the other beside the running streams; each is answered by 4 tokens."""
    found = Measured()
    async with httpx.AsyncClient(timeout=60) as client:
        reading = [asyncio.create_task(read_on(client, url, i, found)) for i in range(num_streams)]
        await asyncio.sleep(1.0 if num_streams else 0.0)
        found.gaps.clear()
        found.num_tokens, began_at, cpu_before_s = 0, time.perf_counter(), cpu_s(pids)
        while True:
            asked_at = time.perf_counter()
            if asked_at - began_at > duration_s:
                break
            times = [t async for t in tokens(client, url, prompt(length, asked_at), 4)]
            found.first_tokens.append(times[0] - asked_at)
            found.num_tokens += len(times)
            found.num_prompt_tokens += length
        found.wall_s = time.perf_counter() - began_at
        found.cpu_s = cpu_s(pids) - cpu_before_s
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    return found


def prompt(length: int, seed: object) -> list[int]:
    """One that no other begins like."""
    return random.Random(str(seed)).choices(range(5, 4000), k=length)


def row(name: str, runs: list[Measured]) -> str:
    """A line of the table, from the medians over the rounds."""

    def median_ms(read: object, share: float) -> str:
        values = [sorted(read(run)) for run in runs]  # type: ignore[operator]
        if not all(values):
            return "–"
        return f"{1000 * statistics.median(v[min(int(share * len(v)), len(v) - 1)] for v in values):.1f}"

    rate = statistics.median(run.num_tokens / run.wall_s for run in runs)
    prompts = statistics.median(len(run.first_tokens) / run.wall_s for run in runs)
    cells = [median_ms(lambda run: run.gaps, share) for share in (0.5, 0.99)]
    cells.append(median_ms(lambda run: run.first_tokens, 0.5))
    all_tokens = statistics.median(
        (run.num_tokens + run.num_prompt_tokens) / run.wall_s for run in runs
    )
    per_core = statistics.median(run.tokens_per_core_s for run in runs)
    cells += [f"{prompts:.2f}", f"{rate:.0f}", f"{all_tokens:.0f}", f"{per_core:.0f}"]
    return " | ".join(["", name, *cells, ""]).strip()


def main() -> None:
    """Print one table; forms are interleaved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=["aggregated", "split"], help="what to compare"
    )
    args = parser.parse_args()
    cells = {
        "8 streams, prompts of 1,500 tokens": (NUM_STREAMS, LONG_PROMPT),
        "nothing else, prompts of 1,500 tokens": (0, LONG_PROMPT),
        "nothing else, prompts of 64 tokens": (0, SHORT_PROMPT),
        "8 streams, prompts of 64 tokens": (NUM_STREAMS, SHORT_PROMPT),
    }
    runs: dict[tuple[str, str], list[Measured]] = {}
    with contextlib.ExitStack() as stack:  # all stand side by side: those that are not asked idle
        served = {}
        for form in args.forms:
            log = stack.enter_context(log_file())
            served[form] = stack.enter_context(serving(FORMS[form], log))
            asyncio.run(warm_up(served[form][0]))
        for _, (name, cell), form in itertools.product(
            range(args.rounds), cells.items(), args.forms
        ):
            num_streams, length = cell
            measuring = measure(
                *served[form], num_streams=num_streams, length=length, duration_s=args.seconds
            )
            runs.setdefault((name, form), []).append(asyncio.run(measuring))
    print(
        "| | ITL p50, ms | ITL p99, ms | TTFT p50 of the prompts, ms | prompts/s | tokens/s"
        " | with the prompts' | of these per second of the workers' CPU |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in cells:
        for form in args.forms:
            print(row(f"{name}, {form}", runs[name, form]))


if __name__ == "__main__":
    main()
