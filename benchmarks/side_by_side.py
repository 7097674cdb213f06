"""Run one benchmark in two checkouts of this project, interleaved, and compare all figures that it prints.

    python -m benchmarks.side_by_side ../before engine_step --rounds 1

Each round runs the benchmark once in the other checkout (*before*) and twice in this one (*after*, *again*), in turning
order. The ratio of again to after shows how far the figures of equal code differ: the noise. Figures are matched by
their position: the rows of both checkouts may be worded differently, but must come in the same order.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])")
Row = tuple[str, list[float]]  # what the line says, and its figures


def run(checkout: Path, module: str, flags: list[str]) -> list[Row]:
    """Return the lines of one run that hold a figure with a decimal point, or a table's cell."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(checkout / "src"), str(checkout)))}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *flags],
        cwd=checkout,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{module} failed in {checkout}: {done.stderr[-1000:]}")
    rows = []
    for line in done.stdout.splitlines():
        figures = [float(number.replace(",", "")) for number in NUMBER.findall(line)]
        if figures and "load average" not in line:
            rows.append((line, figures))
    return rows


def report(runs: dict[str, list[list[Row]]]) -> None:
    """Print a row for each figure that differs between runs: medians, and the two ratios."""
    first = runs["after"][0]
    shapes = {tuple(len(figures) for _, figures in rows) for all_ in runs.values() for rows in all_}
    if len(shapes) != 1:
        raise SystemExit(f"expected the same figures from every run, got {len(shapes)} shapes")
    print("| line of this checkout | figure | before | after | after / before | noise |")
    print("|---|---|---|---|---|---|")
    for row, (line, figures) in enumerate(first):
        for column in range(len(figures)):
            before, after, again = (
                statistics.median(rows[row][1][column] for rows in runs[name])
                for name in ("before", "after", "again")
            )
            values = {rows[row][1][column] for all_ in runs.values() for rows in all_}
            if len(values) == 1 or not before or not after:
                continue  # a label, such as the size of a batch
            print(
                f"| {line.strip('| ')[:70]} | {column + 1} | {before:g} | {after:g} "
                f"| {after / before:.3f} | {again / after:.3f} |"
            )


def main() -> None:
    """Run the rounds and print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("module", help="a module of benchmarks/, such as engine_step")
    parser.add_argument("--repeat", type=int, default=5, help="how many rounds to run")
    args, flags = parser.parse_known_args()
    checkouts = {"before": args.before.resolve(), "after": HERE, "again": HERE}
    runs: dict[str, list[list[Row]]] = {name: [] for name in checkouts}
    for turn in range(args.repeat):
        for name in list(checkouts)[:: 1 if turn % 2 else -1]:
            runs[name].append(run(checkouts[name], args.module, flags))
        print(f"round {turn + 1} of {args.repeat}, load {os.getloadavg()[0]:.1f}", flush=True)
    report(runs)


if __name__ == "__main__":
    main()
