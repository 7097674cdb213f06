"""`make simulate-check`: does the simulator foretell what real processes do with the same requests?

The requests of `dynamo.simulate routing --engine batch` (32 prefixes of 2,048 tokens, a short end of its own, 32 tokens
of answer), once in virtual time, and twice by a frontend and four simulated workers, with the same policy. Closed loop:
so many clients, each of which sends its next request when the last has ended. Open loop: Poisson arrivals at shares of
the rate that the simulation says 64 clients reach. Prompts are sent as token ids: the simulator knows no tokenizer.
The simulator leaves out HTTP, the frontend and the planes between the processes. What they add to a first token is the
one number that is fitted, by a cell of two clients that is not judged. How far the two measured runs of a cell are
apart is its repeatability.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks import frontend, planner_live, routing, systems
from dynamo.router import config as router_config
from dynamo.simulate import routing as simulated
from dynamo.simulate import simulation, workload

BLOCKS, BLOCK, OSL = 1536, 16, 32
WORDS = range(1000, 30_000)
FULL = 64  # clients at which the rate of the open loop is taken
FITTED = 2  # clients of the cell that is not judged


class Figures(NamedTuple):
    """What is compared: milliseconds, milliseconds, requests a second."""

    ttft: float
    itl: float
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """So many clients, or arrivals at so many requests a second."""

    name: str
    policy: str
    conc: int = 0
    rate: float = 0.0


def make_config(conc: int, num_requests: int) -> simulated.SimulateConfig:
    """Return the configuration of the simulation."""
    return simulated.SimulateConfig(
        engine="batch",
        workers=routing.WORKERS,
        cache_tokens=BLOCKS * BLOCK,
        block_size=BLOCK,
        max_num_seqs=64,
        output_tokens=OSL,
        concurrency=conc,
        requests=num_requests,
    )


def make_trace(shape: simulated.SimulateConfig, rate: float) -> workload.Trace:
    """Return the simulation's requests in its order, at Poisson arrivals; at 0 if the rate is 0."""
    made = workload.SharedPrefixes(
        num_prefixes=shape.prefixes,
        prefix_tokens=shape.prefix_tokens,
        suffix_tokens=shape.suffix_tokens,
        output_tokens=shape.output_tokens,
        num_requests=shape.requests,
        concurrency=shape.concurrency,
        block_size=shape.block_size,
        seed=shape.seed,
    )
    draw, at, arrivals = random.Random(1), 0.0, []
    while (arrival := made.next_arrival(0.0)) is not None:
        at += draw.expovariate(rate) if rate else 0.0
        arrivals.append(replace(arrival, at=at))
    return workload.Trace(arrivals, shape.block_size)


def prompts(trace: workload.Trace) -> Iterator[list[int]]:
    """Yield the prompts: the same name of a block is the same tokens."""
    for arrival in trace.arrivals:
        blocks = (random.Random(name).choices(WORDS, k=BLOCK) for name in arrival.names)
        yield [token for block in blocks for token in block][: arrival.num_tokens]


def predict(cell: Cell, num_requests: int) -> Figures:
    """Return the figures in virtual time."""
    shape = make_config(cell.conc or 1, num_requests)
    trace = make_trace(shape, cell.rate) if cell.rate else None
    summary: simulation.PolicySummary = simulated.run(
        shape,
        router_config.RouterConfig(),
        trace,
        cell.policy,
        lambda _: None,
        time.perf_counter,
    )
    return Figures(1000 * summary.mean_ttft, 1000 * summary.mean_itl, summary.requests_per_s)


def fit_overhead_ms(policy: str, model: Path, num_requests: int) -> float:
    """Return how much later a first token comes than in the simulation, where few requests wait for one another."""
    cell = Cell(name="", policy=policy, conc=FITTED)
    return measure(cell, model, num_requests).ttft - predict(cell, num_requests).ttft


def measure(cell: Cell, model: Path, num_requests: int) -> Figures:
    """Return the figures of real processes."""
    flags = [*routing.KV, "--router-policy", cell.policy]
    trace = make_trace(make_config(cell.conc or 1, num_requests), cell.rate)
    with systems.running(
        "ours", sys.executable, model, routing.WORKER, flags, num_workers=routing.WORKERS
    ) as system:
        if cell.rate:
            return measure_open(system.url, trace)
        return measure_closed(system.url, trace, cell.conc)


