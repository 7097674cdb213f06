"""The sweep of a profile: which cells are measured in which order, and what follows from their results.

A prefill cell is a prompt length at batch 1; a decode cell is a number of sequences of one context length, and a shared
cell is such a decode cell whose prompts begin alike. The order begins with the corners and the middle, so that an
interrupted sweep has a usable profile. After a failure no cell that is at least as large in both respects is tried; a
worker's death in a cell may be an accident, so it takes two of them.

The sweep's client streams prompts of exact length to a frontend, and takes the time of each token.
"""

import asyncio
import collections
import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

from dynamo.base import addresses, errors
from dynamo.base import clock as clocks
from dynamo.planner.forecast import RequestShape
from dynamo.planner.observation import Replicas
from dynamo.planner.policies import Targets
from dynamo.planner.predictive_policy import Headroom, Sizing
from dynamo.planner.profile import DecodePoint, DecodeSurface, PrefillCurve, WorkerProfile
from dynamo.protocols import graph_deployment
from dynamo.runtime.http import client

_MOST_ANSWER = 400  # tokens that a decode cell may need
_LEAST_DECODE_CELLS = 3  # of a recommendation
_COMMON_SHARE = 0.75  # of a prompt of a shared cell


class Cell(msgspec.Struct, frozen=True):
    """One measurement: a prompt of `context` tokens, or `concurrency` sequences of that context."""

    kind: Literal["prefill", "decode", "shared"]
    context: int
    concurrency: int = 1

    @property
    def num_common(self) -> int:
        """Return the tokens with which all prompts of the cell begin."""
        return int(_COMMON_SHARE * self.context) if self.kind == "shared" else 0


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a cell: seconds of the prompt or between two tokens, or the reason of a failure."""

    cell: Cell
    seconds: float = 0.0
    failure: str = ""
    is_worker_lost: bool = False  # it died, or answers no more: the next run tries the cell again


class EngineSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's model card says of it, and its flags of its GPUs."""

    num_kv_tokens: int
    max_num_seqs: int
    context_length: int
    num_gpus: int = 1


_PARALLEL_FLAGS = {  # of vLLM, SGLang and TensorRT-LLM
    "tensor": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    "pipeline": ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
    "data": ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
}


def count_gpus(worker_flags: Sequence[str]) -> int:
    """Return the GPUs of a worker with these flags. Raises ConfigError for a size that is no number above 0."""
    words = [word for flag in worker_flags for word in flag.split("=", 1)]
    sizes = dict.fromkeys(_PARALLEL_FLAGS, 1)
    for name, value in itertools.pairwise(words):
        for kind, names in _PARALLEL_FLAGS.items():
            if name.replace("_", "-") in names:
                sizes[kind] = int(value) if value.isdecimal() else 0
    if "--enable-dp-attention" in words:  # SGLang: data parallelism within the GPUs of the others
        del sizes["data"]
    if not all(sizes.values()):
        flags = " ".join(worker_flags)
        raise errors.ConfigError(f"--worker-flags: expected parallel sizes above 0, got {flags}")
    return math.prod(sizes.values())


