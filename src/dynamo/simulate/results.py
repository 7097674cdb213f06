"""What a run comes to: a line of the table, and the curves of the plots."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.router import api
from dynamo.simulate.simulation import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """What the plots show."""

    ttfts: Sequence[float]  # seconds, rising
    hit_rates: Sequence[
        tuple[float, float]
    ]  # (seconds since the beginning, share of cached prompt tokens)
    shares: Sequence[float]  # computed prompt tokens of each worker over their mean, falling


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One policy. Times in seconds; shares from 0 to 1."""

    policy: str
    num_requests: int
    mean_ttft: float
    p50_ttft: float
    p99_ttft: float
    max_ttft: float
    hit_rate: float  # cached prompt tokens over prompt tokens
    imbalance: float  # computed prompt tokens: those of the busiest worker over the mean
    max_waiting: int  # in the router's queue
    simulated_s: float
    elapsed_s: float  # on the clock of the wall
    curves: Curves


def summarise(
    policy: str, record: Record, workers: Sequence[api.Worker], elapsed_s: float
) -> Summary:
    """The figures of a run with at least one request."""
    ttfts = sorted(outcome.ttft for outcome in record.outcomes)
    shares = _shares(record, workers)
    return Summary(
        policy=policy,
        num_requests=len(ttfts),
        mean_ttft=statistics.fmean(ttfts),
        p50_ttft=_quantile(ttfts, 0.5),
        p99_ttft=_quantile(ttfts, 0.99),
        max_ttft=ttfts[-1],
        hit_rate=sum(o.num_cached for o in record.outcomes)
        / sum(o.arrival.num_tokens for o in record.outcomes),
        imbalance=shares[0],
        max_waiting=record.max_waiting,
        simulated_s=max(o.first_output_at for o in record.outcomes),
        elapsed_s=elapsed_s,
        curves=Curves(ttfts=ttfts, hit_rates=_hit_rates(record), shares=shares),
    )


def _quantile(rising: Sequence[float], share: float) -> float:
    return rising[min(len(rising) - 1, int(share * len(rising)))]


def _shares(record: Record, workers: Sequence[api.Worker]) -> list[float]:
    computed: Counter[api.Worker | None] = Counter()
    for outcome in record.outcomes:
        computed[outcome.worker] += outcome.arrival.num_tokens - outcome.num_cached
    mean = computed.total() / len(workers)
    return sorted((computed[worker] / mean if mean else 1.0 for worker in workers), reverse=True)


def _hit_rates(record: Record, num_parts: int = 60) -> list[tuple[float, float]]:
    """Over as many equal parts of the requests, in order of arrival."""
    size = -(-len(record.outcomes) // num_parts)
    rates = []
    for i in range(0, len(record.outcomes), size):
        part = record.outcomes[i : i + size]
        num_tokens = sum(outcome.arrival.num_tokens for outcome in part)
        rates.append((part[-1].arrival.at, sum(o.num_cached for o in part) / num_tokens))
    return rates
