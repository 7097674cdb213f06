"""The client of a profile's sweep: streams prompts of exact length to a frontend, and takes the time of each token."""

import asyncio
import contextlib
import random
import statistics
from collections.abc import Sequence

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.planner.profile_sweep import Cell

_NUM_PROMPTS = 3  # of a prefill cell; the median counts
_DECODE_TOKENS, _MOST_TOKENS = 48, 384  # of an answer, first and at last
_CELL_S = 300.0  # a cell that takes longer has failed
_TOKEN_IDS = range(20, 200)  # every tokenizer has them


class ProfileClient:
    """Measures cells at one frontend."""

    def __init__(self, host: str, port: int, model: str, clock: clocks.Clock) -> None:
        self._address = (host, port)
        self._model = model
        self._clock = clock
        self._random = random.Random(0)
        self._prompts: dict[int, list[list[int]]] = {}  # of decode cells, by their length

    async def measure(self, cell: Cell) -> float:
        """Return the seconds of a prompt, or between two tokens. Raises DynamoError if requests fail."""
        try:
            async with asyncio.timeout(_CELL_S):
                if cell.kind == "prefill":
                    return await self._measure_prefill(cell.context)
                return await self._measure_decode(cell.context, cell.concurrency)
        except TimeoutError:
            raise errors.DeadlineExceeded(f"no result within {_CELL_S:.0f} s") from None
        except OSError as error:
            raise errors.Unavailable(f"the frontend does not answer: {error}") from error

    async def _measure_prefill(self, length: int) -> float:
        times = [await self._stream(self._make_prompt(length), 1) for _ in range(_NUM_PROMPTS)]
        return statistics.median(first_at - sent_at for sent_at, first_at, *_ in times)

    async def _measure_decode(self, context: int, concurrency: int) -> float:
        """Time the tokens while all sequences decode. Their prompts stay in the prefix cache for larger cells."""
        prompts = self._prompts.setdefault(context, [])
        prompts += [self._make_prompt(context) for _ in range(concurrency - len(prompts))]
        num_tokens = _DECODE_TOKENS
        while num_tokens <= _MOST_TOKENS:
            streams = [self._stream(prompt, num_tokens) for prompt in prompts[:concurrency]]
            times = await asyncio.gather(*streams)
            begin, end = max(each[1] for each in times), min(each[-1] for each in times)
            num_gaps = sum(begin < at <= end for each in times for at in each[1:])
            if end > begin and num_gaps >= 8 * concurrency:
                return (end - begin) * concurrency / num_gaps
            num_tokens *= 2  # the first ended before the last began
        raise errors.Unavailable("the sequences never decoded all together")

    def _make_prompt(self, length: int) -> list[int]:
        return self._random.choices(_TOKEN_IDS, k=length)

    async def _stream(self, prompt: Sequence[int], num_tokens: int) -> list[float]:
        """Return the times of the request and of each token of its answer. Raises Unavailable."""
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        )
        reader, writer = await asyncio.open_connection(*self._address, limit=2**24)
        with contextlib.closing(writer):
            head = "POST /v1/completions HTTP/1.0\r\nhost: x\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\n\r\n"
            times = [self._clock.now()]
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200" not in status:
                answer = (await reader.read()).rpartition(b"\r\n")[2]
                raise errors.Unavailable(answer[:500].decode("utf-8", "replace"))
            async for line in reader:
                if line.startswith(b"data: {"):
                    if b'"error"' in line[:20]:
                        raise errors.Unavailable(line.decode("utf-8", "replace").strip())
                    times.append(self._clock.now())
        if len(times) == 1:
            raise errors.Unavailable("an answer without tokens")
        return times
