"""`make bench-planner`: the planner scales real processes, and does what the simulation of the same arrivals foretold.

The shape of `make simulate-planner`: a sinusoidal rate of prompts of 3,000 tokens with answers of 150, on the profile
h100-8b, prefill and decode apart, policy `predictive`. All times are divided by --compress: those of the steps, of a
start, of the arrivals, of the planner's interval and of the targets. A frontend with `--router-mode kv`, a planner
that starts simulated workers as processes, and this process, which sends each request at its time, whatever became of
those before it.

Afterwards the same arrivals, at the same offset to the planner's intervals, are simulated. The table compares, interval
by interval, the workers that the two planners ordered. Exits with 1 if a request was lost, failed or cut.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import frontend, load, systems
from dynamo.planner import observation, profile_files
from dynamo.simulate import plan_arrivals, plan_policies, plan_run, plan_worker

START_S, INTERVAL_S, TTFT_MS, ITL_MS, ROLE_CHANGE_S = 60.0, 10.0, 500.0, 50.0, 2.0
BLOCK, NUM_BLOCKS, MAX_GPUS = 64, 7000, 8
WORDS = range(1000, 30_000)
DRAIN_S = 60.0  # for the last answers, and for workers that drain
ALWAYS = ("--max-local-prefill-length", "0", "--max-prefill-queue-size", "1000")
FIRST_WORKERS_S = 300.0  # until they serve, on a busy machine
PROCESS_START_S = 1.5  # of a worker, without its engine


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One decision; `at` is in seconds."""

    at: float
    replicas: observation.Replicas
    reason: str = ""


class OneRequest(load.Connection):  # type: ignore[misc]
    """A connection for one request, whose answer is examined."""

    def next(self) -> None:
        if self.asked:
            self.transport.close()
            self.run.leave()
        else:
            super().next()

    def finish(self) -> None:
        expected = f'"completion_tokens":{self.run.num_output}'.encode()
        is_whole = b"data: [DONE]" in self.buffer and expected in self.buffer
        if not is_whole or b'"error"' in self.buffer:
            self.run.num_cut += 1
            self.run.last_error = bytes(self.buffer[-300:])
        super().finish()


def bodies(host: str, seed: int) -> Iterator[bytes]:
    """Yield requests whose prompts have no block in common."""
    draw = random.Random(seed)
    rest = ",".join(str(token) for token in draw.choices(WORDS, k=3000 - BLOCK))
    while True:
        first = ",".join(str(token) for token in draw.choices(WORDS, k=BLOCK))
        body = (
            f'{{"model":"m","prompt":[{first},{rest}],"max_tokens":150,"ignore_eos":true,'
            '"stream":true,"stream_options":{"include_usage":true}}'
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        )
        yield f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def send(
    url: str, arrivals: Sequence[float], requests: Iterator[bytes], num_output: int
) -> load.Run:  # type: ignore[valid-type]
    """Send a request at each of these times; return when all have ended."""
    door = urllib.parse.urlsplit(url)
    run = load.Run([], len(arrivals), len(arrivals), stream=True)
    run.requests, run.num_cut, run.num_output = requests, 0, num_output
    loop, begin = asyncio.get_running_loop(), time.monotonic()
    for at in arrivals:
        await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
        await loop.create_connection(lambda: OneRequest(run, door), door.hostname, door.port)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(run.done, DRAIN_S)
    return run


def read_ticks(log: Path) -> list[Tick]:
    """Return the decisions that the planner wrote, but for those without a reading of the traffic."""
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [
        Tick(
            at=row["time"],
            replicas=observation.Replicas(row["replicas"]["prefill"], row["replicas"]["decode"]),
            reason=row["reason"],
        )
        for row in rows
        if "no metrics" not in row["reason"]
    ]


def write_files(directory: Path, times: plan_worker.StepTimes) -> tuple[Path, Path]:
    """Write the profile for the planner and the step times for the workers, of h100-8b; return both paths."""
    profile = directory / "profile"
    profile_files.write_profile(plan_policies.sample_profile(times), profile)
    engine = directory / "engine.json"
    shares = [step / 200 for step in range(201)]
    lengths = [1, 100_000]
    engine.write_text(
        json.dumps(
            {
                "prefill_isl": lengths,
                "prefill_ttft_ms": [1e3 * times.prefill_s(n) for n in lengths],
                "decode_active_kv_tokens": [share * times.num_kv_tokens for share in shares],
                "decode_context_length": [3000],
                "decode_itl": [[1e3 * times.decode_s(share)] for share in shares],
            }
        )
    )
    return profile, engine


