"""`make simulate-check`: does the simulator foretell what real processes do with the same requests?

The same requests once in virtual time, and twice by real processes. Closed loop: so many clients, each of which sends
its next request when the last has ended. Open loop: Poisson arrivals at shares of the rate that the simulation says 64
clients reach. Prompts are sent as token ids: the simulator knows no tokenizer. The setups:

    estimated-ttft   a frontend in router mode kv and four simulated workers, against `simulate routing --engine batch`
    round-robin      the same, by another policy
    tiers            the same with small caches and a host tier below each
    disaggregated    a simulated prefill worker and a simulated decode worker, against the planner's cluster
    native           one worker with the native engine, against the planner's cluster with the profile that
                     `python -m dynamo.profiler` makes of it, one half before the cells and one half after them

The simulator leaves out HTTP, the frontend and the planes between the processes. What they add to a first token is the
one number that is fitted, for each setup by a cell of open arrivals at a quarter of the load that is not judged. (With
two clients in a closed loop chance decides whether they go on sending at the same time.) How far the two measured runs
of a cell are apart is its repeatability; the second run begins when all cells had their first, since the speed of a
shared machine changes over minutes.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks import disagg, frontend, planner_live, routing, systems
from dynamo.engine.mock import timing
from dynamo.planner import observation, profile_files
from dynamo.router import config as router_config
from dynamo.simulate import plan_cluster, plan_policies, plan_run, plan_worker, workload
from dynamo.simulate import routing as simulated

BLOCKS, BLOCK, OSL = 1536, 16, 32
TIERED_BLOCKS, HOST_BLOCKS, HOST_GB_PER_S = 1024, 6144, 20.0
WORDS = range(5, 4000)  # that every model has
FULL = 64  # clients at which the rate of the open loop is taken
FITTED = 0.25  # the load of the cell that is not judged
NATIVE = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS))
NATIVE += ("--max-num-seqs", "64", "--max-num-batched-tokens", "512")
MEASUREMENTS = 3  # of a cell of the profile, before and after
GOALS = (("TTFT", 0.05), ("ITL", 0.05), ("requests/s", 0.03))


class Figures(NamedTuple):
    """What is compared: milliseconds, milliseconds, requests a second."""

    ttft: float
    itl: float
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """So many clients, or arrivals at so many requests a second."""

    name: str
    conc: int = 0
    rate: float = 0.0


# of a shape with its number of clients and requests, and the arrivals of an open loop
Foretell = Callable[[simulated.SimulateConfig, workload.Trace | None], Figures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An arrangement of real processes, and what foretells it."""

    name: str
    shape: simulated.SimulateConfig
    workers: Sequence[Sequence[str]]  # their commands
    frontend: Sequence[str] = ()
    foretell: Foretell
    foretell_after: Callable[[], Foretell] | None = None  # by what is known when all was measured

    @property
    def num_answering(self) -> int:
        """The workers that answer, which the frontend lists."""
        return sum("--is-prefill-worker" not in command for command in self.workers)


SETUPS = ("estimated-ttft", "round-robin", "tiers", "disaggregated", "native")
SHAPE = simulated.SimulateConfig(
    engine="batch",
    workers=routing.WORKERS,
    cache_tokens=BLOCKS * BLOCK,
    block_size=BLOCK,
    max_num_seqs=64,
    output_tokens=OSL,
)


def make_setup(name: str, model: Path, profiling: Path, profile_minutes: float) -> Setup:
    """Return the setup with this name; the first half of the native engine's profile is made now in `profiling`."""
    mocker = ["dynamo.mocker", "--model-path", str(model), "--model-name", "m", *routing.WORKER]
    match name:
        case "tiers":
            return make_tiered(mocker)
        case "disaggregated":
            times = plan_worker.StepTimes(
                prefill_s=lambda num_tokens: timing.prefill_ms(round(num_tokens)) / 1e3,
                decode_s=lambda share: timing.decode_ms(share) / 1e3,
                num_kv_tokens=BLOCKS * BLOCK,
                max_num_seqs=64,
            )
            return Setup(
                name=name,
                shape=SHAPE,
                workers=[[*mocker, *flags] for flags in disagg.SPLIT],
                foretell=by_cluster(times, observation.Replicas(1, 1)),
            )
        case "native":
            shape = replace(SHAPE, prefixes=8, prefix_tokens=256, suffix_tokens=48)

            def foretell(measurements: int) -> Foretell:
                times = profile_native(shape, profiling, measurements, profile_minutes / 2)
                return by_cluster(times, observation.Replicas(0, 1))

            return Setup(
                name=name,
                shape=shape,
                workers=[["dynamo.native", "--model-name", "m", *NATIVE]],
                foretell=foretell(MEASUREMENTS),
                foretell_after=lambda: foretell(2 * MEASUREMENTS),
            )
        case policy:
            return Setup(
                name=name,
                shape=SHAPE,
                workers=[mocker] * routing.WORKERS,
                frontend=[*routing.KV, "--router-policy", policy],
                foretell=by_policy(policy),
            )