def measure_closed(url: str, trace: workload.Trace, conc: int) -> Figures:
    """Let so many clients send the requests."""
    path = (frontend.WORK / "simulated.jsonl").resolve()
    path.write_text("".join(json.dumps(ids) + "\n" for ids in prompts(trace)))
    command = [sys.executable, str(frontend.HERE / "load.py"), "--url", url]
    command += ["--path", "/v1/completions", "--stream", "--osl", str(OSL), "--prompts", str(path)]
    command += ["--conc", str(conc), "--n", str(len(trace.arrivals))]
    command += ["--extra", '{"ignore_eos": true}']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)
    if row["errs"]:
        raise SystemExit(f"{row['errs']} errors: {row['last_err']}")
    return Figures(row["ttft_ms"]["mean"], row["itl_ms"]["mean"], row["n"] / row["wall_s"])


def measure_open(url: str, trace: workload.Trace) -> Figures:
    """Send each request at its time."""
    host = urllib.parse.urlsplit(url).netloc
    fields = {"model": "m", "max_tokens": OSL, "ignore_eos": True, "stream": True}
    fields["stream_options"] = {"include_usage": True}
    bodies = [json.dumps(fields | {"prompt": ids}) for ids in prompts(trace)]
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    requests = [f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode() for body in bodies]
    begun = time.perf_counter()
    times = [arrival.at for arrival in trace.arrivals]
    run = asyncio.run(planner_live.send(url, times, iter(requests), OSL))
    seconds = time.perf_counter() - begun - times[0]
    if run.errors or run.num_cut or len(run.rests) < len(times):
        raise SystemExit(f"{run.errors} errors, {run.num_cut} cut: {run.last_error}")
    return Figures(
        1000 * statistics.fmean(run.first_texts),
        1000 * statistics.fmean(run.rests) / (OSL - 1),
        len(times) / seconds,
    )


def make_cells(args: argparse.Namespace) -> list[Cell]:
    """Return the cells of all policies."""
    cells = []
    for policy in args.policy:
        full = predict(Cell(name="", policy=policy, conc=FULL), args.requests)
        cells += [Cell(name=f"{conc} clients", policy=policy, conc=conc) for conc in args.conc]
        cells += [
            Cell(name=f"open, {load:.0%}", policy=policy, rate=load * full.rate)
            for load in args.load
        ]
    return cells


def compare(foretold: Figures, measured: Sequence[Figures]) -> list[tuple[float, float, float]]:
    """Return of each figure the measured mean, how far it was foretold wrong, and how far the runs are apart."""
    rows = []
    for i, expected in enumerate(foretold):
        values = [figures[i] for figures in measured]
        mean = statistics.fmean(values)
        rows.append((mean, expected / mean - 1, (max(values) - min(values)) / mean))
    return rows


def main() -> None:
    """Measure, and print a row for each cell and the mean errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=480)
    parser.add_argument("--conc", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--load", type=float, nargs="*", default=[0.5, 0.9, 1.3])
    parser.add_argument("--policy", nargs="*", default=["estimated-ttft", "round-robin"])
    args = parser.parse_args()
    model, errors = frontend.Files().model, []
    overhead_ms = fit_overhead_ms(args.policy[0], model, args.requests)
    print(f"{overhead_ms:.1f} ms are added to each first token")
    print("foretold, measured (error; the measured runs apart)")
    print("| cell | policy | TTFT ms | ITL ms | requests/s | load |\n|---|---|---|---|---|---|")
    for cell in make_cells(args):
        # one client needs no more requests than warm the caches and some that hit them
        num_requests = min(args.requests, 120) if cell.conc == 1 else args.requests
        simulated_only = predict(cell, num_requests)
        foretold = simulated_only._replace(ttft=simulated_only.ttft + overhead_ms)
        rows = compare(foretold, [measure(cell, model, num_requests) for _ in range(2)])
        errors.append(rows)
        texts = [
            f"{expected:.1f}, {mean:.1f} ({error:+.1%}; {apart:.1%})"
            for expected, (mean, error, apart) in zip(foretold, rows, strict=True)
        ]
        load = f"{os.getloadavg()[0]:.1f}"
        print(f"| {cell.name} | {cell.policy} | {' | '.join(texts)} | {load} |", flush=True)
    for i, (name, goal) in enumerate((("TTFT", 0.05), ("ITL", 0.05), ("requests/s", 0.03))):
        error = statistics.fmean(abs(rows[i][1]) for rows in errors)
        apart = statistics.fmean(rows[i][2] for rows in errors)
        print(f"{name}: mean absolute error {error:.1%} (goal {goal:.0%}), runs apart {apart:.1%}")


if __name__ == "__main__":
    main()