def compressed(factor: float) -> plan_worker.StepTimes:
    """Return the step times of h100-8b, so many times as fast."""
    times = plan_worker.h100_8b()
    return dataclasses.replace(
        times,
        prefill_s=lambda tokens: times.prefill_s(tokens) / factor,
        decode_s=lambda share: times.decode_s(share) / factor,
        kv_bytes_per_s=times.kv_bytes_per_s * factor,
    )


def measure(
    args: argparse.Namespace, arrivals: Sequence[float]
) -> tuple[list[Tick], float, load.Run]:  # type: ignore[valid-type]
    """Run the processes; return the decisions, when the first request was sent, and what became of all."""
    factor, python = args.compress, sys.executable
    start_s, port, planner_port = START_S / factor, systems.free_port(), systems.free_port()
    url = f"http://127.0.0.1:{port}"
    model = frontend.Files().model
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        contextlib.ExitStack() as stack,
    ):
        directory = Path(name)
        profile, engine = write_files(directory, compressed(factor))
        environ = systems.environment(python, name)
        output = stack.enter_context((directory / "log").open("w"))
        flags = ["--http-port", str(port), "--router-mode", "kv", *ALWAYS]
        first = systems.launch(stack, [python, "-m", "dynamo.frontend", *flags], environ, output)
        worker = (
            f"--planner-profile-data {engine} --block-size {BLOCK} --num-gpu-blocks-override"
            f" {NUM_BLOCKS} --startup-time {start_s - PROCESS_START_S:g}"
            f" --kv-transfer-bandwidth {64 * factor:g} {' '.join(ALWAYS)}"
        )
        planner = [
            *(python, "-m", "dynamo.planner", "--environment", "local", "--backend", "mocker"),
            *("--model", str(model), "--model-name", "m", "--frontend-url", url),
            *("--worker-flags", worker, "--planner-port", str(planner_port), "--log-dir", name),
            *("--mode", "disagg", "--policy", "predictive", "--max-gpu-budget", str(MAX_GPUS)),
            *("--profile-results-dir", str(profile), "--startup-time", f"{start_s:g}"),
            *("--adjustment-interval", f"{INTERVAL_S / factor:g}"),
            *("--ttft", f"{TTFT_MS / factor:g}ms", "--itl", f"{ITL_MS / factor:g}ms"),
        ]
        second = systems.launch(stack, planner, environ, output)
        systems.wait_for_workers(url, 1, [first, second], directory / "log", FIRST_WORKERS_S)
        log = directory / "decisions.jsonl"
        wait_for_first_workers(f"http://127.0.0.1:{planner_port}", log)
        begun = time.time()
        host = urllib.parse.urlsplit(url).netloc
        run = asyncio.run(send(url, arrivals, bodies(host, args.seed), 150))
        text = (directory / "log").read_text()
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
            (args.keep / "log").write_text(text)
            (args.keep / "decisions.jsonl").write_text(log.read_text())
        return read_ticks(log), begun, run


def wait_for_first_workers(planner_url: str, log: Path) -> None:
    """Wait until the planner knows one worker of each kind that serves, and has seen an interval of that."""
    deadline = time.monotonic() + FIRST_WORKERS_S
    serving = [
        re.compile(rf"^dynamo_planner_num_{pool}_replicas(\{{.*\}})? 1(\.0)?$", re.MULTILINE)
        for pool in ("prefill", "decode")
    ]
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            page = systems.fetch(f"{planner_url}/metrics").decode()
            if all(line.search(page) for line in serving):
                num_ticks = len(read_ticks(log))
                while len(read_ticks(log)) == num_ticks:
                    time.sleep(0.05)
                return
        time.sleep(0.1)
    raise SystemExit("the planner's first workers did not come")


