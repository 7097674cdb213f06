"""What the distributed services cost a frontend: its CPU per token and per request, over each mix of planes.

    python -m benchmarks.planes --nats nats://127.0.0.1:4222 [--etcd http://127.0.0.1:2379] [--rounds 3]

The systems live at once and take turns, as in `benchmarks.frontend`, whose loads these are. Whoever measures starts
the servers.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass

from benchmarks import frontend
from benchmarks.frontend_cells import CELLS, Pace

DEFAULT = "file+tcp+zmq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix(frontend.Contender):
    """Ours, over some planes."""

    planes: tuple[str, ...] = ()

    def flags(self, pace: Pace) -> tuple[tuple[str, ...], tuple[str, ...]]:
        worker, ours = frontend.Contender.flags(self, pace)
        apart = (*self.planes, "--namespace", pace)  # they share etcd, and must not find each other
        return (*worker, *apart), (*ours, *apart)


def mixes(nats: str, etcd: str | None) -> list[frontend.Contender]:
    """With the flags of each."""
    over_nats = ("--request-plane", "nats", "--event-plane", "nats", "--nats-server", nats)
    made = [Mix(name=DEFAULT, python=sys.executable)]
    made.append(Mix(name="file+nats+nats", python=sys.executable, planes=over_nats))
    if etcd:
        by_etcd = (*over_nats, "--discovery-backend", "etcd", "--etcd-endpoints", etcd)
        made.append(Mix(name="etcd+nats+nats", python=sys.executable, planes=by_etcd))
    return list(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nats", required=True, help="the address of a NATS server")
    parser.add_argument("--etcd", help="the address of an etcd; without it that mix is left out")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows: frontend.Rows = defaultdict(list)
    cells = [cell for cell in CELLS if cell.unit == "µs CPU" and cell.pace != "long"]
    frontend.bench_cells(cells, mixes(options.nats, options.etcd), options.rounds, rows)
    print("| load | mix | frontend CPU µs (median, best) | ratio of medians |")
    print("|---|---|---|---|")
    for (cell, name), found in sorted(rows.items()):
        middle, base = statistics.median(found), statistics.median(rows[cell, DEFAULT])
        if not cell.startswith("memory"):
            print(f"| {cell} | {name} | {middle:.1f}, {min(found):.1f} | {middle / base:.2f} |")


if __name__ == "__main__":
    main()
