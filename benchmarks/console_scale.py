"""The console and `/usage` at scale: `python -m benchmarks.console_scale`.

A frontend whose usage file has a million requests in as many rows as are kept, 1,000 simulated workers, and 10,000
requests through it. Then the seconds of `/usage` and of each view's API, also while 32 streams are served, the
frontend's memory, and (unless `--no-pages`) in a real Chromium the first paint, the layout shift and the errors of each
view.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator

from benchmarks import systems
from dynamo.console import usage

MODEL = "storyteller"
VIEWS = ("topology", "requests", "cache", "metrics", "planner", "models", "usage", "logs")
PATHS = (
    *("/usage", "/usage?since=2026-11-01", "/usage?format=csv"),
    *(f"/console/api/{name}" for name in ("topology", "requests", "metrics", "models", "cache")),
)
WATCH = """() => { window.shift = 0; new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
}).observe({type: "layout-shift", buffered: true}); }"""


def fill_usage(path: pathlib.Path, num_requests: int) -> float:
    """Record requests of all days, keys and APIs in a table, write it as a frontend does; return the seconds."""
    table = usage.UsageTable()
    today = datetime.datetime.now(datetime.UTC).timestamp()
    began_at = time.perf_counter()
    for number in range(num_requests):
        counts = table.count(
            today - 86_400 * (number % 99),
            key=f"key-{number % 101}",
            tenant=f"tenant-{number % 101}",
            model=MODEL,
            api=("chat_completions", "completions")[number % 2],
        )
        counts.num_requests += 1
        counts.output_tokens += 100
    elapsed_s = time.perf_counter() - began_at
    path.write_text(json.dumps([row_of(row) for row in table.rows()]))
    return elapsed_s


def row_of(row: usage.UsageRow) -> dict[str, object]:
    return {name: getattr(row, name) for name in usage.UsageRow.__struct_fields__}


def rss_mb(pid: int) -> float:
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def fetch(url: str, body: object = None) -> bytes:
    content = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, data=content, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def ask(url: str, num_requests: int) -> float:
    """Send so many requests of one token, 16 at a time; return the seconds."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    began_at = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for _ in pool.map(lambda _: fetch(f"{url}/v1/chat/completions", body), range(num_requests)):
            pass
    return time.perf_counter() - began_at


def time_paths(url: str, rounds: int) -> None:
    """Print the seconds of each path, and the size of its answer."""
    for path in PATHS:
        times = []
        for _ in range(rounds):
            began_at = time.perf_counter()
            size = len(fetch(url + path))
            times.append(1000 * (time.perf_counter() - began_at))
        print(
            f"{path}: median {statistics.median(times):.0f} ms, most {max(times):.0f} ms, {size / 1e3:.0f} kB"
        )


@contextlib.contextmanager
def streams(url: str) -> Iterator[None]:
    """Keep 32 streams of 64 tokens open, in a closed loop, while the block runs."""
    load = [sys.executable, str(pathlib.Path(__file__).parent / "load.py"), "--url", url]
    load += ["--model", MODEL, "--stream", "--osl", "64", "--conc", "32", "--n", "1000000"]
    process = subprocess.Popen(load, stdout=subprocess.DEVNULL)
    try:
        time.sleep(3)  # until all of them run
        if process.poll() is not None:
            raise SystemExit("the load generator ended")
        yield
    finally:
        process.terminate()
        process.wait()


def paint(url: str) -> None:
    """Print the first paint of each view, in a page of its own, and what moved or failed there."""
    from playwright import sync_api  # an extra

    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for view in VIEWS:
            paints, shifts, problems = [], [], []
            for _ in range(3):
                page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
                page.on("pageerror", lambda error, found=problems: found.append(str(error)))
                page.on("requestfailed", lambda asked, found=problems: found.append(asked.url))
                page.on("console", lambda line, found=problems: found.append(line.text))
                page.goto(f"{url}/#/{view}")
                page.evaluate(WATCH)
                page.wait_for_selector(".tiles, .card, .log")
                page.wait_for_timeout(1100)  # frames come once a second
                entries = (
                    "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
                )
                paints.append(page.evaluate(entries))
                shifts.append(page.evaluate("window.shift"))
                page.context.close()
            print(
                f"{view}: first paint median {statistics.median(paints):.0f} ms, most {max(paints):.0f} ms,"
                f" layout shift {max(shifts):.3f}, errors {problems}"
            )
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--recorded", type=int, default=1_000_000)
    parser.add_argument("--pages", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory, "usage.json")
        elapsed_s = fill_usage(file, arguments.recorded)
        num_rows = len(json.loads(file.read_text()))
        print(f"{arguments.recorded} requests recorded in {elapsed_s:.1f} s: {num_rows} rows")
        environ = {**os.environ, "DYN_FILE_KV": f"{directory}/discovery"}
        port = systems.free_port()
        url = f"http://127.0.0.1:{port}"
        start = [sys.executable, "-m"]
        frontend = subprocess.Popen(
            [
                *start,
                "dynamo.frontend",
                "--http-port",
                str(port),
                "--router-mode",
                "kv",
                "--usage-file",
                str(file),
            ],
            env=environ,
            stderr=subprocess.DEVNULL,
        )
        fleet = subprocess.Popen(
            [
                *start,
                "dynamo.mocker",
                "--num-workers",
                str(arguments.workers),
                "--speedup-ratio",
                "1000",
            ],
            env=environ,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for_workers(url, arguments.workers)
            ask(url, 500)
            before_mb = rss_mb(frontend.pid)
            elapsed_s = ask(url, arguments.requests)
            print(
                f"{arguments.requests} requests over {arguments.workers} workers: {elapsed_s:.0f} s"
            )
            time_paths(url, 20)
            after_mb = rss_mb(frontend.pid)
            time_paths(url, 20)
            print(
                f"memory of the frontend: {before_mb:.0f} MB, {after_mb:.0f} after the requests and"
                f" {20 * len(PATHS)} views, {rss_mb(frontend.pid):.0f} after as many again"
            )
            with streams(url):
                print("while 32 streams are served:")
                time_paths(url, 20)
            if arguments.pages:
                paint(url)
        finally:
            for process in (frontend, fleet):
                process.terminate()
            for process in (frontend, fleet):
                process.wait()


def wait_for_workers(url: str, num_workers: int) -> None:
    """Wait until the frontend lists all workers."""
    deadline = time.monotonic() + 120
    while True:
        try:
            if json.loads(fetch(f"{url}/console/api/topology"))["total"] >= num_workers:
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"not all of {num_workers} workers came")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
