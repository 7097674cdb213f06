"""What a load from host memory costs a prompt, beside the computation of the prompt's rest (native engine, CPU).

Two prompts of 2,592 tokens lie in host memory; by turns each is asked for with 256 new tokens, while so many other
requests decode. Per number of decoding requests, in milliseconds, medians and the least:

copy        the load itself, by the clock and in CPU time of its thread: the most that loading layer by layer, beside
            the computation, could save
missed      the steps between the load's begin and the step that computes the rest: the prompt waits for them
rest        that step, by the clock and in CPU time of the process
first       from the request to its first token
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import kvbm, random_models
from dynamo.engine.native import runner
from dynamo.engine.native.engine import NativeEngine
from dynamo.engine.native.sequence import Chunk
from dynamo.engine.native.settings import NativeConfig
from dynamo.kvbm import tier_copies, tiered_cache
from dynamo.protocols import blocks, generate

KNOWN, NEW, DECODED = 2592, 256, 100  # tokens
PROMPT_BLOCKS = (KNOWN + NEW) // kvbm.BLOCK + 1
NUM_WARM = 2  # rounds that are not counted: the second finds the speeds measured


@dataclass(frozen=True)
class Span:
    """A copy or a step, with what it had to do."""

    began_at: float
    ended_at: float
    cpu_s: float
    size: int  # bytes of a copy, tokens of a step

    @property
    def seconds(self) -> float:
        """The time by the clock."""
        return self.ended_at - self.began_at


@dataclass
class Spans:
    """The loads and the steps of one request."""

    loads: list[Span] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)

    def watch(self) -> None:
        """Record all loads and steps of this process from now on."""
        copy, compute = tier_copies.TierCopies.run, runner.Runner.run

        def run_copy(copies: Any, job: Any, *rest: Any) -> Any:
            began_at, cpu = time.perf_counter(), time.thread_time()
            outcome = copy(copies, job, *rest)
            if job.path == (tiered_cache.HOST, tiered_cache.DEVICE):
                cpu_s = time.thread_time() - cpu
                self.loads.append(Span(began_at, time.perf_counter(), cpu_s, job.num_bytes))
            return outcome

        def run_step(model: Any, chunks: Sequence[Chunk]) -> Any:
            began_at, cpu = time.perf_counter(), time.process_time()
            drawn = compute(model, chunks)
            largest = max(chunk.num_tokens for chunk in chunks)
            cpu_s = time.process_time() - cpu
            self.steps.append(Span(began_at, time.perf_counter(), cpu_s, largest))
            return drawn

        tier_copies.TierCopies.run = run_copy  # type: ignore[method-assign]
        runner.Runner.run = run_step  # type: ignore[method-assign]

    def clear(self) -> None:
        """Forget what was recorded."""
        self.loads.clear()
        self.steps.clear()


async def bench(model: Path, args: argparse.Namespace, spans: Spans, num_decoding: int) -> None:
    """Print one block of the table."""
    watch, draw = kvbm.Watch(), random.Random(num_decoding)
    device_blocks = PROMPT_BLOCKS + 2 + num_decoding * (2 * DECODED // kvbm.BLOCK + 2)
    engine = NativeEngine(
        model,
        NativeConfig(
            block_size=kvbm.BLOCK,
            num_gpu_blocks_override=device_blocks,
            max_num_seqs=16,
            threads=args.threads,
            connector="kvbm",
            kvbm_cpu_cache_override_num_blocks=4 * PROMPT_BLOCKS,
        ),
    )
    await engine.start(watch)
    names = iter(range(10**6))

    def draw_tokens(number: int) -> list[int]:
        return [draw.randrange(kvbm.VOCABULARY) for _ in range(number)]

    def ask(prompt: list[int], num_tokens: int) -> tuple[str, asyncio.Future[None]]:
        request_id = str(next(names))
        end = watch.begin(request_id)
        engine.submit(
            generate.Request(
                id=request_id,
                model="m",
                token_ids=blocks.pack(prompt),
                stop_conditions=generate.StopConditions(max_tokens=num_tokens, ignore_eos=True),
                sampling_options=generate.SamplingOptions(temperature=0.0),
            )
        )
        return request_id, end

    known = [draw_tokens(KNOWN) for _ in range(2)]
    rows = []
    for number in range(-2 - NUM_WARM, args.rounds):
        others = [ask(draw_tokens(DECODED), DECODED) for _ in range(num_decoding)]
        while any(len(watch.answers[name].token_ids) < 8 for name, _ in others):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # one event for all would be a sink of its own
        await asyncio.sleep(0.2 * draw.random())
        spans.clear()
        request_id, end = ask(known[number % 2] + draw_tokens(NEW), 1)
        await end
        first_s = watch.answers[request_id].times[0]
        if number >= 0:
            (load,) = spans.loads
            (rest,) = [step for step in spans.steps if step.size >= NEW]
            missed = [s for s in spans.steps if load.began_at < s.ended_at <= rest.began_at]
            missed_s = sum(step.ended_at - max(step.began_at, load.began_at) for step in missed)
            rows.append((load, missed_s, rest, first_s))
        await asyncio.gather(*(other for _, other in others))
        await asyncio.sleep(0.2)  # for the copies to host memory
    await engine.stop()
    print(f"\n{num_decoding} decoding, {rows[0][0].size / 1e6:.0f} MB loaded")
    print_times("copy", [load.seconds for load, *_ in rows], [load.cpu_s for load, *_ in rows])
    print_times("missed", [row[1] for row in rows])
    print_times("rest", [row[2].seconds for row in rows], [row[2].cpu_s for row in rows])
    print_times("first", [row[3] for row in rows])


def print_times(name: str, seconds: list[float], cpu_seconds: list[float] | None = None) -> None:
    """Print the median and the least of some times in milliseconds, by the clock and in CPU time."""
    cells = [
        f"{label} {1000 * statistics.median(each):8.1f}  least {1000 * min(each):8.1f}"
        for label, each in (("", seconds), ("CPU", cpu_seconds))
        if each is not None
    ]
    print(f"  {name:<7}{'     '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=random_models.SHAPES, default="qwen3-0.1b")
    parser.add_argument("--decoding", type=int, nargs="+", default=[0, 1, 4, 8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {args.shape}")
    spans = Spans()
    spans.watch()
    with tempfile.TemporaryDirectory() as directory:
        random_models.make(Path(directory), args.shape, "cpu")
        for num_decoding in args.decoding:
            asyncio.run(bench(Path(directory), args, spans, num_decoding))


if __name__ == "__main__":
    main()
