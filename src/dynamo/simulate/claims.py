"""`python -m dynamo.simulate claims`: what is published, what the simulator finds, and where each stops being true.

Every claim is one number; here it is measured under the published conditions and beside them, with the decisions of
this package on simulated engines. Virtual time: a quarter of a minute for all of them. The other commands of
`dynamo.simulate` show the whole of each.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from dynamo.base import config, errors
from dynamo.planner import observation
from dynamo.router import config as router_config
from dynamo.simulate import disagg, plan_policies, plan_run, plan_worker, routing, screen, tiers
from dynamo.simulate import plan as plans

COLUMNS = ("conditions", "published", "here", "holds")
_ROUNDS = 10
_TIERS_CHANGE = -0.33  # the mean of the published chart; its headline says 40 %
_LONG_STARTUP_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimsConfig:
    """Print published claims, what is found here, and where each stops being true."""

    claim: tuple[str, ...] = config.option(
        ("tiers", "routing", "disagg", "planner"), help="claims to check, comma-separated"
    )
    trace: str | None = config.option(
        None, help="trace in Mooncake's format, for routing as well as its synthetic prompts"
    )
    limit: int = config.option(3000, help="requests to take from the trace", least=2)
    report_json: str | None = config.option(None, help="file for the rows as JSON")


class ClaimRow(NamedTuple):
    """A measurement beside a claim. `holds` is None where nothing was published."""

    conditions: str
    published: str
    found: str
    holds: bool | None = None


Measure = Callable[[ClaimsConfig], Iterator[ClaimRow]]


def measure_tiers(settings: ClaimsConfig) -> Iterator[ClaimRow]:
    """Yield the change of the mean time to first token by a host tier."""
    base = tiers.TiersConfig(rounds=_ROUNDS)
    cases = (
        ("80 users x 10 turns, 25 GB/s", base, 25e9),
        ("copies at 5 GB/s", base, 5e9),
        ("copies at 1 GB/s", base, 1e9),
        ("everything fits into the engine", replace(base, cache_tokens=1_000_000), 25e9),
        ("engine and host hold half of it", replace(base, host_tokens=20_000), 25e9),
        ("turns of 50 tokens", replace(base, turn_tokens=50, answer_tokens=10), 25e9),
    )
    for number, (name, sizes, rate) in enumerate(cases):
        without, found = tiers.simulate(sizes, None), tiers.simulate(sizes, rate)
        change = sum(found) / sum(without) - 1
        published = f"{_TIERS_CHANGE:+.0%}" if number == 0 else "-"
        yield ClaimRow(name, published, f"{change:+.0%}", change <= _TIERS_CHANGE)
        if number == 0:
            for published_change, first in ((1.22, 0), (0.92, 1)):
                yield ClaimRow(
                    f"the same, round {first}",
                    f"{published_change:+.0%}",
                    f"{found[first] / without[first] - 1:+.0%}",
                )


def measure_routing(settings: ClaimsConfig) -> Iterator[ClaimRow]:
    """Yield how many times shorter KV routing makes the mean time to first token."""
    router = router_config.RouterConfig()
    synthetic = routing.SimulateConfig(engine="batch", workers=4, cache_tokens=24_576)
    runs = [
        (f"32 prefixes, {clients} clients", replace(synthetic, concurrency=clients))
        for clients in (4, 16, 64)
    ]
    runs.append(("64 clients, no common prefix", replace(synthetic, prefixes=960, concurrency=64)))
    if settings.trace is not None:
        fcfs = routing.SimulateConfig(trace=settings.trace, limit=settings.limit)
        runs += [
            (f"{Path(settings.trace).stem[:24]}, load {load:g}", replace(fcfs, load=load))
            for load in (0.5, 0.8, 1.0)
        ]
    for name, cell in runs:
        workload = routing.read_workload(cell)
        ttft = {
            policy: routing.run(
                cell, router, workload, policy, lambda _: None, lambda: 0.0
            ).mean_ttft
            for policy in ("round-robin", "least-loaded", "dynamo")
        }
        gain = ttft["round-robin"] / ttft["dynamo"]
        text = f"{gain:.2f}x (least-loaded {ttft['least-loaded'] / ttft['dynamo']:.2f}x)"
        yield ClaimRow(name, "3x", text, gain >= 3)


def measure_disagg(settings: ClaimsConfig) -> Iterator[ClaimRow]:
    """Yield the tokens per GPU of a disaggregated pool over an aggregated one, at one speed for the user."""
    for num_nodes, claim, speed in ((1, 1.3, 49), (2, 2.0, 40)):
        ratios = disagg.measure_case(disagg.DisaggConfig(), num_nodes).ratios["disaggregated"]
        best = max(ratios, key=lambda each: each.ratio)
        at_speed = min(ratios, key=lambda each: abs(each.per_user - speed))
        ranges = ", ".join(f"{low:.0f}-{high:.0f}" for low, high in disagg.winning_ranges(ratios))
        where = f"{num_nodes} node{'s' * (num_nodes > 1)}"
        yield ClaimRow(
            f"{where}, {speed} tokens/s a user",
            f"{claim:g}x",
            f"{at_speed.ratio:.2f}x",
            at_speed.ratio >= claim,
        )
        yield ClaimRow(f"{where}, at its best", "-", f"{best.ratio:.2f}x at {best.per_user:.0f}")
        yield ClaimRow(f"{where}, gains only between", "28-55" if num_nodes == 1 else "-", ranges)
    for name, changes in (
        ("1 node, transfer at 1 GB/s", {"transfer_gb_s": 1.0}),
        ("1 node, prompts of 300 tokens", {"prompt_tokens": 300}),
        ("1 node, answers of 1000 tokens", {"output_tokens": 1000}),
    ):
        ratios = disagg.measure_case(replace(disagg.DisaggConfig(), **changes), 1).ratios[
            "disaggregated"
        ]
        near = min(ratios, key=lambda each: abs(each.per_user - 49))
        yield ClaimRow(
            f"{name}, {near.per_user:.0f} tokens/s", "-", f"{near.ratio:.2f}x", near.ratio >= 1.3
        )


def measure_planner(settings: ClaimsConfig) -> Iterator[ClaimRow]:
    """Yield the latency of the best of the planner's policies beside two prefill and two decode workers that stay."""
    times = plan_worker.h100_8b()
    for startup_s in (0.0, 30.0, 60.0, _LONG_STARTUP_S):
        options = plans.PlanConfig(seeds=1, startup=startup_s)
        (scenario,) = plans.make_scenarios(options, times)
        fixed = plan_run.run_fixed(scenario, observation.Replicas(2, 2))
        profile = plan_policies.sample_profile(times)
        decide = plan_policies.make_decide("predictive", scenario, profile, options.load_predictor)
        scaled = plan_run.run(scenario, "predictive", decide)
        gain = fixed.mean_latency / scaled.mean_latency
        change = scaled.gpu_seconds / fixed.gpu_seconds - 1
        yield ClaimRow(
            f"start-up of a worker {startup_s:g} s",
            "1.5x, -7 % GPU s",
            f"{gain:.2f}x, {change:+.0%} GPU s",
            gain >= 1.5 and change <= -0.07,
        )
    better = plan_run.run_fixed(scenario, observation.Replicas(3, 1))
    yield ClaimRow(
        "no planner, 3p1d instead of 2p2d", "-", f"{fixed.mean_latency / better.mean_latency:.2f}x"
    )


