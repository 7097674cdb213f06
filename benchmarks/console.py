"""The frontend's CPU per token with a console open and without, in turns: `python -m benchmarks.console`.

An open console follows topology, requests and metrics, once a second. With `--before CHECKOUT`, another checkout of
ours (one without a console) takes its turns too.
"""

import argparse
import contextlib
import statistics
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks import systems

MODEL = Path(__file__).parents[1] / "src/dynamo/engine/native/storyteller"
EVENTS = "/console/api/events?views=topology,requests,metrics"


@contextlib.contextmanager
def open_console(url: str) -> Iterator[list[int]]:
    """Follow the console's events while the block runs; the list gets the size of each piece that came."""
    sizes: list[int] = []
    is_over = threading.Event()
    answer = urllib.request.urlopen(url + EVENTS, timeout=30)

    def follow() -> None:
        while not is_over.is_set():
            sizes.append(len(answer.readline()))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield sizes
    finally:
        is_over.set()
        thread.join(5)
        answer.close()


def measure(system: systems.System, arguments: argparse.Namespace) -> float:
    """Return the frontend's CPU per token, in microseconds."""
    row = systems.generate_load(
        [
            *("--url", system.url, "--conc", str(arguments.conc), "--n", str(arguments.n)),
            *("--stream", "--model", "m", "--osl", str(arguments.osl)),
            *("--pids", f"fe={system.frontend_pids[0]}"),
        ],
        system.name,
    )
    return float(row["cpu_ms_per_1k_tok"]["fe"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conc", type=int, default=64)
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--osl", type=int, default=128)
    parser.add_argument("--before", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, list[float]] = {"closed": [], "open": [], "closed again": []}
    with contextlib.ExitStack() as stack:

        def start(name: str, checkout: Path | None) -> systems.System:
            running = systems.running(
                name,
                sys.executable,
                MODEL,
                ("--speedup-ratio", "20"),
                ("--router-mode", "kv"),
                checkout=checkout,
            )
            return stack.enter_context(running)

        system = start("ours", None)
        before = start("before", arguments.before) if arguments.before else None
        if before is not None:
            figures["before"] = []
        for _ in range(arguments.rounds):
            figures["closed"].append(measure(system, arguments))
            with open_console(system.url) as sizes:
                figures["open"].append(measure(system, arguments))
            figures["closed again"].append(measure(system, arguments))
            if before is not None:
                figures["before"].append(measure(before, arguments))
    for name, values in figures.items():
        print(f"{name}: median {statistics.median(values):.2f} µs per token, {sorted(values)}")
    print(f"the console read {sum(sizes) / 1e3:.0f} kB in the last round")


if __name__ == "__main__":
    main()
