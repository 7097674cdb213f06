"""`make bench-vllm`, first half: what our frontend and worker cost a user of vLLM, against `vllm serve` alone.

Both are up at once, with an engine of their own over the same model. A round is a burst of chat streams for either, at
each concurrency, in turning order; the same prompts for both, other ones in each round, so that nothing is known.
Figures are medians over rounds, and the best round: on a busy machine only the best says what the systems themselves
take, as everything else adds to it. --noise runs `vllm serve` beside `vllm serve`: what that shows is noise.

CPU is what serves beside the engine: vLLM's API server there; our frontend and the worker's own process here.

Then nobody asks: the CPU that a worker and its engine take of a core, with NIXL and without, side by side. NIXL's
progress thread by itself polls without a pause, a whole core. --idle measures only that.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import frontend, load, prompts, vllm_systems

BURSTS = {
    1: 3,
    4: 8,
    8: 16,
}  # clients, requests: short, so that the machine's moods hit both systems
PROMPT_TOKENS = 128
ANSWER_TOKENS = 64
IDLE_TURNS, IDLE_S = 6, 10.0
IDLE_GOAL = 0.03  # of a core, a worker with NIXL
_Row = vllm_systems.Figures
_Rows = dict[tuple[int, int], list[_Row]]  # by concurrency and system


def tokens_per_s(row: _Row) -> float:
    return float(row["n"] * ANSWER_TOKENS / row["wall_s"])


def ttft_ms(row: _Row) -> float:
    return float(row["ttft_ms"]["p50"])


def itl_ms(row: _Row) -> float:
    return float(row["itl_ms"]["p50"])


def cpu_us(row: _Row) -> float:
    """A token, beside the engine."""
    cpu = row["cpu_ms_per_1k_tok"]
    return float(cpu.get("fe", 0.0) + cpu["wk"] - cpu["core"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What is compared, and the limit for ours, given what vLLM alone does."""

    of: Callable[[_Row], float]
    limit: Callable[[float], float] | None
    is_more_better: bool = False

    def verdict(self, alone: float, ours: float) -> str:
        """The ratio, and whether the goal is met."""
        ratio = f"{ours / alone:.3f}"
        if self.limit is None:
            return ratio
        limit = self.limit(alone)
        is_met = ours >= limit if self.is_more_better else ours <= limit
        return f"{ratio}, {'met' if is_met else 'missed'}"


FIGURES = {
    "tokens/s": Figure(of=tokens_per_s, limit=lambda alone: 0.97 * alone, is_more_better=True),
    "TTFT, ms": Figure(of=ttft_ms, limit=lambda alone: 1.03 * alone + 1),
    "ITL, ms": Figure(of=itl_ms, limit=lambda alone: 1.03 * alone + 1),
    "CPU beside the engine, µs a token": Figure(of=cpu_us, limit=None),
}


def measure(pair: list[vllm_systems.Served], files: frontend.Files, rounds: int) -> _Rows:
    """Every burst, on both."""
    rows: _Rows = defaultdict(list)
    for turn in range(rounds + 1):  # the first warms
        for conc, num in BURSTS.items():
            path = (frontend.WORK / f"vllm-{turn}-{conc}.jsonl").resolve()
            prompts.distinct(path, files.sampler, PROMPT_TOKENS, num, f"{turn} {conc}")
            for which in (0, 1) if turn % 2 else (1, 0):
                served = pair[which]
                row = served.ask(served.urls[0], path, conc=conc, n=num, osl=ANSWER_TOKENS)
                rows[conc, which] += [row] if turn else []
        print(f"round {turn} of {rounds}, load average {os.getloadavg()[0]:.1f}", flush=True)
    return rows


def report(rows: _Rows, names: list[str]) -> None:
    """A line for each concurrency and figure: median and best of both, and their ratios with the goals."""
    print(f"\n| at once | | {' | '.join(names)} | medians' ratio | bests' ratio |")
    print("|---|---|---|---|---|---|")
    for conc in BURSTS:
        for name, figure in FIGURES.items():
            both = [[figure.of(row) for row in rows[conc, which]] for which in (0, 1)]
            medians = [statistics.median(values) for values in both]
            bests = [(max if figure.is_more_better else min)(values) for values in both]
            cells = (
                f"{median:.1f}, {best:.1f}" for median, best in zip(medians, bests, strict=True)
            )
            verdicts = (figure.verdict(*pair) for pair in (medians, bests))
            print(f"| {conc} | {name} | {' | '.join(cells)} | {' | '.join(verdicts)} |")


def measure_idle(model: Path, logs: Path) -> None:
    """Print the share of a core that idle workers take, with NIXL and without: median and least of some turns."""
    with (
        vllm_systems.ours(model, logs / "nixl.log", connector="nixl") as nixl,
        vllm_systems.ours(model, logs / "none.log") as none,
    ):
        shares: dict[str, list[float]] = defaultdict(list)
        trees = {
            name: [pid for engine in served.engines for pid in load.tree(engine)]
            for name, served in (("nixl", nixl), ("none", none))
        }
        for _ in range(IDLE_TURNS):
            before, began_at = {n: load.cpu_seconds(p) for n, p in trees.items()}, time.monotonic()
            time.sleep(IDLE_S)
            elapsed_s = time.monotonic() - began_at
            for name, pids in trees.items():
                shares[name].append((load.cpu_seconds(pids) - before[name]) / elapsed_s)
    print(f"\nidle worker, share of a core, load average {os.getloadavg()[0]:.1f}")
    for name, values in shares.items():
        is_met = "met" if statistics.median(values) <= IDLE_GOAL else "missed"
        goal = f"; goal {IDLE_GOAL:.0%}: {is_met}" if name == "nixl" else ""
        print(
            f"--connector {name}: median {statistics.median(values):.1%}, least {min(values):.1%}{goal}"
        )


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument("--noise", action="store_true")
    p.add_argument("--idle", action="store_true")
    args = p.parse_args()
    files = frontend.Files()
    model = vllm_systems.model_at(frontend.WORK / "qwen3-0.25b", files.model)
    second = vllm_systems.alone if args.noise else vllm_systems.ours
    with tempfile.TemporaryDirectory() as directory:
        logs = Path(directory)
        if not args.idle:
            with (
                vllm_systems.alone(model, logs / "alone.log") as alone,
                second(model, logs / "second.log") as other,
            ):
                rows = measure([alone, other], files, args.rounds)
            report(rows, [alone.name, other.name])
        measure_idle(model, logs)


if __name__ == "__main__":
    main()
