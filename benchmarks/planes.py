"""What the distributed services cost a frontend: its CPU per token and per request, over each mix of planes.

    python -m benchmarks.planes --nats nats://127.0.0.1:4222 [--rounds 3]

Both systems live at once and take turns, as in `benchmarks.run`, whose loads these are. Whoever measures starts the
NATS server.
"""

import argparse
import contextlib
import statistics
import sys
from collections import defaultdict

from benchmarks import run, systems

DEFAULT = "file+tcp+zmq"


def mixes(nats: str) -> dict[str, list[str]]:
    """The flags of each."""
    over_nats = ["--request-plane", "nats", "--event-plane", "nats", "--nats-server", nats]
    return {DEFAULT: [], "file+nats+nats": over_nats}


def measure(nats: str, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Frontend CPU µs by cell and mix, a figure for each round."""
    model, prompts = run.prepare()
    costs: dict[tuple[str, str], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        for pace, tempo in (("paced", run.PACED_OURS), ("unpaced", run.UNPACED)):
            running = [
                stack.enter_context(
                    systems.running(name, sys.executable, model, [*tempo, *flags], flags)
                )
                for name, flags in mixes(nats).items()
            ]
            cells = [cell for cell in run.CELLS if cell.pace == pace]
            for turn in range(rounds + 1):
                for cell in cells:
                    for system in running[:: 1 if turn % 2 else -1]:
                        row = run.load(cell, system, prompts)
                        assert not row["errs"], row
                        if turn:  # the first warms up
                            costs[cell.name, system.name].append(run.frontend_cpu_us(row))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nats", required=True, help="the address of a NATS server")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    run.WORK.mkdir(parents=True, exist_ok=True)
    costs = measure(options.nats, options.rounds)
    print("| cell | mix | frontend CPU µs (median, best) | ratio of medians |")
    print("|---|---|---|---|")
    for (cell, name), found in costs.items():
        middle, base = statistics.median(found), statistics.median(costs[cell, DEFAULT])
        print(f"| {cell} | {name} | {middle:.1f}, {min(found):.1f} | {middle / base:.2f} |")


if __name__ == "__main__":
    main()
