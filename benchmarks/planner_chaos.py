"""What streams see while their planner is killed every five seconds: `make chaos-planner`.

A frontend, and a planner that starts simulated workers, under a ramp of streams. Every five seconds the planner is
killed with SIGKILL and another one started; each second time one of the workers, which then drain, is killed as well.
Exits with 1 if an answer was cut, failed, or is too short, or if there were ever more workers than the budget.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from concurrent import futures
from pathlib import Path

import deployment as systems
import httpx

import ports
import processes

PERIOD_S = 5.0
MOST_STREAMS, MOST_WORKERS, NUM_TOKENS = 16, 3, 200
LIMIT_S = 120.0
WORKER = "--tick-ms 10 --num-gpu-blocks-override 80 --block-size 64 --max-num-seqs 16"
SCALING = (
    "--adjustment-interval", "0.25", "--scale-down-delay", "1", "--max-workers", str(MOST_WORKERS),
    "--decode-kv-scale-up-threshold", "0.3", "--decode-kv-scale-down-threshold", "0.15",
)  # fmt: skip


def ask(frontend: systems.Frontend) -> str:
    """Return how one streamed answer ended."""
    options = {"include_usage": True}
    body = systems.chat(
        "Tell me a story", stream=True, ignore_eos=True, max_tokens=NUM_TOKENS,
        stream_options=options,
    )  # fmt: skip
    url, num_tokens, end = f"{frontend.url}/v1/chat/completions", 0, ""
    try:
        with httpx.stream("POST", url, json=body, timeout=LIMIT_S) as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}"
            for line in answer.iter_lines():
                end = line.removeprefix("data: ") or end
                if end.startswith("{"):
                    chunk = json.loads(end)
                    if "error" in chunk:
                        return f"error: {chunk['error']}"
                    num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    except httpx.HTTPError as error:
        return f"cut: {error!r}"
    return "complete" if (num_tokens, end) == (NUM_TOKENS, "[DONE]") else f"{num_tokens} tokens"


def start_planner(deployment: systems.Deployment, frontend: systems.Frontend) -> systems.Process:
    """Start a planner of simulated workers."""
    argv = ("dynamo.planner", "--environment", "local", "--backend", "mocker")
    argv += ("--model-name", systems.MODEL, "--frontend-url", frontend.url, *SCALING)
    return deployment.run(*argv, "--worker-flags", WORKER, "--planner-port", str(ports.reserve()))


def workers_of(planner: systems.Process) -> list[int]:
    """Return the processes of a planner that are workers."""
    commands = {pid: command_of(pid) for pid in processes.descendants(planner.pid)}
    return [pid for pid, command in commands.items() if b"dynamo.mocker" in command]


def command_of(pid: int) -> bytes:
    """Return the command line of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def run(seconds: float) -> int:
    """Run the ramp, print what happened, and return the exit status."""
    over, results, most_workers, num_killed = threading.Event(), [], 0, 0
    with tempfile.TemporaryDirectory() as directory, futures.ThreadPoolExecutor(99) as pool:
        deployment = systems.Deployment(Path(directory))
        deployment.environ["DYN_WORKER_WAIT_SECS"] = str(LIMIT_S)
        try:
            frontend = deployment.frontend()
            planner = start_planner(deployment, frontend)
            frontend.await_models([systems.MODEL])

            def stream() -> None:
                while not over.is_set():
                    results.append(ask(frontend))

            began_at = time.monotonic()
            streams, number = [pool.submit(stream)], 0
            while (elapsed_s := time.monotonic() - began_at) < seconds:
                target = 1 + int(MOST_STREAMS * elapsed_s / seconds)
                streams += [pool.submit(stream) for _ in range(target - len(streams))]
                time.sleep(PERIOD_S)
                below = workers_of(planner)
                most_workers = max(most_workers, len(below))
                planner.kill()
                number += 1
                if below and number % 2 == 0:
                    processes.kill([random.Random(number).choice(below)])
                    num_killed += 1
                planner = start_planner(deployment, frontend)
            over.set()
            futures.wait(streams)
        finally:
            over.set()
            deployment.end()
    bad = [result for result in results if result != "complete"]
    sys.stdout.write(
        f"{len(results)} streams of {NUM_TOKENS} tokens, {number} planners and {num_killed} draining workers killed:"
        f" {len(bad)} not complete, at most {most_workers} workers of {MOST_WORKERS} below a planner\n"
    )
    for result in sorted(set(bad)):
        sys.stdout.write(f"  {bad.count(result)} x {result}\n")
    return int(bool(bad) or most_workers > MOST_WORKERS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    sys.exit(run(parser.parse_args().seconds))
