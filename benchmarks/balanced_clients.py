"""Clients behind a load balancer: two frontends, health checks, and what a balancer asks again.

A request is asked again, at the other frontend, if its connection was refused or broke before any byte of the answer,
or if the frontend said that it is leaving (503): nothing was begun for it. A stream that breaks in the middle because
its frontend died is *cut*: the balancer cannot mend that, but it must be a clear break.
"""

import asyncio
import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from benchmarks import fleet as fleets

NUM_TOKENS = 60
HUNG_S = 30.0
NUM_ATTEMPTS = 100
PAUSE_S = 0.1
CHECK_S = 0.5
OUTCOMES = ("right", "failed", "cut", "corrupt", "hung")


@dataclass
class Answer:
    """What a client saw."""

    text: str = ""
    completion_tokens: int = 0
    error: str | None = None
    is_cut: bool = False  # in the middle, by the death of its frontend
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
            self.errors[answer.error[:60]] += 1

    def _outcome(self, question: str, answer: Answer) -> str:
        expected = self.expected[question]
        if not expected.text.startswith(answer.text):
            return "corrupt"
        if answer.error is not None:
            is_hung = answer.error == "hung"
            return "hung" if is_hung else "cut" if answer.is_cut else "failed"
        same = (expected.text, expected.completion_tokens)
        return "right" if (answer.text, answer.completion_tokens) == same else "corrupt"


class Balancer:
    """Asks the frontends in turn, those that are healthy."""

    def __init__(self, client: httpx.AsyncClient, frontends: list[fleets.Process]) -> None:
        self.client = client
        self._frontends = frontends
        self._healthy = list(frontends)
        self._turn = itertools.count()
        self.num_again = 0

    async def check(self) -> None:
        """Who is healthy, again and again."""
        await asyncio.gather(*(self._check(one) for one in self._frontends))

    async def _check(self, frontend: fleets.Process) -> None:
        """By itself, so that one that does not answer makes nothing old that is known of the other."""
        while True:
            is_healthy = await asyncio.to_thread(fleets.is_healthy, frontend.url, 1.0)
            if is_healthy and frontend not in self._healthy:
                self._healthy.append(frontend)
            elif not is_healthy:
                self._leave_out(frontend)
            await asyncio.sleep(CHECK_S)

    def _leave_out(self, frontend: fleets.Process) -> None:
        if frontend in self._healthy:
            self._healthy.remove(frontend)

    async def ask(self, question: str, num_tokens: int = NUM_TOKENS) -> Answer:
        """One streamed answer, however it ends."""
        answer = Answer()
        try:
            async with asyncio.timeout(HUNG_S):
                for _ in range(NUM_ATTEMPTS):
                    if await self._is_taken(question, num_tokens, answer):
                        return answer
                    self.num_again += 1
                    await asyncio.sleep(PAUSE_S)
                answer.error = f"not taken in {NUM_ATTEMPTS} attempts"
        except TimeoutError:
            answer.error = "hung"
        return answer

    async def _is_taken(self, question: str, num_tokens: int, answer: Answer) -> bool:
        """False: it may be asked again."""
        if not self._healthy:
            return False
        frontend = self._healthy[next(self._turn) % len(self._healthy)]
        began_at = time.monotonic()
        request = self.client.build_request(
            "POST", f"{frontend.url}/v1/chat/completions", json=body(question, num_tokens)
        )
        try:
            response = await self.client.send(request, stream=True)
        except httpx.TransportError:
            self._leave_out(frontend)
            return False
        try:
            return await _read_all(response, answer)
        except httpx.TransportError as error:
            answer.is_cut = frontend.ended_at > began_at
            answer.error = type(error).__name__
            return True
        finally:
            await response.aclose()


def body(question: str, num_tokens: int) -> dict[str, object]:
    """Of a streamed request."""
    return {
        "model": fleets.MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _read_all(response: httpx.Response, answer: Answer) -> bool:
    """False: the frontend is leaving, and has begun nothing."""
    if response.status_code != 200:
        said = (await response.aread()).decode()
        answer.error = f"{response.status_code}: {said[:200]}"
        if "shutting down" in said:
            answer.error = None
            return False
        return True
    last = ""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            _read(json.loads(line[6:]), answer)
        last = line or last
    if answer.error is None and last != "data: [DONE]":
        answer.error = "the stream did not end"
    return True


def _read(chunk: dict, answer: Answer) -> None:
    if "error" in chunk:
        answer.error = chunk["error"]["message"]
        return
    answer.times.append(time.monotonic())
    answer.text += "".join(one["delta"].get("content") or "" for one in chunk["choices"])
    if chunk.get("usage"):
        answer.completion_tokens = chunk["usage"]["completion_tokens"]
