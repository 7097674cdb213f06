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
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from benchmarks import fleet as fleets

NUM_TOKENS = 60
HUNG_S = 30.0
SILENT_S = 10.0  # in which an answer moves to another worker, and a stopped frontend is back
NUM_ATTEMPTS = 100
PAUSE_S = 0.1
CHECK_S = 0.5
BROKEN = (OSError, EOFError)
OUTCOMES = ("right", "failed", "cut", "corrupt", "hung")


@dataclass
class Answer:
    """What a client saw."""

    text: str = ""
    completion_tokens: int = 0
    error: str | None = None
    is_cut: bool = False  # in the middle, by the death of its frontend
    sent_at: float | None = None  # to the frontend that was asked last
    ended_at: float = 0.0  # if it hung
    times: list[float] = field(default_factory=list)  # at which a piece came

    @property
    def longest_pause_s(self) -> float:
        return max((b - a for a, b in itertools.pairwise(self.times)), default=0.0)

    def describe_wait(self) -> str:
        """Return what an answer that hung had waited for at last: to be sent by us, or for a piece of its frontend."""
        if self.sent_at is None:
            return "never sent, because the clients were late"
        silent_s = self.ended_at - (self.times[-1] if self.times else self.sent_at)
        length = "more" if silent_s > SILENT_S else "less"
        begun = "the next" if self.times else "the first"
        return f"{length} than {SILENT_S:g} s for {begun} piece"


@dataclass
class Tally:
    """What all clients saw."""

    expected: dict[str, Answer]
    outcomes: Counter[str] = field(default_factory=Counter)
    pauses_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    hung: Counter[str] = field(default_factory=Counter)  # by what they waited for

    def count(self, question: str, answer: Answer) -> None:
        self.pauses_s.append(answer.longest_pause_s)
        self.outcomes[self._outcome(question, answer)] += 1
        if answer.error:
            self.errors[answer.error[:60]] += 1
        if answer.error == "hung":
            self.hung[answer.describe_wait()] += 1

    def _outcome(self, question: str, answer: Answer) -> str:
        expected = self.expected[question]
        if not expected.text.startswith(answer.text):
            return "corrupt"
        if answer.error is not None:
            is_hung = answer.error == "hung"
            return "hung" if is_hung else "cut" if answer.is_cut else "failed"
        same = (expected.text, expected.completion_tokens)
        return "right" if (answer.text, answer.completion_tokens) == same else "corrupt"


class Connection:
    """A kept connection to a frontend, by plain HTTP/1.1: a client of httpx takes three times the processor time.

    On a busy machine that client was what is late, and its answers seemed to hang. Raises OSError or EOFError where
    the connection breaks.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._is_chunked, self._length = False, 0

    async def send(self, request: dict[str, object]) -> int:
        """Send a request for a chat; return the status of the answer, whose body is still to be read."""
        data = json.dumps(request).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        first, *fields = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(field.split(": ", 1) for field in fields if field)
        self._is_chunked = headers.get("transfer-encoding") == "chunked"
        self._length = int(headers.get("content-length", 0))
        return int(first.split()[1])

    async def pieces(self) -> AsyncIterator[bytes]:
        """Iterate over the pieces of the body as they come, until it is complete."""
        if not self._is_chunked:
            yield await self._reader.readexactly(self._length)
            return
        while size := int((await self._reader.readuntil(b"\r\n")), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)

    def close(self) -> None:
        self._writer.transport.abort()


class Balancer:
    """Asks the frontends in turn, those that are healthy."""

    def __init__(self, frontends: list[fleets.Process]) -> None:
        self._frontends = frontends
        self._healthy = list(frontends)
        self._turn = itertools.count()
        self._idle: dict[str, list[Connection]] = {one.url: [] for one in frontends}
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

    def close(self) -> None:
        """Close the connections that nobody uses."""
        for connection in itertools.chain.from_iterable(self._idle.values()):
            connection.close()

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
            answer.ended_at = time.monotonic()
        return answer

    async def _is_taken(self, question: str, num_tokens: int, answer: Answer) -> bool:
        """False: it may be asked again."""
        if not self._healthy:
            return False
        frontend = self._healthy[next(self._turn) % len(self._healthy)]
        began_at, connection, status = time.monotonic(), None, 0
        try:
            connection = await self._connect(frontend.url)
            answer.sent_at = time.monotonic()
            status = await connection.send(body(question, num_tokens))
            is_taken = await _read_all(status, connection.pieces(), answer)
        except (*BROKEN, asyncio.CancelledError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            if not status:
                answer.sent_at = None
                self._leave_out(frontend)
                return False
            answer.is_cut = frontend.ended_at > began_at
            answer.error = type(error).__name__
            return True
        self._idle[frontend.url].append(connection)
        return is_taken

    async def _connect(self, url: str) -> Connection:
        if self._idle[url]:
            return self._idle[url].pop()
        host, _, port = url.removeprefix("http://").partition(":")
        return Connection(*await asyncio.open_connection(host, int(port)))


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


async def _read_all(status: int, pieces: AsyncIterator[bytes], answer: Answer) -> bool:
    """False: the frontend is leaving, and has begun nothing."""
    if status != 200:
        said = b"".join([piece async for piece in pieces]).decode()
        answer.error = f"{status}: {said[:200]}"
        if "shutting down" in said:
            answer.error = None
            return False
        return True
    last, rest = b"", b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                _read(json.loads(line[6:]), answer)
            last = line or last
    if answer.error is None and last != b"data: [DONE]":
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
