"""Where the time goes from a prompt's arrival at a decode worker to its first tokens, if another worker computes it.

The stages are read off the workers' own log (DYN_LOG=debug), whose lines name the same moments as the original's do:

    Prefilling remotely ─▶ taken ─▶ request_finished ─▶ update_state_after_alloc ─▶ the same, 0 external tokens
    (decode: decided)      (prefill)  (prefill: drawn)    (decode: copy begins)        (decode: copy has ended)

    python -m benchmarks.handoff_stages
"""

import argparse
import asyncio
import datetime
import re
import statistics
import time
from pathlib import Path

import httpx

from benchmarks import disagg

LENGTHS = (64, 1500)
MOMENTS = {
    "decided": re.compile(r"Prefilling remotely for request (?P<id>[^\s#]+)"),
    "taken": re.compile(r"took (?P<id>[^\s#:]+): \d+ prompt tokens"),
    "drawn": re.compile(r"request_finished\((?P<id>[^)]+)\)"),
    "copying": re.compile(r"update_state_after_alloc\((?P<id>[^)]+)\): num_external_tokens=[1-9]"),
    "copied": re.compile(r"update_state_after_alloc\((?P<id>[^)]+)\): num_external_tokens=0"),
}
STAGES = (
    ("the way of the request to the decode worker, which decides", "asked", "decided"),
    ("the prefill worker is asked", "decided", "taken"),
    ("its queue, and the prefill", "taken", "drawn"),
    ("the first token's way, by the decode worker to the client", "drawn", "first"),
    ("*all that, to the first token*", "asked", "first"),
    ("meanwhile: the answer's way, and blocks for the sequence", "drawn", "copying"),
    ("then: the copy", "copying", "copied"),
    ("from the first token to the second", "first", "second"),
)


def moments(log: str) -> list[dict[str, float]]:
    """Of each request: when each came, in seconds of the wall clock."""
    found: dict[str, dict[str, float]] = {}
    for line in log.splitlines():
        for name, pattern in MOMENTS.items():
            if match := pattern.search(line):
                at = datetime.datetime.fromisoformat(line.split()[0]).timestamp()
                found.setdefault(match["id"], {})[name] = (
                    at  # the last to take it is the prefill worker
                )
    return [told for told in found.values() if told.keys() == MOMENTS.keys()]


async def ask(url: str, length: int, number: int) -> list[tuple[float, float, float]]:
    """Prompts one after the other: when each was asked, and its first two tokens came."""
    rows = []
    async with httpx.AsyncClient(timeout=60) as client:
        for i in range(number):
            asked, offset = time.perf_counter(), time.time() - time.perf_counter()
            prompt = disagg.prompt(length, (length, i))
            times = [t + offset async for t in disagg.tokens(client, url, prompt, 4)]
            rows.append((asked + offset, times[0], times[1]))
    return rows


def stages(rows: list[tuple[float, float, float]], log: str) -> dict[str, list[float]]:
    """How long each took, in ms."""
    took: dict[str, list[float]] = {name: [] for name, _, _ in STAGES}
    known = moments(log)
    for asked, first, second in rows:
        told = next(one for one in known if asked <= one["decided"] <= first)
        told |= {"asked": asked, "first": first, "second": second}
        for name, begin, end in STAGES:
            took[name].append(1000 * (told[end] - told[begin]))
    return took


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=30)
    args = parser.parse_args()
    with disagg.log_file() as log:
        with disagg.serving(disagg.SPLIT, log, DYN_LOG="debug") as (url, _):
            asyncio.run(disagg.warm_up(url))
            rows = [asyncio.run(ask(url, length, args.prompts)) for length in LENGTHS]
        text = Path(log).read_text()
    columns = [stages(found, text) for found in rows]
    print("| ms | " + " | ".join(f"{length:,} tokens" for length in LENGTHS) + " |")
    print("|---|" + "---|" * len(LENGTHS))
    for name, _, _ in STAGES:
        print(
            f"| {name} | " + " | ".join(f"{statistics.median(c[name]):.2f}" for c in columns) + " |"
        )


if __name__ == "__main__":
    main()
