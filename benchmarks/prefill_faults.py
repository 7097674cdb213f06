"""What clients see while prefill and decode workers die.

`PYTHONPATH=tests:tests/system python -m benchmarks.prefill_faults`: a frontend and simulated workers, a process each.
First every fault at every point of a prompt's way, four prompts at a time: a row says how long the slowest answer took,
beside a round that nobody disturbs, and what the counters say. Then 500 requests while a worker is killed every two
seconds, prefill and decode in turn.
"""

import concurrent.futures
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deployment as systems
import split as divided

# How many workers there are of each kind, and of each how many are killed.
FAULTS = {
    "the only prefill worker": ((1, 1), (1, 0)),
    "one of two prefill workers": ((2, 1), (1, 0)),
    "one of two decode workers": ((1, 2), (0, 1)),
    "one of two of each": ((2, 2), (1, 1)),
}
PACED = ("--speedup-ratio", "1", "--kv-hold-s", "4")
IDLE_S = 60.0


class Timed:
    """A deployment whose answers are timed."""

    def __init__(self, directory: Path) -> None:
        self.processes = systems.Deployment(directory)
        self.split = divided.Split(self.processes, "mocker")
        self.slowest_s = 0.0

    def ask(self, prompt: list[int], max_tokens: int = 8) -> str:
        began_at = time.monotonic()
        answer: str = self.split.ask(prompt, max_tokens=max_tokens)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_at)
        return answer


def until_idle(workers: list[Any]) -> float:
    began_at = time.monotonic()
    divided.until_idle(*(one for one in workers if one.is_running), within_s=IDLE_S)
    return time.monotonic() - began_at


def one_fault(timed: Timed, stage: Any, started: tuple[int, int], killed: tuple[int, int]) -> str:
    prefill, decode = divided.start(timed.split, stage, *started)
    with concurrent.futures.ThreadPoolExecutor(divided.NUM) as threads:
        calm = list(threads.map(timed.ask, divided.prompts_of("calm")))
        calm_s, timed.slowest_s = timed.slowest_s, 0.0
        before, num_before = counts(timed, decode), stage.count(prefill, decode)
        asked = [threads.submit(timed.ask, one) for one in divided.prompts_of("fault")]
        stage.reached(prefill, decode, num_before)
        for worker in (*prefill[: killed[0]], *decode[: killed[1]]):
            worker.kill()
        answers = [one.result() for one in asked]
    told = difference(before, counts(timed, decode))
    right = answers == [timed.split.ask(one) for one in divided.prompts_of("fault")]
    free_s = until_idle([*prefill, *decode])
    return (
        f"{len(answers)} of {len(calm)} {'right' if right else 'WRONG'} | {calm_s:.1f} s |"
        f" {timed.slowest_s:.1f} s | {told} | {free_s:.1f} s"
    )


def counts(timed: Timed, decode: list[Any]) -> dict[str, float]:
    alive = [one for one in decode if one.is_running]
    return {
        "computed by the decode worker": divided.total(alive, "fallback"),
        "given to another prefill worker": sum(
            one.metric("prefill_retries_total") for one in alive
        ),
        "moved to another decode worker": divided.num_moved(timed.split),
    }


def difference(before: dict[str, float], after: dict[str, float]) -> str:
    changed = {name: int(after[name] - before[name]) for name in after}
    return ", ".join(f"{number} {name}" for name, number in changed.items() if number > 0) or "none"


def serves(worker: Any) -> bool:
    return "serving storyteller" in worker.log.read_text()


def many_faults(timed: Timed, num_requests: int = 500) -> str:
    split = timed.split
    make = {"prefill": split.prefill, "decode": split.decode}
    workers = {kind: [new(*PACED) for _ in range(2)] for kind, new in make.items()}
    for one in workers["decode"]:
        split.ready(one, 2)
    is_over, num_killed = threading.Event(), itertools.count()

    def keep_killing() -> None:
        for kind in itertools.cycle(make):
            if is_over.wait(2):
                return
            both = workers[kind]
            systems.eventually(lambda both=both: all(map(serves, both)), within_s=90, what="both")
            both.pop(0).kill()
            next(num_killed)
            both.append(make[kind](*PACED))

    prompts = [divided.prompt(300 + i % 200, i) for i in range(num_requests)]
    with concurrent.futures.ThreadPoolExecutor(25) as threads:
        killing = threads.submit(keep_killing)
        began_at = time.monotonic()
        answers = list(threads.map(lambda one: timed.ask(one, 20), prompts))
        took_s = time.monotonic() - began_at
        is_over.set()
        killing.result()
    everybody = [*workers["prefill"], *workers["decode"]]
    systems.eventually(lambda: all(map(serves, everybody)), within_s=90, what="the last serve")
    told = difference(dict.fromkeys(counts(timed, []), 0.0), counts(timed, workers["decode"]))
    again = split.ask_all(prompts, max_tokens=20)
    free_s = until_idle(everybody)
    return (
        f"{len(answers)} of {num_requests} {'right' if answers == again else 'WRONG'} in {took_s:.0f} s,"
        f" {next(num_killed)} killed, slowest {timed.slowest_s:.1f} s; {told}; free after {free_s:.1f} s"
    )


def rows() -> Iterator[tuple[str, Any]]:
    for where, stage in {**divided.STAGES, "copied from mapped memory": divided.MAPPED}.items():
        for fault, (started, killed) in FAULTS.items():
            yield (
                f"{fault}, while prompts are {where}",
                lambda timed, stage=stage, started=started, killed=killed: one_fault(
                    timed, stage, started, killed
                ),
            )
    yield "500 requests, a kill every 2 s", many_faults


def main() -> None:
    """All of them, or those in whose name a word of the command line is."""
    words = sys.argv[1:] or [""]
    for name, story in rows():
        if not any(word in name for word in words):
            continue
        with tempfile.TemporaryDirectory() as directory:
            timed = Timed(Path(directory))
            try:
                sys.stdout.write(f"| {name} | {story(timed)} |\n")
                sys.stdout.flush()
            finally:
                timed.processes.end()


if __name__ == "__main__":
    main()
