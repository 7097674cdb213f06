"""`make bench-vllm`, first half: what our frontend and worker cost a user of vLLM, against `vllm serve` alone.

Both are up at once, with an engine of their own over the same model. A round is a burst of chat streams for either, at
each concurrency, in turning order; the same prompts for both, other ones in each round, so that nothing is known.
Figures are medians over rounds, and the best round: on a busy machine only the best says what the systems themselves
take, as everything else adds to it. --noise runs `vllm serve` beside `vllm serve`: what that shows is noise.

CPU is what serves beside the engine: vLLM's API server there; our frontend and the worker's own process here.
"""

import argparse
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import frontend, prompts, vllm_systems

BURSTS = {
    1: 3,
    4: 8,
    8: 16,
}  # clients, requests: short, so that the machine's moods hit both systems
PROMPT_TOKENS = 128
ANSWER_TOKENS = 64
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


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument("--noise", action="store_true")
    args = p.parse_args()
    files = frontend.Files()
    model = vllm_systems.model_at(frontend.WORK / "qwen3-0.25b", files.model)
    second = vllm_systems.alone if args.noise else vllm_systems.ours
    with (
        tempfile.TemporaryDirectory() as logs,
        vllm_systems.alone(model, Path(logs) / "alone.log") as alone,
        second(model, Path(logs) / "second.log") as other,
    ):
        rows = measure([alone, other], files, args.rounds)
    report(rows, [alone.name, other.name])


if __name__ == "__main__":
    main()
