"""The arrivals of the planner's experiments: a sinusoidal rate, traces scaled to a mean load, and idle times."""

import csv
import datetime
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo.base import errors
from dynamo.simulate import recorded, workload
from dynamo.simulate.plan_worker import Request, StepTimes

NUM_TRACE_WORKERS = 8
TRACE_LOAD = 0.5  # of these workers, on average
_STEP_FACTOR, _STEP_S = 3.0, 300.0


def sinusoidal(*, seed: int, duration_s: float = 600.0, begin: float = 0.0) -> list[Request]:
    """Return Poisson arrivals of 12.5 + 7.5 sin(2 pi t / 150) requests a second, by thinning."""
    draw = random.Random(seed)
    requests: list[Request] = []
    at = 0.0
    while True:
        at += draw.expovariate(20.0)
        if at >= duration_s:
            return requests
        rate = 12.5 + 7.5 * math.sin(2 * math.pi * at / 150)
        if draw.random() < rate / 20.0:
            requests.append(Request(at=begin + at, num_prompt=3000, num_output=150))


def idle(*, seed: int) -> list[Request]:
    """Return ten minutes of nothing, one request, ten minutes of nothing, then sinusoidal arrivals."""
    one = Request(at=600.0, num_prompt=3000, num_output=150)
    return [one, *sinusoidal(seed=seed, begin=1200.0)]


def steady(*, seed: int, rate: float, duration_s: float, isl: int, osl: int) -> list[Request]:
    """Return Poisson arrivals of a constant rate."""
    draw = random.Random(seed)
    requests: list[Request] = []
    at = draw.expovariate(rate)
    while at < duration_s:
        requests.append(Request(at=at, num_prompt=isl, num_output=osl))
        at += draw.expovariate(rate)
    return requests


@dataclass(frozen=True, slots=True)
class TraceRequests:
    """The requests of a trace at its times; `is_own`: a frontend of ours recorded them."""

    requests: list[Request]
    is_own: bool = False


def read_trace(path: Path, *, limit: int | None, model: str | None = None) -> TraceRequests:
    """Read a trace in Mooncake's format (JSON lines), in Azure's (CSV), or a frontend's. Raises ConfigError."""
    is_own = path.suffix != ".csv" and recorded.is_recorded(path)
    if model is not None and not is_own:
        raise errors.ConfigError(f"--model {model}: expected a frontend's trace, {path} names none")
    if path.suffix == ".csv":
        return TraceRequests(_read_azure(path, limit))
    if is_own:
        trace = recorded.read_traffic([path], model=model, limit=limit).trace
    else:
        trace = workload.spread_arrivals(workload.read_trace(path, limit=limit))
    requests = [
        Request(
            at=arrival.at,
            num_prompt=arrival.num_tokens,
            num_output=arrival.num_output,
            names=arrival.names,
            block_size=trace.block_size,
        )
        for arrival in trace.arrivals
    ]
    return TraceRequests(requests, is_own)


def _read_azure(path: Path, limit: int | None) -> list[Request]:
    requests: list[Request] = []
    begin: datetime.datetime | None = None
    where = str(path)
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            for row in rows:
                where = f"{path}:{rows.line_num}"
                moment = datetime.datetime.fromisoformat(row["TIMESTAMP"])
                begin = begin or moment
                requests.append(
                    Request(
                        at=(moment - begin).total_seconds(),
                        num_prompt=_read_tokens(row["ContextTokens"]),
                        num_output=_read_tokens(row["GeneratedTokens"]),
                    )
                )
                if limit is not None and len(requests) >= limit:
                    break
    except OSError as error:
        raise errors.ConfigError(f"--trace {path}: cannot be read: {error.strerror}") from error
    except (csv.Error, KeyError, TypeError, ValueError) as error:  # TypeError: a row is too short
        raise errors.ConfigError(
            f"{where}: expected a CSV file with TIMESTAMP, ContextTokens and GeneratedTokens: {error}"
        ) from error
    if not requests or requests[-1].at == 0:
        raise errors.ConfigError(f"--trace {path}: expected requests at two times at least")
    for number, (earlier, later) in enumerate(itertools.pairwise(requests), 3):
        if earlier.at > later.at:
            raise errors.ConfigError(f"{path}:{number}: expected times in rising order")
    return requests


def _read_tokens(text: str) -> int:
    number = int(text)
    if not 0 <= number <= workload.MOST_TOKENS:
        raise ValueError(f"{number} is no number of tokens")
    return max(1, number)


def scale_to_load(requests: Sequence[Request], times: StepTimes) -> list[Request]:
    """Scale the times so that the mean work is half of what eight workers can do.

    The work of a request is its prefill, without what an unlimited cache would hold, and its share of decode steps with
    half of the KV cache in use.
    """
    num_new = ideal_new_tokens(requests)
    half_full_s = times.decode_s(0.5)
    work_s = sum(
        times.prefill_s(new)
        + r.num_output
        * half_full_s
        * (r.num_prompt + r.num_output / 2)
        / (0.5 * times.num_kv_tokens)
        for r, new in zip(requests, num_new, strict=True)
    )
    begin = requests[0].at
    factor = work_s / (TRACE_LOAD * NUM_TRACE_WORKERS) / (requests[-1].at - begin)
    return [replace(request, at=(request.at - begin) * factor) for request in requests]


def add_step(requests: Sequence[Request]) -> list[Request]:
    """Let requests arrive three times as fast for five minutes, from a third of the run on."""
    begin = requests[-1].at / 3
    end = begin + _STEP_FACTOR * _STEP_S  # in the times of the trace

    def move(at: float) -> float:
        return at - (min(at, end) - begin) * (1 - 1 / _STEP_FACTOR) if at > begin else at

    return [replace(request, at=move(request.at)) for request in requests]


def mark_servable(requests: Sequence[Request], times: StepTimes, ttft_s: float) -> None:
    """Mark the requests with a prefill that, after the best possible reuse, leaves the target within reach."""
    for request, num_new in zip(requests, ideal_new_tokens(requests), strict=True):
        request.is_servable = times.prefill_s(num_new) <= ttft_s


def ideal_new_tokens(requests: Sequence[Request]) -> list[int]:
    """Return the prompt tokens of each request that no earlier prompt had."""
    names: set[int] = set()
    numbers = []
    for request in requests:
        num_known = next(
            (i for i, name in enumerate(request.names) if name not in names), len(request.names)
        )
        numbers.append(max(1, request.num_prompt - num_known * request.block_size))
        names.update(request.names)
    return numbers
