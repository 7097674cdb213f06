"""`make bench-router`, the live half: what a way of routing saves, with real processes and a real engine's pace.

Four simulated workers, whose caches hold 1,536 blocks of 16 tokens; prompts begin with one of 32 prefixes of 2,048
tokens, so a worker's cache holds 12 of them and all four together hold them all. A cell is a fresh system (empty
caches), so many clients that ask again at once, and 960 requests of 16 tokens; `decoding` compares our policies over
longer answers (--osl 16 128 512). With --peer PYTHON, a Python that has
the real Dynamo installed, it runs the same cells, directly before or after ours.

First touches alone allow 96.7 % of the prompt tokens to be cached. Figures are the frontends' own counts and the load
generator's clock; CPU is the processes' own accounting.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import drafts, frontend, prompts, systems

WORKERS = 4
PREFIXES = 32
PREFIX_TOKENS = 2048
WORKER = ["--speedup-ratio", "1", "--block-size", "16", "--num-gpu-blocks-override", "1536"]
WORKER += ["--max-num-seqs", "64"]
KV = ["--router-mode", "kv"]
FASTOKENS = ["--tokenizer", "fastokens"]  # the faster of Dynamo's
_METRIC = re.compile(r"^(\w+)(?:\{[^}]*\})? ([-+.\de]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A system and how it routes."""

    name: str
    flags: list[str]
    is_peer: bool = False
    num_frontends: int = 1


