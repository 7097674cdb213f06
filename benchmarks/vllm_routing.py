"""`make bench-vllm`, second half: what the KV router saves with two real vLLM workers, against round-robin.

Prompts begin with one of eight prefixes of 768 tokens and end with a turn of their own; answers are short. A worker's
cache holds six of the prefixes: all workers together hold all, one alone does not. Two frontends, one for each way of
routing, share the workers; they are asked by turns, and before each burst all workers forget what they hold. So both
ways have the same engines, and the same moods of the machine.
"""

import argparse
import os
import statistics
import tempfile
import urllib.request
from collections import defaultdict
from pathlib import Path

from benchmarks import frontend, prompts, routing, vllm_systems

WAYS = ("round-robin", "kv")
PREFIXES = 8
PREFIX_TOKENS = 768
ANSWER_TOKENS = 8
CLIENTS = 4
REQUESTS = 64
BLOCKS = 160  # of 32 tokens, for each worker
_Row = vllm_systems.Figures


def measure(served: vllm_systems.Served, path: Path, rounds: int) -> dict[str, list[_Row]]:
    """A burst for each way of routing, in turning order."""
    rows = defaultdict(list)
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            row = burst(served, served.urls[which], path)
            rows[WAYS[which]].append(row)
            print(
                f"{WAYS[which]}: cached {row['cached']:.3f}, TTFT {row['ttft_ms']},"
                f" load average {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    return rows


def burst(served: vllm_systems.Served, url: str, path: Path) -> _Row:
    """One, from empty caches."""
    forget = urllib.request.Request(f"{url}/clear_kv_blocks", method="POST")
    urllib.request.urlopen(forget, timeout=60).close()
    before = routing.count([url])
    row = served.ask(url, path, conc=CLIENTS, n=REQUESTS, osl=ANSWER_TOKENS)
    after = routing.count([url])
    cached, tokens = (
        after[name] - before[name]
        for name in (
            "dynamo_frontend_cached_tokens_sum",
            "dynamo_frontend_input_sequence_tokens_sum",
        )
    )
    return row | {"cached": cached / tokens}


def report(rows: dict[str, list[_Row]]) -> None:
    """Medians over the bursts, and the KV router's ratio to round-robin round by round: median and range."""
    print("\n| | cached | TTFT mean, p50, p90 ms | requests/s |")
    print("|---|---|---|---|")
    for way in WAYS:
        cached = statistics.median(100 * row["cached"] for row in rows[way])
        times = ", ".join(f"{_middle(rows[way], part):.0f}" for part in ("mean", "p50", "p90"))
        rate = statistics.median(row["n"] / row["wall_s"] for row in rows[way])
        print(f"| {way} | {cached:.1f} % | {times} | {rate:.2f} |")
    for part in ("mean", "p50"):
        ratios = [
            kv["ttft_ms"][part] / robin["ttft_ms"][part]
            for robin, kv in zip(*(rows[way] for way in WAYS), strict=True)
        ]
        print(
            f"\nTTFT {part}, kv to round-robin: {statistics.median(ratios):.2f}"
            f" ({min(ratios):.2f}–{max(ratios):.2f})"
        )


def _middle(rows: list[_Row], part: str) -> float:
    return float(statistics.median(row["ttft_ms"][part] for row in rows))


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--blocks", type=int, default=BLOCKS, help="of 32 tokens, for each worker")
    args = p.parse_args()
    files = frontend.Files()
    model = vllm_systems.model_at(frontend.WORK / "qwen3-0.25b", files.model)
    path = (frontend.WORK / "vllm-prefixes.jsonl").resolve()
    prompts.prefixed(path, files.sampler, PREFIXES, PREFIX_TOKENS, REQUESTS)
    with (
        tempfile.TemporaryDirectory() as logs,
        vllm_systems.ours(
            model,
            Path(logs) / "ours.log",
            frontends=[("--router-mode", way) for way in WAYS],
            num_workers=2,
            worker_flags=("--num-gpu-blocks-override", str(args.blocks)),
        ) as served,
    ):
        rows = measure(served, path, args.rounds)
    report(rows)


if __name__ == "__main__":
    main()