def make_tiered(mocker: Sequence[str]) -> Setup:
    """Return the setup of small caches with a host tier below each."""
    shape = replace(
        SHAPE,
        cache_tokens=TIERED_BLOCKS * BLOCK,
        host_tokens=HOST_BLOCKS * BLOCK,
        host_gb_per_s=HOST_GB_PER_S,
    )
    flags = [
        "--num-gpu-blocks-override",
        str(TIERED_BLOCKS),
        "--kvbm-host-blocks",
        str(HOST_BLOCKS),
    ]
    flags += ["--kvbm-host-bandwidth", str(HOST_GB_PER_S)]
    flags += ["--kv-bytes-per-token", str(shape.kv_bytes_per_token)]
    return Setup(
        name="tiers",
        shape=shape,
        workers=[[*mocker, *flags]] * routing.WORKERS,
        frontend=routing.KV,
        foretell=by_policy("estimated-ttft"),
    )


def profile_native(
    shape: simulated.SimulateConfig, directory: Path, measurements: int, minutes: float
) -> plan_worker.StepTimes:
    """Return the step times of the native engine by what is measured already and what the profiler measures now."""
    isl = shape.prefix_tokens + shape.suffix_tokens
    command = [sys.executable, "-m", "dynamo.profiler", "--backend", "native"]
    command += ["--isl", str(isl), "--osl", str(OSL), "--budget-minutes", str(minutes)]
    command += ["--measurements", str(measurements), "--output", str(directory)]
    command += ["--worker-flags", shlex.join(NATIVE)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    profile = profile_files.read_profile(directory)
    times = plan_policies.step_times(profile, context=isl + OSL / 2)
    return replace(times, max_num_seqs=64, max_num_batched_tokens=512)


def by_policy(policy: str) -> Foretell:
    """Return the simulation of routing by this policy."""

    def foretell(shape: simulated.SimulateConfig, trace: workload.Trace | None) -> Figures:
        router = router_config.RouterConfig()
        summary = simulated.run(shape, router, trace, policy, lambda _: None, time.perf_counter)
        return Figures(1000 * summary.mean_ttft, 1000 * summary.mean_itl, summary.requests_per_s)

    return foretell


def by_cluster(times: plan_worker.StepTimes, replicas: observation.Replicas) -> Foretell:
    """Return the simulation by the planner's cluster; without prefill workers it is aggregated."""

    def foretell(shape: simulated.SimulateConfig, trace: workload.Trace | None) -> Figures:
        arrivals = trace or make_trace(shape, 0.0)
        requests = [
            plan_worker.Request(
                at=arrival.at,
                num_prompt=arrival.num_tokens,
                num_output=arrival.num_output,
                names=arrival.names,
                block_size=shape.block_size,
            )
            for arrival in arrivals.arrivals
        ]
        unsent = iter(() if trace else requests)

        def ask() -> None:
            if (request := next(unsent, None)) is not None:
                request.at = cluster.now
                cluster.submit(request)

        cluster = plan_cluster.PlanCluster(times, is_aggregated=not replicas.prefill, on_end=ask)
        cluster.add_ready(replicas)
        if trace:
            plan_run.feed(cluster, requests, 0, math.inf)
        for _ in range(shape.concurrency):
            ask()
        cluster.run_until(math.inf)
        seconds = max(request.ended_at for request in requests) - requests[0].at
        return Figures(
            1000 * statistics.fmean(request.ttft_s for request in requests),
            1000 * statistics.fmean(request.itl_s for request in requests),
            len(requests) / seconds,
        )

    return foretell


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


def predict(setup: Setup, cell: Cell, num_requests: int) -> Figures:
    """Return the figures in virtual time."""
    shape = replace(setup.shape, concurrency=cell.conc or 1, requests=num_requests)
    return setup.foretell(shape, make_trace(shape, cell.rate) if cell.rate else None)


def full_rate(setup: Setup, num_requests: int) -> float:
    """Return the requests a second that the simulation says so many clients reach."""
    return predict(setup, Cell(name="", conc=FULL), num_requests).rate


def measure(setup: Setup, cell: Cell, num_requests: int) -> Figures:
    """Return the figures of real processes."""
    shape = replace(setup.shape, concurrency=cell.conc or 1, requests=num_requests)
    trace = make_trace(shape, cell.rate)
    with serving(setup) as url:
        if cell.rate:
            return measure_open(url, trace)
        return measure_closed(url, trace, cell.conc)


@contextlib.contextmanager
def serving(setup: Setup) -> Iterator[str]:
    """Run the processes of a setup; gives the URL of the frontend."""
    port = systems.free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        environ = systems.environment(sys.executable, directory) | {"OMP_NUM_THREADS": "1"}
        log = Path(directory) / "log"
        output = stack.enter_context(log.open("w"))
        commands = [["dynamo.frontend", "--http-port", str(port), *setup.frontend], *setup.workers]
        running = [
            systems.launch(stack, [sys.executable, "-m", *command], environ, output)
            for command in commands
        ]
        limit_s = planner_live.FIRST_WORKERS_S
        systems.wait_for_workers(url, setup.num_answering, running, log, limit_s)
        time.sleep(disagg.SETTLE_S)
        yield url


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


def make_cells(setup: Setup, args: argparse.Namespace) -> list[Cell]:
    """Return the cells of a setup."""
    full = full_rate(setup, args.requests)
    cells = [Cell(name=f"{conc} clients", conc=conc) for conc in args.conc]
    return cells + [Cell(name=f"open, {load:.0%}", rate=load * full) for load in args.load]


def compare(foretold: Figures, measured: Sequence[Figures]) -> list[tuple[float, float, float]]:
    """Return of each figure the measured mean, how far it was foretold wrong, and how far the runs are apart."""
    rows = []
    for i, expected in enumerate(foretold):
        values = [figures[i] for figures in measured]
        mean = statistics.fmean(values)
        rows.append((mean, expected / mean - 1, (max(values) - min(values)) / mean))
    return rows


def check(setup: Setup, args: argparse.Namespace) -> list[list[tuple[float, float, float]]]:
    """Measure the cells of a setup, and print a row for each; return what `compare` says of them."""
    cells = make_cells(setup, args)
    fitted = Cell(name="", rate=FITTED * full_rate(setup, args.requests))
    # one client needs no more requests than warm the caches and some that hit them
    nums = {cell: min(args.requests, 120) if cell.conc == 1 else args.requests for cell in cells}
    runs = [{cell: measure(setup, cell, num) for cell, num in nums.items()}]
    fitted_ttft = measure(setup, fitted, args.requests).ttft
    runs.append({cell: measure(setup, cell, num) for cell, num in nums.items()})
    if setup.foretell_after is not None:
        setup = replace(setup, foretell=setup.foretell_after())
    # few requests wait for one another there
    overhead_ms = fitted_ttft - predict(setup, fitted, args.requests).ttft
    results = []
    for cell, num_requests in nums.items():
        simulated_only = predict(setup, cell, num_requests)
        foretold = simulated_only._replace(ttft=simulated_only.ttft + overhead_ms)
        figures = compare(foretold, [run[cell] for run in runs])
        results.append(figures)
        texts = [
            f"{expected:.1f}, {mean:.1f} ({error:+.1%}; {apart:.1%})"
            for expected, (mean, error, apart) in zip(foretold, figures, strict=True)
        ]
        name = f"{setup.name} (+{overhead_ms:.1f} ms)"
        print(f"| {name} | {cell.name} | {' | '.join(texts)} |", flush=True)
    return results


def main() -> None:
    """Measure, and print a row for each cell and the mean errors of each setup."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", nargs="*", default=SETUPS, choices=SETUPS)
    parser.add_argument("--requests", type=int, default=480)
    parser.add_argument("--conc", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--load", type=float, nargs="*", default=[0.5, 0.9, 1.3])
    parser.add_argument("--profile-minutes", type=float, default=10.0, help="of the native engine")
    args = parser.parse_args()
    print("foretold, measured (error; the measured runs apart)")
    print("| setup (fitted) | cell | TTFT ms | ITL ms | requests/s |")
    print("|---|---|---|---|---|")
    model, results = frontend.Files().model, {}
    for name in args.setup:
        with tempfile.TemporaryDirectory() as profiling:
            setup = make_setup(name, model, Path(profiling), args.profile_minutes)
            results[name] = check(setup, args)
        print(f"{name}: load average of the last 15 minutes {os.getloadavg()[2]:.1f}", flush=True)
    for name, rows in results.items():
        texts = [
            f"{figure} {statistics.fmean(abs(row[i][1]) for row in rows):.1%} (goal {goal:.0%},"
            f" runs apart {statistics.fmean(row[i][2] for row in rows):.1%})"
            for i, (figure, goal) in enumerate(GOALS)
        ]
        print(f"{name}: mean absolute error {', '.join(texts)}")


if __name__ == "__main__":
    main()
