"""Streams that ask without a pause through two frontends, and what became of each answer."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass, field

import httpx
from deployment import MODEL, Frontend
from split import ALONE, prompt

from waiting import PATIENT_S

STALL_STEP_S = 0.05


@dataclass
class Answer:
    """One streamed answer as its client saw it."""

    token_ids: list[int]
    text: str = ""
    error: str = ""
    is_whole: bool = False
    times: list[float] = field(default_factory=list)  # of the request, and of each piece

    @property
    def pause_s(self) -> float:
        """Return the longest time between two pieces, the first one included."""
        return max((b - a for a, b in itertools.pairwise(self.times)), default=0.0)


class FaultLoad:
    """A closed loop of streams in a thread of its own, from the beginning of the block to its end."""

    def __init__(
        self, frontends: Sequence[Frontend], *, seed: str, num_streams: int, num_tokens: int, prompt_len: int
    ) -> None:  # fmt: skip
        self._frontends = frontends
        self._seed, self._prompt_len = seed, prompt_len
        self._num_streams, self._num_tokens = num_streams, num_tokens
        self._is_over = threading.Event()
        self._count = itertools.count()
        self.answers: list[Answer] = []
        self.longest_stall_s = 0.0  # during which this process did not run
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> "FaultLoad":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def num_begun(self) -> int:
        """Return how many answers have brought a piece."""
        return sum(len(answer.times) > 1 for answer in self.answers)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=PATIENT_S, limits=limits) as client:
            watching = asyncio.ensure_future(self._watch_stalls())
            await asyncio.gather(*(self._ask_on(client, i) for i in range(self._num_streams)))
            watching.cancel()

    async def _watch_stalls(self) -> None:
        while True:
            began_at = time.monotonic()
            await asyncio.sleep(STALL_STEP_S)
            late_s = time.monotonic() - began_at - STALL_STEP_S
            self.longest_stall_s = max(self.longest_stall_s, late_s)

    async def _ask_on(self, client: httpx.AsyncClient, number: int) -> None:
        frontend = self._frontends[number % len(self._frontends)]
        while not self._is_over.is_set():
            answer = Answer(prompt(self._prompt_len, f"{self._seed} {next(self._count)}"))
            self.answers.append(answer)
            answer.times.append(time.monotonic())
            try:
                async with asyncio.timeout(PATIENT_S):
                    await self._read(client, frontend, answer)
            except TimeoutError:
                answer.error = "hung"
            except httpx.TransportError as error:
                answer.error = repr(error)
            if answer.error:
                await asyncio.sleep(0.2)  # a client that was refused

    async def _read(self, client: httpx.AsyncClient, frontend: Frontend, answer: Answer) -> None:
        body = completion(answer.token_ids, self._num_tokens) | {"stream": True}
        async with client.stream("POST", f"{frontend.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code} {(await response.aread()).decode()[:200]}"
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    answer.is_whole = not answer.error
                elif line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        answer.error = chunk["error"]["message"]
                    else:
                        answer.times.append(time.monotonic())
                        answer.text += "".join(choice["text"] for choice in chunk["choices"])
        if not (answer.is_whole or answer.error):
            answer.error = "the stream did not end"

    def num_wrong(self) -> int:
        """Return how many answers, or beginnings of answers, differ from the undisturbed worker's."""
        with futures.ThreadPoolExecutor(8) as threads:
            return sum(threads.map(self._is_wrong, self.answers))

    def _is_wrong(self, answer: Answer) -> bool:
        body = completion(answer.token_ids, self._num_tokens, model=ALONE)
        response = httpx.post(
            f"{self._frontends[0].url}/v1/completions", json=body, timeout=PATIENT_S
        )
        expected = response.json()["choices"][0]["text"]
        return not expected.startswith(answer.text) or (answer.is_whole and expected != answer.text)


def completion(token_ids: list[int], num_tokens: int, model: str = MODEL) -> dict[str, object]:
    """Return the body of a request whose answer depends on the prompt alone."""
    return {
        "model": model,
        "prompt": token_ids,
        "max_tokens": num_tokens,
        "temperature": 0,
        "nvext": {"ignore_eos": True, "extra_fields": ["worker_id"]},
    }
