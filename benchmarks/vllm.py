"""`make bench-vllm`, first half: what our frontend and worker cost a user of vLLM, against `vllm serve` alone.

Both are up at once, with an engine of their own over the same model. A round is a burst of chat streams for either, at
each concurrency, in turning order; the same prompts for both, other ones in each round, so that nothing is known.
Figures are medians over rounds. --noise runs `vllm serve` beside `vllm serve`: what that shows is noise.

CPU is what serves beside the engine: vLLM's API server there; our frontend and the worker's own process here.
"""

import argparse
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks import frontend, prompts, vllm_systems

CONCURRENCIES = (1, 4, 8)
PROMPT_TOKENS = 128
ANSWER_TOKENS = 64
REQUESTS_EACH = (
    2  # of each client in a round: short bursts turn often, and the machine's moods hit both
)
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


FIGURES: dict[str, tuple[Callable[[_Row], float], Callable[[float], float] | None]] = {
    "tokens/s": (tokens_per_s, lambda alone: 0.97 * alone),
    "TTFT, ms": (ttft_ms, lambda alone: 1.03 * alone + 1),
    "ITL, ms": (itl_ms, lambda alone: 1.03 * alone + 1),
    "CPU beside the engine, µs a token": (cpu_us, None),
}


def measure(pair: list[vllm_systems.Served], files: frontend.Files, rounds: int) -> _Rows:
    """Every burst, on both."""
    rows: _Rows = defaultdict(list)
    for turn in range(rounds + 1):  # the first warms
        for conc in CONCURRENCIES:
            path = (frontend.WORK / f"vllm-{turn}-{conc}.jsonl").resolve()
            num = REQUESTS_EACH * conc
            prompts.distinct(path, files.sampler, PROMPT_TOKENS, num, f"{turn} {conc}")
            for which in (0, 1) if turn % 2 else (1, 0):
                served = pair[which]
                row = served.ask(served.urls[0], path, conc=conc, n=num, osl=ANSWER_TOKENS)
                rows[conc, which] += [row] if turn else []
        print(f"round {turn} of {rounds}, load average {os.getloadavg()[0]:.1f}", flush=True)
    return rows


def report(rows: _Rows, names: list[str]) -> None:
    """Medians, how the two compare round by round (median and quartiles), and the goals."""
    print(f"\n| at once | | {' | '.join(names)} | ratio | round by round | goal |")
    print("|---|---|---|---|---|---|---|")
    for conc in CONCURRENCIES:
        for what, (figure, goal) in FIGURES.items():
            alone, ours = ([figure(row) for row in rows[conc, which]] for which in (0, 1))
            middles = statistics.median(alone), statistics.median(ours)
            ratios = [mine / other for mine, other in zip(ours, alone, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"| {conc} | {what} | {middles[0]:.1f} | {middles[1]:.1f} | {middles[1] / middles[0]:.3f} "
                f"| {middle:.3f} ({low:.3f}–{high:.3f}) | {_verdict(what, goal, *middles)} |"
            )


def _verdict(what: str, goal: Callable[[float], float] | None, alone: float, ours: float) -> str:
    if goal is None:
        return "none"
    limit = goal(alone)
    is_met = ours >= limit if what == "tokens/s" else ours <= limit
    return f"{limit:.1f}: {'met' if is_met else 'missed'}"


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
