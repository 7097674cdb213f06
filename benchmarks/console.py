"""The frontend's CPU per token with a console open and without, in turns: `python -m benchmarks.console`.

An open console follows topology, requests and metrics, once a second. With `--before CHECKOUT`, another checkout of
ours (one without a console) takes its turns too.

What the recorder costs while no console is open is too little for that, so it is measured alone: the meter of a request
from its begin to its end, with the recorder and without.
"""

import argparse
import contextlib
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks import systems
from dynamo.base import clock as clocks
from dynamo.frontend import metrics
from dynamo.frontend.console import recorder
from dynamo.observability import metrics as observed

METERS = 3000  # of one measurement
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


def measure_meter(observer: recorder.ConsoleRecorder | None, name: str) -> list[float]:
    """Return the CPU of a request's meter in ten measurements, in microseconds; the observer sees its end."""
    observers = () if observer is None else (observer,)
    now = clocks.SystemClock().now
    model = metrics.FrontendMetrics(observed.Registry(name), now, observers).for_model("m")
    figures = []
    for _ in range(10):
        begun = time.process_time()
        for _ in range(METERS):
            meter = metrics.RequestMeter(model, "chat_completions", is_stream=True)
            if observer is not None and observer.wants_explanation():
                meter.explanations = []
            meter.record_success()
        figures.append((time.process_time() - begun) / METERS * 1e6)
    return figures


def measure_sample(observer: recorder.ConsoleRecorder) -> float:
    """Return the CPU of one sample of one model's counters, in microseconds."""
    families = metrics.FrontendMetrics(observed.Registry("sampled"), clocks.SystemClock().now)
    families.for_model("m")
    begun = time.process_time()
    for _ in range(1000):
        observer.sample(families)
    return (time.process_time() - begun) / 1000 * 1e6


def measure_recorder() -> None:
    """Print what the recorder of a frontend costs while no console is open."""
    observer = recorder.ConsoleRecorder(clocks.SystemClock())
    alone, recorded = [], []
    for turn in range(10):
        alone += measure_meter(None, f"alone{turn}")
        recorded += measure_meter(observer, f"recorded{turn}")
    for name, figures in (("meter of a request", alone), ("with the recorder", recorded)):
        print(f"{name}: least {min(figures):.2f}, median {statistics.median(figures):.2f} µs")
    print(f"a sample of one model, every 5 s: {measure_sample(observer):.0f} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conc", type=int, default=64)
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--osl", type=int, default=128)
    parser.add_argument("--before", type=Path)
    arguments = parser.parse_args()
    measure_recorder()
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
