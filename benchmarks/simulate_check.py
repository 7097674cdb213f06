"""`make simulate-check`: does the simulator foretell what real processes do with the same requests?

The requests of `dynamo.simulate routing --engine batch` (32 prefixes of 2,048 tokens, a short end of its own, 16 tokens
of answer), once in virtual time, once by a frontend and four simulated workers, with the same policy. Prompts are sent
as token ids: the simulator knows no tokenizer. What differs is what the simulator leaves out: HTTP, the planes between
the processes, and whatever else the machine does.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import frontend, routing, systems
from dynamo.router import config as router_config
from dynamo.simulate import routing as simulated
from dynamo.simulate import simulation, workload

BLOCKS, BLOCK = 1536, 16
WORDS = range(1000, 30_000)


def told(conc: int, requests: int) -> simulated.SimulateConfig:
    """What the simulator is told."""
    return simulated.SimulateConfig(
        engine="batch",
        workers=routing.WORKERS,
        cache_tokens=BLOCKS * BLOCK,
        block_size=BLOCK,
        max_num_seqs=64,
        concurrency=conc,
        requests=requests,
    )


def write_prompts(path: Path, shape: simulated.SimulateConfig) -> None:
    """The simulation's requests, in its order: the same name of a block is the same tokens."""
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
    with path.open("w") as file:
        while (arrival := made.next_arrival(0.0)) is not None:
            blocks = (random.Random(name).choices(WORDS, k=BLOCK) for name in arrival.names)
            ids = [token for block in blocks for token in block]
            file.write(json.dumps(ids[: arrival.num_tokens]) + "\n")


def measure(policy: str, model: Path, path: Path, conc: int, requests: int) -> tuple[float, float]:
    """Mean TTFT in seconds and the cached share, of real processes."""
    flags = [*routing.KV, "--router-policy", policy]
    with systems.running(
        "ours", sys.executable, model, routing.WORKER, flags, num_workers=routing.WORKERS
    ) as system:
        command = [sys.executable, str(frontend.HERE / "load.py"), "--url", system.url]
        command += ["--path", "/v1/completions", "--stream", "--osl", "16", "--prompts", str(path)]
        command += ["--conc", str(conc), "--n", str(requests)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = json.loads(done.stdout)
        counts = routing.count(system.urls)
    if row["errs"]:
        raise SystemExit(f"{row['errs']} errors: {row['last_err']}")
    cached = counts["dynamo_frontend_cached_tokens_sum"]
    return row["ttft_ms"]["mean"] / 1000, cached / counts[
        "dynamo_frontend_input_sequence_tokens_sum"
    ]


def predict(policy: str, shape: simulated.SimulateConfig) -> simulation.PolicySummary:
    """The same, in virtual time."""
    router = router_config.RouterConfig()
    return simulated.run(shape, router, None, policy, lambda _: None, time.perf_counter)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--requests", type=int, default=960)
    p.add_argument("--conc", type=int, nargs="*", default=[4, 16, 64])
    p.add_argument("--policy", nargs="*", default=["estimated-ttft", "round-robin"])
    args = p.parse_args()
    model = frontend.Files().model
    print(
        "| at once | policy | mean TTFT ms, predicted | measured | off by | cached, predicted | measured | load |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for conc in args.conc:
        shape = told(conc, args.requests)
        path = (frontend.WORK / f"simulated-{conc}.jsonl").resolve()
        write_prompts(path, shape)
        for policy in args.policy:
            foretold = predict(policy, shape)
            ttft, cached = measure(policy, model, path, conc, args.requests)
            print(
                f"| {conc} | {policy} | {1000 * foretold.mean_ttft:.1f} | {1000 * ttft:.1f}"
                f" | {100 * (foretold.mean_ttft / ttft - 1):+.1f} % | {foretold.hit_rate:.1%}"
                f" | {cached:.1%} | {os.getloadavg()[0]:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
