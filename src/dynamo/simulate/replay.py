"""The command `simulate replay`: a frontend's recorded traffic again, on other workers or by another policy.

Requests arrive when they arrived, whatever becomes of those before them. The first row of the table is what the
frontend recorded. Blocks of answers are not in a request trace, so a turn that continues an answer finds a little less
in the simulated caches than it would in real ones.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from dynamo.base import config, errors
from dynamo.router import config as router_config
from dynamo.simulate import plan_policies, recorded, routing, screen, workload
from dynamo.simulate.simulation import PolicySummary, quantile

WriteReport = Callable[[Sequence[PolicySummary], str, Path], Path]
COLUMNS = (
    "policy", "TTFT s", "p50", "p90", "p99", "ITL ms", "p50", "p90", "p99", "cached", "balance",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig(routing.BatchWorkersConfig):
    """Replay the traffic that a frontend recorded (--request-trace) over simulated workers, in virtual time."""

    trace: tuple[str, ...] = config.option(
        (),
        help="files of a frontend's request trace, or directories of them; or one file in Mooncake's format",
        takes="words",
    )
    trace_block_size: int = config.option(
        workload.TRACE_BLOCK_SIZE, help="tokens of a block in a trace of Mooncake's format", least=1
    )
    model: str | None = config.option(
        None, help="model whose requests are replayed, where the trace has several"
    )
    policy: tuple[str, ...] = config.option(
        ("round-robin", "least-loaded", "dynamo", "estimated-ttft"),
        help="router policies to compare: comma-separated, or repeat the flag",
    )
    workers: int = config.option(4, help="number of workers", least=1, most=10_000)
    profile: str = config.option(
        plan_policies.BUILT_IN_PROFILE,
        help="profile of a worker: h100-8b, or a directory that the profiler wrote, with no more sequences at once"
        " than it measured",
    )
    cache_tokens: int | None = config.option(
        None, help="KV cache of each worker in tokens (default: that of the profile)", least=1
    )
    speed: float = config.option(
        1.0, help="how many times as fast as recorded the requests arrive", least=0.001
    )
    limit: int | None = config.option(None, help="number of requests to take", least=2)


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean of values in seconds, and some of their quantiles."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRow:
    """The figures of a policy, or of the record. None: the record has no such figure."""

    policy: str
    num_requests: int
    requests_per_s: float
    ttft_s: Spread | None
    itl_s: Spread | None
    hit_rate: float | None  # cached prompt tokens over prompt tokens
    imbalance: float | None = None  # computed prompt tokens: of the busiest worker over the mean


def run(
    settings: ReplayConfig, router: router_config.RouterConfig, write: WriteReport | None
) -> None:
    """Replay, print the table, and write figures and plots. Raises ConfigError."""
    routing.check_policies(settings.policy)
    screen.check_output("--report-json", settings.report_json, is_directory=False)
    if not settings.trace:
        raise errors.ConfigError("expected --trace FILE …, the request trace of a frontend")
    paths = [Path(name) for name in settings.trace]
    rows, num_failed = [], 0
    if recorded.is_recorded(paths[0]):
        traffic = _read_recorded(settings, paths)
        rows.append(summarise_record(traffic))
        num_failed = sum(request.error_type is not None for request in traffic.requests)
        trace = traffic.trace
    else:
        trace = _read_mooncake(settings, paths)
    trace = recorded.scale_rate(trace, settings.speed)
    context = statistics.fmean(each.num_tokens + each.num_output / 2 for each in trace.arrivals)
    times = plan_policies.read_times(settings.profile, context)
    shape = routing.SimulateConfig(
        engine="batch",
        workers=settings.workers,
        cache_tokens=settings.cache_tokens or times.num_kv_tokens,
        # what a step with more sequences than were measured takes is not known
        max_num_seqs=min(settings.max_num_seqs, times.max_num_seqs)
        if isinstance(times, plan_policies.ProfiledTimes)
        else settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        host_tokens=settings.host_tokens,
        host_gb_per_s=settings.host_gb_per_s,
        kv_bytes_per_token=settings.kv_bytes_per_token,
        seed=settings.seed,
    )
    summaries = []
    for policy in settings.policy:
        with screen.progress_bar(policy, len(trace.arrivals)) as on_progress:
            summaries.append(
                routing.run(
                    shape, router, trace, policy, on_progress, time.perf_counter,
                    step_s=functools.partial(times.batch_step_s, shape.cache_tokens),
                    repeated_cost=times.repeated_cost,
                )
            )  # fmt: skip
        rows.append(summarise_policy(summaries[-1]))
    caption = _caption(settings, shape, trace, num_failed)
    screen.print_table(COLUMNS, [cells(row) for row in rows], caption)
    screen.write_json(settings.report_json, rows)
    if write is not None and settings.output is not None:
        sys.stdout.write(f"wrote {write(summaries, caption, Path(settings.output))}\n")


def _read_recorded(settings: ReplayConfig, paths: Sequence[Path]) -> recorded.RecordedTraffic:
    if settings.trace_block_size != workload.TRACE_BLOCK_SIZE:
        raise errors.ConfigError(
            f"--trace-block-size {settings.trace_block_size}: has no effect on {paths[0]}, which names its own"
        )
    return recorded.read_traffic(paths, model=settings.model, limit=settings.limit)


def _read_mooncake(settings: ReplayConfig, paths: Sequence[Path]) -> workload.Trace:
    if len(paths) > 1:
        raise errors.ConfigError("--trace: expected one file in Mooncake's format")
    if settings.model is not None:
        raise errors.ConfigError(
            f"--model {settings.model}: expected a frontend's trace, {paths[0]} names none"
        )
    return workload.read_trace(paths[0], limit=settings.limit, block_size=settings.trace_block_size)


def summarise_record(traffic: recorded.RecordedTraffic) -> ReplayRow:
    """Return the figures that the frontend recorded, of the requests that did not end in an error."""
    served = [r for r in traffic.requests if r.error_type is None and r.ttft_ms is not None]
    rising_itls = sorted(
        (r.total_time_ms - r.ttft_ms) / (r.output_tokens - 1) / 1e3
        for r in served
        if r.ttft_ms is not None and r.total_time_ms is not None and r.output_tokens > 1
    )
    known = [r for r in served if r.cached_tokens is not None and r.replay is not None]
    num_prompt = sum(r.replay.input_length for r in known if r.replay is not None)
    ends = [r.request_received_ms + (r.total_time_ms or 0.0) for r in traffic.requests]
    return ReplayRow(
        policy="recorded",
        num_requests=len(traffic.requests),
        requests_per_s=len(ends) / (max(ends) - traffic.requests[0].request_received_ms) * 1e3,
        ttft_s=_spread(sorted(r.ttft_ms / 1e3 for r in served if r.ttft_ms is not None)),
        itl_s=_spread(rising_itls),
        hit_rate=sum(r.cached_tokens or 0 for r in known) / num_prompt if num_prompt else None,
    )


def summarise_policy(summary: PolicySummary) -> ReplayRow:
    """Return the figures of a simulated policy."""
    return ReplayRow(
        policy=summary.policy,
        num_requests=summary.num_requests,
        requests_per_s=summary.requests_per_s,
        ttft_s=_spread(summary.curves.ttfts),
        itl_s=_spread(summary.curves.itls),
        hit_rate=summary.hit_rate,
        imbalance=summary.imbalance,
    )


def cells(row: ReplayRow) -> tuple[str, ...]:
    """Return a row of the table with `COLUMNS`."""
    ttfts, itls = ["-"] * 4, ["-"] * 4
    if row.ttft_s is not None:
        ttfts = [f"{seconds:.3f}" for seconds in astuple(row.ttft_s)]
    if row.itl_s is not None:
        itls = [f"{1e3 * seconds:.1f}" for seconds in astuple(row.itl_s)]
    hit_rate = "-" if row.hit_rate is None else f"{row.hit_rate:.1%}"
    imbalance = "-" if row.imbalance is None else f"{row.imbalance:.2f}"
    return (row.policy, *ttfts, *itls, hit_rate, imbalance)


def _spread(rising: Sequence[float]) -> Spread | None:
    if not rising:
        return None
    return Spread(statistics.fmean(rising), *(quantile(rising, q) for q in (0.5, 0.9, 0.99)))


def _caption(
    settings: ReplayConfig, shape: routing.SimulateConfig, trace: workload.Trace, num_failed: int
) -> str:
    failed = f" ({num_failed} ended in an error)" if num_failed else ""
    speed = f", {settings.speed:g} times as fast" if settings.speed != 1 else ""
    host = f" and {shape.host_tokens:,} in host memory" if shape.host_tokens else ""
    return (
        f"{Path(settings.trace[0]).name}: {len(trace.arrivals):,} requests{failed} in"
        f" {trace.duration_s:,.0f} s{speed}; {shape.workers} workers ({settings.profile}),"
        f" {shape.cache_tokens:,} tokens of cache each{host}"
    )
