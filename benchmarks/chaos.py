"""Does anybody notice? Workers are killed, stopped and restarted at random, while clients ask.

    python -m benchmarks.chaos --minutes 10          (make chaos MINUTES=10)

Twenty requests a second go to a frontend with simulated workers. Every three seconds one of them is hurt, as long as
two others are well: kill -9; SIGSTOP, and SIGCONT some seconds later; SIGTERM with too little grace. Each answer is
compared with the one that the same question got before anything was hurt. Then two clean cuts are timed: a hundred
streams whose one worker is killed, or stopped, go on at another.
"""

import argparse
import asyncio
import datetime
import itertools
import json
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks import fleet as fleets

NUM_TOKENS = 60
TICK_MS = 10
HUNG_S = 30.0
QUESTIONS = [f"Tell me story number {number}" for number in range(10)]
WORKER_FLAGS = ["--tick-ms", str(TICK_MS), "--graceful-shutdown-timeout", "0.2"]
CUT_FLAGS = ["--tick-ms", "50", "--max-num-batched-tokens", "100000"]  # a prompt takes one step
MODEL_DIR = Path(fleets.__file__).parents[1] / "src/dynamo/engine/native/storyteller"


@dataclass
class Answer:
    """What a client saw."""

    text: str = ""
    completion_tokens: int = 0
    error: str | None = None
    times: list[float] = field(default_factory=list)  # at which a piece came

    @property
    def longest_pause_s(self) -> float:
        return max((b - a for a, b in itertools.pairwise(self.times)), default=0.0)


@dataclass
class Tally:
    """What all clients saw."""

    expected: dict[str, Answer]
    outcomes: Counter[str] = field(default_factory=Counter)
    pauses_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def count(self, question: str, answer: Answer) -> None:
        self.pauses_s.append(answer.longest_pause_s)
        self.outcomes[self._outcome(question, answer)] += 1
        if answer.error:
            self.errors[answer.error] += 1

    def _outcome(self, question: str, answer: Answer) -> str:
        if answer.error is not None:
            return "hung" if answer.error == "hung" else "failed"
        expected = self.expected[question]
        same = (expected.text, expected.completion_tokens)
        return "right" if (answer.text, answer.completion_tokens) == same else "corrupt"


async def ask(client: httpx.AsyncClient, question: str, num_tokens: int = NUM_TOKENS) -> Answer:
    """One streamed answer, however it ends."""
    answer = Answer()
    try:
        async with asyncio.timeout(HUNG_S):
            await _stream(client, question, num_tokens, answer)
    except TimeoutError:
        answer.error = "hung"
    except httpx.HTTPError as error:
        answer.error = repr(error)
    return answer


async def _stream(
    client: httpx.AsyncClient, question: str, num_tokens: int, answer: Answer
) -> None:
    body = _body(question, num_tokens)
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            answer.error = f"{response.status_code}: {(await response.aread()).decode()[:200]}"
            return
        last = ""
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _read(json.loads(line[6:]), answer)
            last = line or last
        if answer.error is None and last != "data: [DONE]":
            answer.error = "the stream did not end"


