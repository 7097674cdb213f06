"""The workload of a simulation: a recorded trace, or synthetic clients with prompts that share prefixes.

    {"timestamp": 3052, "input_length": 6758, "output_length": 500, "hash_ids": [0, 14, 15]}

is a line of a trace in Mooncake's format: milliseconds, tokens, and an id for each block of 512 tokens, where equal ids
mean that the prompts are equal up to there.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from dynamo.base import errors

TRACE_BLOCK_SIZE = 512
MOST_TOKENS = 10**8  # of a prompt or an answer: decoding more takes weeks


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """One request. `names` are its blocks, the last of which may be partly filled."""

    at: float  # seconds since the beginning
    num_tokens: int
    num_output: int
    names: Sequence[int]


class Workload(Protocol):
    """The source of requests."""

    @property
    def block_size(self) -> int:
        """Return the tokens of a block."""

    def initial_arrivals(self) -> Sequence[SimulatedRequest]:
        """Return the requests that do not wait for the end of another one, in order of time."""

    def next_arrival(self, now: float) -> SimulatedRequest | None:
        """Return the request that arrives because another one has ended; None if none does."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests at their recorded times."""

    arrivals: Sequence[SimulatedRequest]
    block_size: int = TRACE_BLOCK_SIZE

    def initial_arrivals(self) -> Sequence[SimulatedRequest]:
        return self.arrivals

    def next_arrival(self, now: float) -> SimulatedRequest | None:
        """Return None: no request of a trace waits for the end of another."""
        return None

    @property
    def num_tokens(self) -> int:
        """Return the prompt tokens of all requests."""
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def duration_s(self) -> float:
        """Return the seconds from the first arrival to the last."""
        return self.arrivals[-1].at - self.arrivals[0].at


class _Line(msgspec.Struct):
    timestamp: float
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]  # tokens of simulated prompts


def read_trace(
    path: Path, *, limit: int | None = None, block_size: int = TRACE_BLOCK_SIZE
) -> Trace:
    """Read a trace file, at most `limit` lines of it; times begin at 0. Raises ConfigError, which names the line."""
    arrivals: list[SimulatedRequest] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(arrivals) >= limit:
                    break
                if line.strip():
                    arrivals.append(_read_line(line, f"{path}:{number}", arrivals, block_size))
    except OSError as error:
        raise errors.ConfigError(f"--trace {path}: cannot be read: {error.strerror}") from error
    if len(arrivals) < 2 or arrivals[0].at == arrivals[-1].at:
        raise errors.ConfigError(f"--trace {path}: expected requests at two times at least")
    begin = arrivals[0].at  # a part of a trace, or one with times of day, begins later than at 0
    return Trace([replace(each, at=each.at - begin) for each in arrivals], block_size)


def _read_line(
    line: bytes, where: str, earlier: Sequence[SimulatedRequest], block_size: int
) -> SimulatedRequest:
    try:
        row = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError as error:
        raise errors.ConfigError(
            f"{where}: expected a line of a Mooncake trace: {error}"
        ) from error
    num_blocks = -(-row.input_length // block_size)
    if len(row.hash_ids) != num_blocks:
        raise errors.ConfigError(
            f"{where}: expected {num_blocks} hash_ids for input_length {row.input_length}"
            f" (one for each {block_size} tokens), got {len(row.hash_ids)}"
        )
    if len(set(row.hash_ids)) < num_blocks:
        raise errors.ConfigError(
            f"{where}: expected different hash_ids, as each names all before it"
        )
    at = row.timestamp / 1000
    if earlier and at < earlier[-1].at:
        raise errors.ConfigError(f"{where}: expected times in rising order, got {row.timestamp}")
    return SimulatedRequest(
        at=at, num_tokens=row.input_length, num_output=max(1, row.output_length), names=row.hash_ids
    )


def spread_arrivals(trace: Trace) -> Trace:
    """Spread requests with the same time stamp evenly over the time until the next one.

    Some traces are recorded in steps of seconds; such bursts make the order of a queue matter more than it would.
    """
    groups = [
        list(group)
        for _, group in itertools.groupby(trace.arrivals, key=lambda arrival: arrival.at)
    ]
    ends = [group[0].at for group in groups[1:]] + [2 * groups[-1][0].at - groups[-2][0].at]
    arrivals = [
        replace(arrival, at=arrival.at + (end - arrival.at) * i / len(group))
        for group, end in zip(groups, ends, strict=True)
        for i, arrival in enumerate(group)
    ]
    return Trace(arrivals, trace.block_size)


class SharedPrefixes:
    """Clients that send their next request at once, with one of a few long prefixes, drawn, and a short own suffix."""

    def __init__(
        self,
        *,
        num_prefixes: int,
        prefix_tokens: int,
        suffix_tokens: int,
        output_tokens: int,
        num_requests: int,
        concurrency: int,
        block_size: int,
        seed: int,
    ) -> None:
        self.block_size = block_size
        self._lengths = (prefix_tokens, suffix_tokens, output_tokens)
        self._num_prefixes = num_prefixes
        self._num_left = num_requests
        self._concurrency = concurrency
        self._random = random.Random(seed)
        self._own_names = itertools.count(num_prefixes * (prefix_tokens // block_size))

    def initial_arrivals(self) -> Sequence[SimulatedRequest]:
        """Return the first request of each client."""
        arrivals = (self.next_arrival(0.0) for _ in range(self._concurrency))
        return [arrival for arrival in arrivals if arrival is not None]

    def next_arrival(self, now: float) -> SimulatedRequest | None:
        """Return the next request of a client after the end of its last; None if all requests were sent."""
        if not self._num_left:
            return None
        self._num_left -= 1
        num_prefix, num_suffix, num_output = self._lengths
        prefix = self._random.randrange(self._num_prefixes)
        num_shared = num_prefix // self.block_size
        num_blocks = -(-(num_prefix + num_suffix) // self.block_size)
        names = [prefix * num_shared + i for i in range(num_shared)]
        names += (next(self._own_names) for _ in range(num_blocks - num_shared))
        return SimulatedRequest(
            at=now, num_tokens=num_prefix + num_suffix, num_output=num_output, names=names
        )
