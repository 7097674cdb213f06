"""`make bench-frontend`: what the frontend costs per token and per request, against what it may cost.

The frontend is driven by `load.py`, a process of its own, against a simulated worker. With --peer PYTHON, a Python that
has the real Dynamo installed, every cell runs on both, interleaved, and the ratio is printed. --before DIRECTORY adds
another checkout of ours, and --noise ours once more: a ratio to it shows how far the figures of equal code differ.
CPU is the processes' own accounting.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cpu_share, drafts, prompts, systems
from benchmarks.frontend_cells import (
    CELLS,
    MEMORY,
    OUR_WORKER,
    PEER_FRONTEND,
    PEER_WORKER,
    START,
    TWO_PROCESSES,
    Cell,
    Figures,
    Goal,
    Pace,
)

HERE = Path(__file__).parent
WORK = Path("run") / "bench"
NUM_STARTS = 10
CORE_SHARE = 0.25  # of each frontend process, when one is compared with two
OURS = "ours"
Rows = dict[tuple[str, str], list[float]]  # figures by row and system


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One of the systems that are compared, by its Python."""

    name: str
    python: str = sys.executable
    is_peer: bool = False
    checkout: Path | None = None  # another one of ours

    def flags(self, pace: Pace) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """For its worker and for its frontend."""
        return (PEER_WORKER[pace], PEER_FRONTEND[pace]) if self.is_peer else (OUR_WORKER[pace], ())


class Files:
    """Models and prompts, made once."""

    def __init__(self) -> None:
        WORK.mkdir(parents=True, exist_ok=True)
        self.model = (WORK / "model").resolve()
        if not self.model.exists():
            with drafts.whole(self.model) as draft:
                made = [sys.executable, str(HERE / "make_model.py"), str(draft)]
                subprocess.run(made, check=True)
        self.sampler = prompts.Sampler(self.model / "tokenizer.json")

    def of(self, cell: Cell, turn: int) -> str:
        """The prompts of a cell; long ones are others in each round, so that nothing is known but what should be."""
        kind, _, num_tokens = cell.prompts.partition("-")
        path = WORK / (f"{cell.prompts}-{turn}.jsonl" if num_tokens else f"{kind}.jsonl")
        if not path.exists():
            with drafts.whole(path) as draft:
                self._make(draft, cell, turn)
        return str(path.resolve())

    def _make(self, path: Path, cell: Cell, turn: int) -> None:
        kind, _, num_tokens = cell.prompts.partition("-")
        if not num_tokens:
            prompts.short(path)
        else:
            make = prompts.known if kind == "known" else prompts.distinct
            make(path, self.sampler, int(num_tokens), cell.requests, turn)


def load(cell: Cell, system: systems.System, path: str, *, requests: int | None = None) -> Figures:
    """Run one cell on one system; the load generator's figures."""
    arguments = ["--url", system.url, "--pids", system.pids, *cell.arguments(path)]
    if requests is not None:
        arguments += ["--n", str(requests)]
    return systems.generate_load(arguments, f"{cell.name} on {system.name}")


def bench_cells(cells: list[Cell], contenders: list[Contender], rounds: int, rows: Rows) -> None:
    """Every cell on every system, in turning order."""
    files = Files()
    with contextlib.ExitStack() as stack:
        running: dict[Pace, list[systems.System]] = defaultdict(list)
        for pace in dict.fromkeys(cell.pace for cell in cells):
            for one in contenders:
                started = systems.running(
                    one.name, one.python, files.model, *one.flags(pace), checkout=one.checkout
                )
                running[pace].append(stack.enter_context(started))
        for cell in cells:  # turn 0 warms: system prompts become known, code and caches hot
            for system in running[cell.pace]:
                load(cell, system, files.of(cell, 0), requests=min(cell.requests, 1000))
        for turn in range(1, rounds + 1):
            for cell in cells:
                for system in running[cell.pace][:: 1 if turn % 2 else -1]:
                    row = load(cell, system, files.of(cell, turn))
                    rows[cell.name, system.name].append(cell.figure(row))
                    if cell.pace == "unpaced":
                        rows["memory after load", system.name].append(row["rss_mb"]["fe"])
            loaded = os.getloadavg()[0]
            print(f"round {turn} of {rounds}, load average {loaded:.1f}", flush=True)


def bench_start(contenders: list[Contender], rows: Rows) -> None:
    """From the start of the process to its first answer on /health."""
    for _ in range(NUM_STARTS):
        for one in contenders:
            rows["start to healthy", one.name].append(
                systems.start_frontend_s(one.python, one.checkout)
            )