def _body(question: str, num_tokens: int) -> dict[str, object]:
    return {
        "model": fleets.MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _read(chunk: dict, answer: Answer) -> None:
    if "error" in chunk:
        answer.error = chunk["error"]["message"]
        return
    answer.times.append(time.monotonic())
    answer.text += "".join(one["delta"].get("content") or "" for one in chunk["choices"])
    if chunk.get("usage"):
        answer.completion_tokens = chunk["usage"]["completion_tokens"]


class Chaos:
    """Hurts one worker at a time."""

    def __init__(self, fleet: fleets.Fleet, draw: random.Random) -> None:
        self._fleet = fleet
        self._draw = draw
        self._num_workers = len(fleet.workers)
        self._healing: set[asyncio.Task[None]] = set()
        self.faults: Counter[str] = Counter()

    async def run(self, duration_s: float, every_s: float) -> None:
        until = time.monotonic() + duration_s
        while time.monotonic() < until:
            await asyncio.sleep(every_s)
            known = await asyncio.to_thread(self._fleet.metric, "model_workers")
            well = [one for one in self._fleet.workers if one.is_running and not one.is_hurt]
            if len(well) > 2 and known > 2:
                self._hurt(self._draw.choice(well))
        while self._healing:
            await asyncio.wait(self._healing)

    def _hurt(self, worker: fleets.Process) -> None:
        fault = self._draw.choice(["SIGKILL", "SIGSTOP", "SIGTERM"])
        self.faults[fault] += 1
        worker.signal(signal.Signals[fault])
        heal = self._wake if fault == "SIGSTOP" else self._replace
        task = asyncio.ensure_future(heal(worker))
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    async def _wake(self, worker: fleets.Process) -> None:
        await asyncio.sleep(self._draw.uniform(1, 6))
        worker.signal(signal.SIGCONT)

    async def _replace(self, worker: fleets.Process) -> None:
        await asyncio.to_thread(worker.wait)
        self._fleet.workers.remove(worker)
        self._fleet.add_worker()


async def load(client: httpx.AsyncClient, tally: Tally, rate: float, duration_s: float) -> None:
    """Ask so often a second, whether answers come or not."""

    async def one(question: str) -> None:
        tally.count(question, await ask(client, question))

    began_at, asked = time.monotonic(), []
    for number in range(int(rate * duration_s)):
        await asyncio.sleep(max(0.0, began_at + number / rate - time.monotonic()))
        asked.append(asyncio.ensure_future(one(QUESTIONS[number % len(QUESTIONS)])))
    await asyncio.gather(*asked)


async def under_chaos(options: argparse.Namespace) -> dict[str, object]:
    """The table of one run."""
    with fleets.running(MODEL_DIR, options.workers, WORKER_FLAGS) as fleet:
        async with httpx.AsyncClient(
            base_url=fleet.url, timeout=None, limits=httpx.Limits(max_connections=None)
        ) as client:
            expected = {question: await ask(client, question) for question in QUESTIONS}
            tally = Tally(expected)
            await load(client, Tally(expected), options.rate, 10)  # caches and pools fill
            before = fleet.frontend.num_fds, fleet.frontend.rss_mb
            chaos = Chaos(fleet, random.Random(options.seed))
            duration_s = options.minutes * 60
            await asyncio.gather(
                chaos.run(duration_s, options.every), load(client, tally, options.rate, duration_s)
            )
            await asyncio.to_thread(fleet.wait_for_workers, options.workers)
            await load(client, Tally(expected), options.rate, 5)  # broken connections are gone
            after = fleet.frontend.num_fds, fleet.frontend.rss_mb
            return {
                "faults": dict(chaos.faults),
                "requests": sum(tally.outcomes.values()),
                **{name: tally.outcomes[name] for name in ("right", "failed", "corrupt", "hung")},
                "errors": dict(tally.errors),
                "moved": int(fleet.metric("model_migration_total")),
                "longest pause, median / p99 / max s": _spread(tally.pauses_s),
                "frontend fds before / after": f"{before[0]} / {after[0]}",
                "frontend MB before / after": f"{before[1]:.0f} / {after[1]:.0f}",
            }


async def one_cut(fault: str, num_streams: int) -> str:
    """How long streams pause whose one worker is hurt, while another is there."""
    with fleets.running(MODEL_DIR, 1, CUT_FLAGS) as fleet:
        async with httpx.AsyncClient(
            base_url=fleet.url, timeout=None, limits=httpx.Limits(max_connections=None)
        ) as client:
            asked = [
                asyncio.ensure_future(_times(client, f"{QUESTIONS[0]} {number}"))
                for number in range(num_streams)
            ]
            fleet.add_worker()
            await asyncio.to_thread(fleet.wait_for_workers, 2)
            cut_at, wall = time.monotonic(), datetime.datetime.now(datetime.UTC)
            fleet.workers[0].signal(signal.Signals[fault])
            seen = await asyncio.gather(*asked)
        moved = fleet.log_times("the stream goes on")
        reissued = [(at - wall).total_seconds() for at in moved]
        return (
            f"{len(moved)} of {num_streams} streams moved; median / p99 / max s from the signal until another worker "
            f"has it: {_spread(reissued)}; the longest pause of a stream: "
            f"{_spread([_longest_pause(times, cut_at) for times in seen])}"
        )


async def _times(client: httpx.AsyncClient, question: str) -> list[float]:
    """When something came. It must come to its end."""
    times, last = [], b""
    async with client.stream("POST", "/v1/chat/completions", json=_body(question, 250)) as response:
        async for piece in response.aiter_raw():
            times.append(time.monotonic())
            last = piece
    if not last.endswith(b"data: [DONE]\n\n"):
        raise SystemExit(f"a stream ended with {last!r}")
    return times


def _longest_pause(times: list[float], cut_at: float) -> float:
    """From the cut on."""
    after = [cut_at, *(at for at in times if at > cut_at)]
    return max(b - a for a, b in itertools.pairwise(after))


def _spread(values: list[float]) -> str:
    ordered = sorted(values) or [0.0]
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"{ordered[len(ordered) // 2]:.3f} / {p99:.3f} / {ordered[-1]:.3f}"


def main() -> int:
    """0 if nothing hung and nothing was corrupt, and 99.9 % were answered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--every", type=float, default=3.0, help="seconds from fault to fault")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=100, help="of each clean cut; 0: none")
    options = parser.parse_args()
    found = asyncio.run(under_chaos(options))
    for name, value in found.items():
        print(f"{name:40} {value}", flush=True)
    for fault in ("SIGKILL", "SIGSTOP") if options.streams else ():
        print(f"{fault}: {asyncio.run(one_cut(fault, options.streams))}", flush=True)
    is_well = not found["hung"] and not found["corrupt"]
    return 0 if is_well and found["right"] >= 0.999 * found["requests"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