OURS = Way(name="ours, kv", flags=KV)
THEIRS = Way(name="Dynamo 1.6.1, kv", flags=[*KV, *FASTOKENS], is_peer=True)
BASELINES = (
    Way(
        name="Dynamo 1.6.1, round-robin",
        flags=["--router-mode", "round-robin", *FASTOKENS],
        is_peer=True,
    ),
    Way(name="ours, its formula", flags=[*KV, "--router-policy", "dynamo"]),
    *(
        Way(name=f"ours, {mode}", flags=["--router-mode", mode])
        for mode in ("round-robin", "least-loaded", "power-of-two", "consistent-hash")
    ),
)
DECODING = (
    OURS,
    *(
        Way(name=f"ours, kv, {policy}", flags=[*KV, "--router-policy", policy])
        for policy in ("dynamo", "lmetric", "consistent-hash", "least-loaded")
    ),
)
REPLICAS = (
    OURS,
    Way(name="ours, 2 frontends in step", flags=[*KV, "--router-replica-sync"], num_frontends=2),
    Way(name="ours, 2 frontends apart", flags=KV, num_frontends=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cell, once. Times in ms, shares from 0 to 1."""

    conc: int
    osl: int  # tokens of an answer
    way: str
    cached: float
    ttft: dict[str, float]
    requests_per_s: float
    frontend_cpu: float  # a request
    router: float | None  # the router's own account, a request
    errors: int
    fresh: bool


def measure(
    way: Way,
    python: str,
    model: Path,
    path: Path,
    conc: int,
    osl: int,
    args: argparse.Namespace,
) -> Row:
    """One cell on a fresh system."""
    with systems.running(
        way.name,
        python,
        model,
        WORKER,
        way.flags,
        num_workers=WORKERS,
        num_frontends=way.num_frontends,
    ) as system:
        shape = ["--stream", "--osl", str(osl), "--conc", str(conc), "--n", str(args.requests)]
        shape += ["--fresh"] if args.fresh else []
        command = [sys.executable, str(frontend.HERE / "load.py"), "--url", system.url, "--pids"]
        command += [system.pids, "--prompts", str(path), *shape]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the load generator failed on {way.name}: {done.stderr[-500:]}")
        return _row(way, (conc, osl), json.loads(done.stdout), count(system.urls), args.fresh)


def count(urls: Iterable[str]) -> dict[str, float]:
    """The frontends' metrics, summed over frontends and labels."""
    found: dict[str, float] = defaultdict(float)
    for url in urls:
        for name, value in _METRIC.findall(systems.fetch(f"{url}/metrics").decode()):
            found[name] += float(value)
    return found


def _row(way: Way, cell: tuple[int, int], told: dict, counts: dict[str, float], fresh: bool) -> Row:  # type: ignore[type-arg]
    inputs = counts["dynamo_frontend_input_sequence_tokens_sum"]
    stages = [name for name in counts if re.search(r"router_overhead_total_ms_sum$", name)]
    return Row(
        conc=cell[0],
        osl=cell[1],
        way=way.name,
        cached=counts["dynamo_frontend_cached_tokens_sum"] / inputs if inputs else 0.0,
        ttft=told["ttft_ms"],
        requests_per_s=told["req_s"],
        frontend_cpu=told["cpu_ms_per_req"]["fe"],
        router=sum(counts[name] for name in stages) / told["n"] if stages else None,
        errors=told["errs"],
        fresh=fresh,
    )


def report(rows: list[Row]) -> None:
    """A line for each cell: medians, and the range where there are several."""
    cells: dict[tuple[int, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        cells[row.osl, row.conc, row.way].append(row)
    print(
        "\n| answer | at once | way | cached | TTFT mean, p50, p99 ms | req/s | frontend ms CPU | router ms | errors |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (osl, conc, way), found in sorted(cells.items(), key=lambda cell: cell[0][:2]):
        ttft = ", ".join(
            f"{statistics.median(row.ttft[part] for row in found):.0f}"
            for part in ("mean", "p50", "p99")
        )
        routed = [row.router for row in found if row.router is not None]
        print(
            f"| {osl} | {conc} | {way} | {_with_range([100 * row.cached for row in found])} % | {ttft} "
            f"| {statistics.median(row.requests_per_s for row in found):.1f} "
            f"| {statistics.median(row.frontend_cpu for row in found):.2f} "
            f"| {f'{statistics.median(routed):.3f}' if routed else '–'} "
            f"| {sum(row.errors for row in found)} |"
        )


def _with_range(values: list[float]) -> str:
    middle = f"{statistics.median(values):.1f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.1f}–{max(values):.1f})"


def cells(args: argparse.Namespace) -> Iterator[tuple[Way, int, int]]:
    """What to run, in order; within a round all ways of one cell follow each other, in turning order."""
    ways = [OURS, THEIRS]
    if args.what == "baselines":
        ways += BASELINES
    if args.what == "replicas":
        ways = list(REPLICAS)
    if args.what == "decoding":
        ways = list(DECODING)
    ways = [way for way in ways if args.peer or not way.is_peer]
    for turn in range(args.rounds):
        for osl, conc in itertools.product(args.osl, args.conc):
            yield from ((way, conc, osl) for way in ways[:: -1 if turn % 2 else 1])


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "what", nargs="?", default="kv", choices=("kv", "baselines", "replicas", "decoding")
    )
    p.add_argument("--peer", help="a Python with the real Dynamo installed, to compare with")
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--fresh", action="store_true", help="a new connection for each request")
    p.add_argument("--requests", type=int, default=960)
    p.add_argument("--osl", type=int, nargs="*", default=[16], help="tokens of an answer")
    p.add_argument("--conc", type=int, nargs="*", default=[4, 16, 64])
    p.add_argument(
        "--keep", type=Path, help="append each cell to this file, one JSON object a line"
    )
    args = p.parse_args()
    files = frontend.Files()
    path = (frontend.WORK / "prefixes.jsonl").resolve()
    if not path.exists():
        with drafts.whole(path) as draft:
            prompts.prefixed(draft, files.sampler, PREFIXES, PREFIX_TOKENS, 1920)
    rows = []
    with contextlib.suppress(KeyboardInterrupt):
        for way, conc, osl in cells(args):
            python = args.peer if way.is_peer else sys.executable
            row = measure(way, python, files.model, path, conc, osl, args)
            rows.append(row)
            line = json.dumps({name: getattr(row, name) for name in Row.__slots__})
            print(f"{line}  load average {os.getloadavg()[0]:.1f}", flush=True)
            if args.keep:
                with args.keep.open("a") as file:
                    file.write(line + "\n")
    report(rows)


if __name__ == "__main__":
    main()