def bench_processes(rounds: int) -> None:
    """How many more requests two frontend processes answer than one, and what each costs.

    Each of them gets the same part of a core, so that nobody else is short of time even on two cores.
    """
    files, cell = Files(), next(cell for cell in CELLS if cell.conc == 64)
    found: dict[str, list[Figures]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        running = {
            number: stack.enter_context(
                systems.running(number, sys.executable, files.model, OUR_WORKER[cell.pace], flags)
            )
            for number in ("1", "2")
            for flags in [("--http-workers", number)]
        }
        for system in running.values():
            load(cell, system, files.of(cell, 0), requests=1000)
        is_shared = True
        for system in running.values():
            is_shared &= stack.enter_context(_sharing(system))
        for _ in range(rounds):
            for number, system in running.items():
                found[number].append(load(cell, system, files.of(cell, 1)))
    rate = {n: statistics.median(float(row["req_s"]) for row in rows) for n, rows in found.items()}
    cpu = {n: statistics.median(map(cell.figure, rows)) for n, rows in found.items()}
    ratio = rate["2"] / rate["1"]
    verdict = "MEETS" if ratio >= TWO_PROCESSES else "MISSES"
    if not is_shared:
        verdict = "(cannot be judged: no control groups here)"
    print(
        f"\n2 processes, {CORE_SHARE:.0%} of a core each: {ratio:.2f} × the requests of 1 ({rate['2']:,.0f} and "
        f"{rate['1']:,.0f} a second), goal ≥ {TWO_PROCESSES} × {verdict}; {cpu['2']:.0f} and {cpu['1']:.0f} µs CPU each"
    )


def _sharing(system: systems.System) -> contextlib.AbstractContextManager[bool]:
    """Its frontend processes, each on its part of a core."""
    parent = system.frontend_pids[0]
    return cpu_share.of_a_core(cpu_share.children(parent) or [parent], CORE_SHARE)


def report(cells: list[Cell], contenders: list[Contender], rows: Rows) -> None:
    """Print medians and bests, ours as a ratio to each other contender, and whether the goal is met."""
    others = contenders[1:]
    table: list[tuple[str, str, Goal | None]] = [(c.name, c.unit, c.goal) for c in cells]
    table += [("memory after load", "MB", MEMORY), ("start to healthy", "s", START)]
    heads = "".join(f" {other.name} (best) | ratio |" for other in others)
    print(f"\n| | unit | ours (best) |{heads} goal | |")
    print("|---|---|---|" + "---|---|" * len(others) + "---|---|")
    for name, unit, goal in table:
        if (name, OURS) not in rows:
            continue
        ours = rows[name, OURS]
        median = statistics.median(ours)
        columns, peer_median = "", None
        for other in others:
            figures = rows[name, other.name]
            base = statistics.median(figures)
            columns += f" {_shown(figures)} | {median / base:.2f} |"
            peer_median = base if other.is_peer else peer_median
        verdict = {None: "", True: "MEETS", False: "MISSES"}[
            goal.is_met(median, peer_median) if goal else None
        ]
        print(f"| {name} | {unit} | {_shown(ours)} |{columns} {goal or 'none'} | {verdict} |")


def _shown(found: list[float]) -> str:
    return f"{_digits(statistics.median(found))} ({_digits(min(found))})" if found else "–"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--peer", help="a Python with the real Dynamo installed, to compare with")
    p.add_argument("--before", type=Path, help="another checkout of ours, to compare with")
    p.add_argument("--noise", action="store_true", help="compare ours with ours, too")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--only", default="", help="only the cells whose name contains this")
    args = p.parse_args()
    contenders = [Contender(name=OURS)]
    if args.before:
        contenders.append(Contender(name="before", checkout=args.before))
    if args.noise:
        contenders.append(Contender(name="ours again"))
    if args.peer:
        contenders.append(Contender(name="Dynamo", python=args.peer, is_peer=True))
    cells = [cell for cell in CELLS if args.only in cell.name]
    rows: Rows = defaultdict(list)
    if not args.only or args.only in "start to healthy":
        bench_start(contenders, rows)
    if cells:
        bench_cells(cells, contenders, args.rounds, rows)
    report(cells, contenders, rows)
    if not args.only or args.only in "2 processes":
        bench_processes(args.rounds)


if __name__ == "__main__":
    main()