def plan_cells(size: EngineSize, isl: int, osl: int) -> list[Cell]:
    """Return the cells of a sweep around a request of `isl` and `osl` tokens, the most telling first."""
    longest = size.context_length - max(osl, _MOST_ANSWER) - 8
    lengths = sorted({max(16, min(longest, int(isl * 2.0**e))) for e in range(-5, 3)})
    contexts = sorted({max(16, min(longest, int(isl * factor))) for factor in (0.25, 1, 2)})
    decode = []
    for context in contexts:
        most = min(size.max_num_seqs, size.num_kv_tokens // (context + osl + 64))
        numbers = [2**e for e in range(12) if 2**e < most] + [most]
        decode += [Cell("decode", context, number) for number in numbers if number > 0]
    prefill = [Cell("prefill", length) for length in lengths]
    orders = (_spread(prefill), _spread(decode))
    keyed = [(max(0, i - 1) / len(cells), cell) for cells in orders for i, cell in enumerate(cells)]
    middle = [cell for cell in decode if cell.context == contexts[len(contexts) // 2]][-1]
    shared = [Cell("shared", middle.context, middle.concurrency)] * (middle.concurrency > 1)
    return [cell for _, cell in sorted(keyed, key=lambda pair: pair[0])] + shared


def _spread(cells: Sequence[Cell]) -> list[Cell]:
    """Return the first, the last and the middle cell, then the middles of what lies between."""
    order, gaps = list(cells[:1]) + list(cells[1:][-1:]), [(0, len(cells) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(cells[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def must_fail(cell: Cell, results: Sequence[CellResult]) -> bool:
    """Return True if cells that are not larger in any respect have failed, and none as large was measured."""
    good = [result.cell for result in results if not result.failure]
    failures = [
        result
        for result in results
        if result.failure
        and _is_within(result.cell, cell)
        and not any(_is_within(result.cell, larger) for larger in good)
    ]
    return len(failures) > 1 or any(not failure.is_worker_lost for failure in failures)


def _is_within(cell: Cell, larger: Cell) -> bool:
    return (
        cell.kind == larger.kind
        and cell.context <= larger.context
        and cell.concurrency <= larger.concurrency
    )


def find_missing(results: Sequence[CellResult], cells: Sequence[Cell], isl: int) -> list[str]:
    """Return in words what a recommendation for prompts of `isl` tokens lacks; `cells` is the whole plan."""
    good = [result.cell for result in results if not result.failure]
    lengths = [cell.context for cell in good if cell.kind == "prefill"]
    longest = max(cell.context for cell in cells if cell.kind == "prefill")
    length, missing = min(isl, longest), []
    if not any(each <= length for each in lengths):
        missing.append(f"a prompt of {length} tokens or fewer")
    if not any(each >= length for each in lengths):
        missing.append(f"a prompt of {length} tokens or more")
    decode = {cell for cell in good if cell.kind == "decode"}
    planned = {cell for cell in cells if cell.kind == "decode"}
    num_needed = min(_LEAST_DECODE_CELLS, len(planned))
    if len(decode) < num_needed:
        missing.append(f"{num_needed - len(decode)} more decode cells")
    is_single = all(cell.concurrency == 1 for cell in decode)
    if is_single and any(cell.concurrency > 1 for cell in planned):
        missing.append("the decoding of several sequences")
    return missing


def find_medians(results: Sequence[CellResult]) -> dict[Cell, float]:
    """Return the median seconds of each cell; measurements that failed are left out."""
    seconds = collections.defaultdict(list)
    for result in results:
        if not result.failure:
            seconds[result.cell].append(result.seconds)
    return {cell: statistics.median(each) for cell, each in seconds.items()}


def make_profile(results: Sequence[CellResult], size: EngineSize) -> WorkerProfile | None:
    """Return the profile of the medians of all cells; None while prefill or decode has none.

    While a decode cell was measured, its sequences had their prompts and on average half of an answer in the KV cache.
    """
    measured = find_medians(results)
    prefill = sorted((cell.context, s) for cell, s in measured.items() if cell.kind == "prefill")
    points = []
    for cell, seconds in measured.items():
        if cell.kind == "decode":
            context = cell.context + _DECODE_TOKENS / 2
            usage = cell.concurrency * context / size.num_kv_tokens
            rate = cell.concurrency / seconds / size.num_gpus
            points.append(DecodePoint(min(1.0, usage), context, seconds, rate))
    if not prefill or not points:
        return None
    curve = PrefillCurve(
        isl=tuple(float(length) for length, _ in prefill),
        ttft_s=tuple(seconds for _, seconds in prefill),
        throughput=tuple(length / seconds / size.num_gpus for length, seconds in prefill),
    )
    surface = DecodeSurface(points, max_kv_tokens=size.num_kv_tokens)
    for cell, seconds in measured.items():
        if cell.kind == "shared":
            surface = surface.with_repeated_cost(_repeated_cost(surface, cell, seconds))
    return WorkerProfile(prefill=curve, decode=surface)


def _repeated_cost(surface: DecodeSurface, cell: Cell, seconds: float) -> float:
    """Return what a shared token costs each further sequence, as a share of a token of its own.

    Between a step in which the common tokens were there once and one in which all sequences had their own.
    """
    context = cell.context + _DECODE_TOKENS / 2
    own = context - cell.num_common
    least = surface.step_s(cell.concurrency, own + cell.num_common / cell.concurrency)
    most = surface.step_s(cell.concurrency, context)
    return min(1.0, max(0.0, (seconds - least) / (most - least))) if most > least else 0.0


class Recommendation(graph_deployment.ProfiledSize, frozen=True, kw_only=True):
    """The deployment with the most requests per second within the targets."""

    requests_per_s: float
    tokens_per_s_per_gpu: float  # of answers
    ttft_ms: float  # of one prompt on an idle worker
    itl_ms: float  # of an idle worker


def recommend(
    profile: WorkerProfile,
    *,
    isl: int,
    osl: int,
    targets: Targets,
    num_workers: int,
    num_gpus: int = 1,
    context_length: float = math.inf,
) -> Recommendation:
    """Compare aggregated workers with all splits of as many, at least one; each has `num_gpus` GPUs.

    A request longer than `context_length` tokens is said to be out of reach.
    """
    shape = RequestShape(isl=isl, osl=osl, context=isl + osl / 2)

    def sizing(mode: Literal["agg", "disagg"]) -> Sizing:
        scaled = dataclasses.replace(
            targets, mode=mode, prefill_gpus=num_gpus, decode_gpus=num_gpus
        )
        return Sizing(profile, scaled, Headroom(), shape, burstiness=1.0)

    split = sizing("disagg")
    choices = [(sizing("agg"), Replicas(0, num_workers))]
    choices += [(split, Replicas(n, num_workers - n)) for n in range(1, num_workers)]
    rate, replicas = max((each.most_requests_per_s(number), number) for each, number in choices)
    return Recommendation(
        mode="disagg" if replicas.prefill else "agg",
        num_prefill=replicas.prefill,
        num_decode=replicas.decode,
        gpus_per_worker=num_gpus,
        requests_per_s=rate,
        tokens_per_s_per_gpu=rate * osl / num_workers / num_gpus,
        ttft_ms=profile.prefill.prompt_s(isl) * 1e3,
        itl_ms=profile.decode.itl_s(0.0, shape.context) * 1e3,
        unreachable=split.unreachable
        if isl + osl <= context_length
        else f"a request of {isl}+{osl} tokens: a worker takes {context_length:g} at most",
    )


_NUM_PROMPTS = 3  # of a prefill cell, at least; the median counts
_LEAST_S = 0.5  # of a cell: for shorter, other work on the machine decides
_DECODE_TOKENS, _MOST_TOKENS = 48, 384  # of an answer, first and at last
_CELL_S = 300.0  # a cell that takes longer has failed
_SHORT_PROMPT_S = 10.0
_TOKEN_IDS = range(20, 200)  # every tokenizer has them


class ProfileClient:
    """Measures cells at one frontend."""

    def __init__(self, host: str, port: int, model: str, clock: clocks.Clock) -> None:
        self._url = f"http://{addresses.join(host, port)}/v1/completions"
        self._model = model
        self._clock = clock
        self._random = random.Random(0)
        self._prompts: dict[tuple[int, int], list[list[int]]] = {}  # by length and common tokens

    async def measure(self, cell: Cell) -> float:
        """Return the seconds of a prompt, or between two tokens. Raises DynamoError if requests fail."""
        try:
            async with asyncio.timeout(_CELL_S):
                if cell.kind == "prefill":
                    return await self._measure_prefill(cell.context)
                return await self._measure_decode(cell)
        except TimeoutError:
            raise errors.DeadlineExceeded(f"no result within {_CELL_S:.0f} s") from None
        except OSError as error:
            raise errors.Unavailable(f"the frontend does not answer: {error}") from error

    async def is_answered(self) -> bool:
        """Return True if a short prompt is answered soon."""
        try:
            async with asyncio.timeout(_SHORT_PROMPT_S):
                await self._stream(self._make_prompt(16), 1)
        except (TimeoutError, OSError, errors.DynamoError):
            return False
        return True

    async def _measure_prefill(self, length: int) -> float:
        until, times = self._clock.now() + _LEAST_S, list[float]()
        while len(times) < _NUM_PROMPTS or self._clock.now() < until:
            sent_at, first_at, *_ = await self._stream(self._make_prompt(length), 1)
            times.append(first_at - sent_at)
        return statistics.median(times)

    async def _measure_decode(self, cell: Cell) -> float:
        """Time the tokens while all sequences decode. Their prompts stay in the prefix cache for larger cells."""
        concurrency, num_common = cell.concurrency, cell.num_common
        prompts = self._prompts.setdefault((cell.context, num_common), [])
        common = prompts[0][:num_common] if prompts else self._make_prompt(num_common)
        prompts += [
            common + self._make_prompt(cell.context - num_common)
            for _ in range(concurrency - len(prompts))
        ]
        if num_common:
            await self._stream(prompts[0], 1)  # so that the others find the beginning in the cache
        until, seconds, num_gaps = self._clock.now() + _LEAST_S, 0.0, 0.0
        num_tokens = _DECODE_TOKENS
        while not num_gaps or self._clock.now() < until:
            streams = [self._stream(prompt, num_tokens) for prompt in prompts[:concurrency]]
            times = await asyncio.gather(*streams)
            begin, end = max(each[1] for each in times), min(each[-1] for each in times)
            num_new = sum(  # a token without text has no event of its own, and the end has one
                num_tokens / len(each[1:]) * sum(begin < at <= end for at in each[1:])
                for each in times
            )
            if end > begin and num_new >= 8 * concurrency:
                seconds, num_gaps = seconds + end - begin, num_gaps + num_new
            elif num_tokens < _MOST_TOKENS:
                num_tokens *= 2  # the first ended before the last began
            elif not num_gaps:
                raise errors.Unavailable("the sequences never decoded all together")
        return seconds * concurrency / num_gaps

    def _make_prompt(self, length: int) -> list[int]:
        return self._random.choices(_TOKEN_IDS, k=length)

    async def _stream(self, prompt: Sequence[int], num_tokens: int) -> list[float]:
        """Return the times of the request and of each event of its answer. Raises Unavailable."""
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "skip_special_tokens": False,  # models that go on after their end write them
                "stream": True,
            }
        )
        times = [self._clock.now()]
        async with client.open_response("POST", self._url, body) as response:
            if response.status != 200:
                answer = await response.body.read(500)
                raise errors.Unavailable(answer.decode("utf-8", "replace"))
            async for line in response.body:
                if line.startswith(b"data: {"):
                    if b'"error"' in line[:20]:
                        raise errors.Unavailable(line.decode("utf-8", "replace").strip())
                    times.append(self._clock.now())
        if len(times) == 1:
            raise errors.Unavailable("an answer without tokens")
        return times