def simulate(
    args: argparse.Namespace, requests: Sequence[plan_worker.Request], interval_s: float
) -> tuple[list[Tick], plan_run.PlanResult]:
    """Simulate the same arrivals; return the decisions and the figures."""
    factor = args.compress
    scenario = plan_run.PlanScenario(
        requests=requests,
        times=compressed(factor),
        ttft_s=TTFT_MS / 1e3 / factor,
        itl_s=ITL_MS / 1e3 / factor,
        interval_s=interval_s,
        startup_s=START_S / factor,
        role_change_s=ROLE_CHANGE_S / factor,
        max_gpus=MAX_GPUS,
        initial=observation.Replicas(1, 1),
    )
    profile = plan_policies.sample_profile(scenario.times)
    decide = plan_policies.make_decide("predictive", scenario, profile, "seasonal")
    ticks: list[Tick] = []

    def note(observed: observation.Observation) -> plan_run.WorkerOrder:
        order = decide(observed)
        ticks.append(Tick(at=observed.at, replicas=order.replicas))
        return order

    return ticks, plan_run.run(scenario, "predictive", note)


def num_changes(ticks: Sequence[Tick]) -> int:
    """Return how many pools were changed, as the simulator counts."""
    return sum(
        before != after
        for one, other in itertools.pairwise(ticks)
        for before, after in zip(one.replicas, other.replicas, strict=True)
    )


def report(
    args: argparse.Namespace,
    measured: Sequence[Tick],
    foretold: Sequence[Tick],
    run: load.Run,  # type: ignore[valid-type]
    result: plan_run.PlanResult,
) -> int:
    """Print both series and how far they are apart; return the exit status."""
    factor, rows = args.compress, list(zip(measured, foretold, strict=False))
    for number, (one, other) in enumerate(rows):
        mark = "" if one.replicas == other.replicas else "  <"
        print(
            f"{number * INTERVAL_S:5.0f} s  {plan_policies.split_name(one.replicas)}"
            f"  {plan_policies.split_name(other.replicas)}{mark}  {one.reason}"
        )
    ordered, expected = (
        sum(sum(tick.replicas) for tick in each) for each in zip(*rows, strict=True)
    )
    apart = sum(
        abs(a - b) for one, other in rows for a, b in zip(one.replicas, other.replicas, strict=True)
    )
    equal = statistics.fmean(one.replicas == other.replicas for one, other in rows)
    latencies = [factor * seconds for seconds in run.latencies]
    ttfts = [factor * seconds for seconds in run.first_texts]
    print(
        f"\nworkers ordered, summed over {len(rows)} intervals: {ordered} measured, {expected} foretold"
        f" ({ordered / expected - 1:+.1%}); apart {apart / expected:.1%}; equal in {equal:.0%} of the intervals\n"
        f"changes of a pool: {num_changes(measured)} measured, {num_changes(foretold)} foretold\n"
        f"mean latency {statistics.fmean(latencies):.2f} s measured, {factor * result.mean_latency:.2f} foretold;"
        f" mean TTFT {statistics.fmean(ttfts):.2f} s, {factor * result.mean_ttft:.2f}\n"
        f"{run.total} requests, {run.total - len(latencies)} lost, {run.errors} failed, {run.num_cut} cut"
        f"  (load average {os.getloadavg()[0]:.1f}) {run.last_error or ''}"
    )
    is_bad = len(latencies) < run.total or run.errors or run.num_cut
    return int(bool(is_bad))


def main() -> int:
    """Measure, simulate, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compress", type=float, default=2.0, help="times as fast as the profile")
    parser.add_argument("--seconds", type=float, default=600.0, help="of arrivals, uncompressed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="directory for the log and the decisions")
    args = parser.parse_args()
    requests = plan_arrivals.sinusoidal(seed=args.seed, duration_s=args.seconds)
    for request in requests:
        request.at /= args.compress
    ticks, begun, run = measure(args, [request.at for request in requests])
    num_before = sum(tick.at <= begun for tick in ticks)
    interval_s = statistics.fmean(b.at - a.at for a, b in itertools.pairwise(ticks))
    offset = num_before * interval_s + begun - ticks[num_before - 1].at
    for request in requests:
        request.at += offset
    foretold, result = simulate(args, requests, interval_s)
    last = requests[-1].at
    num_rows = sum(tick.at <= last for tick in foretold)
    return report(args, ticks[:num_rows], foretold[:num_rows], run, result)


if __name__ == "__main__":
    sys.exit(main())
