"""What knowing who holds what costs the router: `python -m benchmarks.router_index [--peer PYTHON] [--rounds 5]`.

Each round runs `index_cells.py` on ours and, with --peer, on the real Dynamo's radix tree, in turn and each in a
process of its own. Medians are printed, with the best in brackets. Through its bindings each call of the real one also
pays for JSON, for the conversion of lists and for a hand-over to a thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
ENVIRON = {"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1"}


def run(python: str, system: str, num_blocks: int) -> dict[str, float]:
    """One run's cells."""
    environ = ENVIRON | ({"PYTHONPATH": os.pathsep.join(sys.path)} if system == "ours" else {})
    done = subprocess.run(
        [python, str(HERE / "index_cells.py"), system, str(num_blocks)],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )
    if done.returncode:
        raise SystemExit(f"{system} failed: {done.stderr[-1000:]}")
    cells: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return cells


def shown(figures: list[float]) -> str:
    if not figures:
        return "–"
    return f"{statistics.median(figures):.4g} ({min(figures):.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="a Python that has the real Dynamo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    args = parser.parse_args()
    systems = {"ours": sys.executable} | ({"peer": args.peer} if args.peer else {})
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(args.rounds):
        for system, python in systems.items():
            for cell, figure in run(python, system, args.blocks).items():
                figures[cell][system].append(figure)
    print(f"| {args.blocks:,} blocks, 64 workers | " + " | ".join(systems) + " |")
    print("|---|" + "---|" * len(systems))
    for cell, by_system in figures.items():
        print(f"| {cell} | " + " | ".join(shown(by_system[system]) for system in systems) + " |")


if __name__ == "__main__":
    main()