_CLAIMS: dict[str, tuple[str, Measure]] = {
    "tiers": ("host tier: 40 % shorter time to first token", measure_tiers),
    "routing": ("KV routing: 3x shorter time to first token", measure_routing),
    "disagg": ("disaggregation: +30 % tokens per GPU on a node, 2x on two", measure_disagg),
    "planner": ("planner: 1.5x shorter latency with 7 % fewer GPU seconds", measure_planner),
}


def run(settings: ClaimsConfig) -> None:
    """Measure the claims and print a table for each. Raises ConfigError."""
    screen.check_output("--report-json", settings.report_json, is_directory=False)
    unknown = [name for name in settings.claim if name not in _CLAIMS]
    if unknown:
        raise errors.ConfigError(
            f"--claim: expected some of {', '.join(_CLAIMS)}, got {unknown[0]!r}"
        )
    figures: dict[str, Sequence[ClaimRow]] = {}
    for name in settings.claim:
        caption, measure = _CLAIMS[name]
        figures[name] = list(measure(settings))
        words = {True: "yes", False: "no", None: ""}
        rows = [(*row[:3], words[row.holds]) for row in figures[name]]
        screen.print_table(COLUMNS, rows, caption)
        sys.stdout.flush()
    rows_by_name = {name: [row._asdict() for row in rows] for name, rows in figures.items()}
    screen.write_json(settings.report_json, rows_by_name)
