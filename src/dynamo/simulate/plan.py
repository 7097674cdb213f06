"""The command `simulate plan`: how many workers, by which policy, and what it costs, before a GPU is bought.

Every policy of the table sees the same arrivals on workers of one profile. `sin` is the original's experiment; a trace
is scaled so that eight workers are half busy with it. `docs/planner.md` says how to read the table.
"""

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dynamo.base import config, errors
from dynamo.planner import config as planner_config
from dynamo.planner import observation, predictors, profile_files
from dynamo.simulate import (
    plan_arrivals,
    plan_cluster,
    plan_oracle,
    plan_policies,
    plan_run,
    screen,
)
from dynamo.simulate.plan_run import PlanResult, PlanScenario
from dynamo.simulate.plan_worker import StepTimes

_SWEEP_STARTUPS, _SWEEP_INTERVALS = (0, 30, 60, 100, 200, 300), (1, 5, 10, 30)
_SYNTHETIC = {"sin": plan_arrivals.sinusoidal, "idle": plan_arrivals.idle}
WriteReport = Callable[[Sequence[PlanResult], screen.TableText, Path], Path]
Simulate = Callable[[PlanScenario], PlanResult]
# latency and TTFT in seconds; ratio: GPU seconds over those of the oracle; moves: changes of a pool; with --kill
# another one: requests that migrated
COLUMNS = (
    "policy", "mean s", "p90", "p99", "TTFT", "p90", "p99", "SLA", "GPU s", "ratio", "moves", "lost",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Scale simulated workers by one policy after the other, in virtual time."""

    trace: str = config.option(
        "sin",
        help="arrivals: sin, idle, a trace file (JSON lines of Mooncake, CSV of Azure), scaled to half of 8 workers, or"
        " a frontend's request trace or a directory of its files, at the times that it recorded",
    )
    step: bool = config.option(
        False,
        help="let requests arrive three times as fast for five minutes, from a third of the run on",
    )
    model: str | None = config.option(
        None, help="model whose requests are taken, where a frontend's trace has several"
    )
    limit: int | None = config.option(None, help="requests to take from a trace file", least=2)
    profile: str = config.option(
        plan_policies.BUILT_IN_PROFILE,
        help="profile of a worker: h100-8b, or a directory that the profiler wrote",
    )
    write_profile: str | None = config.option(
        None, help="write the profile as the profiler does to this directory, and end"
    )
    policy: tuple[str, ...] = config.option(
        plan_policies.NAMES,
        help="policies to compare, comma-separated: fixed (all splits of --fixed-workers), hpa, load and sla (as in"
        " Dynamo 0.4: without the planner's --scale-down-delay), regression, predictive, best-fixed, oracle",
    )
    mode: Literal["disagg", "agg"] = config.option(
        "disagg", help="workers for prefill and decode apart, or workers that do both"
    )
    ttft: str = config.option(
        "500", help="target time to first token: milliseconds, or with a unit (0.5s)"
    )
    itl: str = config.option(
        "50", help="target time between two tokens: milliseconds, or with a unit"
    )
    load_predictor: str = config.option(
        "seasonal", help=f"predictor of the predictive policy: {', '.join(predictors.PREDICTORS)}"
    )
    startup: float = config.option(
        60.0, help="seconds from the order of a worker to readiness", least=0
    )
    role_change: float = config.option(
        2.0,
        help="seconds in which a worker that has drained changes between prefill and decode, which policy predictive"
        " orders where it takes less than --startup",
        least=0,
    )
    interval: float = config.option(10.0, help="seconds between two decisions", least=0.1)
    profile_factor: float = config.option(
        1.0,
        help="times of the profile by which policies decide, as a multiple of the workers' own: 0.8 for a profile"
        " that promises too much",
        least=0.1,
        most=10,
    )
    correction: bool = config.option(
        True, help="let policy predictive correct the profile by the times of forward passes"
    )
    max_gpu_budget: int = config.option(8, help="most GPUs; a worker has one", least=1)
    initial: str = config.option(
        "2p2d", help="workers at the start of the run, such as 2p2d; in mode agg their sum"
    )
    kill: tuple[str, ...] = config.option(
        (),
        help="workers that die, by second and pool, such as 120:prefill,300:decode: the busiest one, whose requests"
        " migrate",
    )
    hanging_starts: int = config.option(
        0, help="number of starts, from the first on, whose workers never get ready", least=0
    )
    failing_starts: int = config.option(
        0, help="starts, after the hanging ones, that end after --startup without serving", least=0
    )
    fixed_workers: int = config.option(4, help="workers of the fixed splits", least=1)
    seeds: int = config.option(5, help="seeds of sin and idle; figures are medians", least=1)
    sweep: bool = config.option(
        False, help="vary start-up time and interval for the predictive policy instead of the table"
    )
    report_json: str | None = config.option(None, help="file for the figures as JSON")
    output: str | None = config.option(
        None,
        help="directory for plots (PNG) of load, workers and SLA over time, and report.html; needs matplotlib (the"
        " extra plots)",
    )

    @property
    def initial_replicas(self) -> observation.Replicas:
        """Return the workers at the start of the run. Raises ConfigError."""
        head, _, tail = self.initial.partition("p")
        if not (head.isdigit() and tail.endswith("d") and tail[:-1].isdigit()):
            raise errors.ConfigError(f"--initial {self.initial}: expected a split such as 2p2d")
        return observation.Replicas(int(head), int(tail[:-1]))

    def check(self) -> None:
        """Raise ConfigError for unknown names, and for workers that the budget or the mode does not allow."""
        if unknown := [name for name in self.policy if name not in plan_policies.NAMES]:
            names = ", ".join(plan_policies.NAMES)
            raise errors.ConfigError(f"--policy {unknown[0]}: expected one of {names}")
        predictors.make_predictor(self.load_predictor, predictors.DEFAULT_WINDOW)  # checks the name
        least = 2 if self.mode == "disagg" else 1
        if self.max_gpu_budget < least:
            raise errors.ConfigError(
                f"--max-gpu-budget {self.max_gpu_budget}: expected at least {least} in mode {self.mode}"
            )
        if "fixed" in self.policy and self.fixed_workers < least:
            raise errors.ConfigError(
                f"--fixed-workers {self.fixed_workers}: expected at least {least} in mode {self.mode}"
            )
        flag = next((name for name in ("model", "limit") if getattr(self, name) is not None), None)
        if flag is not None and self.trace in _SYNTHETIC:
            raise errors.ConfigError(
                f"--{flag} {getattr(self, flag)}: expected --trace FILE, {self.trace} has no requests to choose from"
            )
        if sum(self.initial_replicas) > self.max_gpu_budget:
            raise errors.ConfigError(
                f"--initial {self.initial}: expected at most --max-gpu-budget {self.max_gpu_budget}"
            )

    @property
    def deaths(self) -> list[plan_cluster.WorkerDeath]:
        """Return the deaths to inject. Raises ConfigError."""
        pools: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
        deaths = []
        for text in self.kill:
            second, _, name = text.partition(":")
            role = next((pool for pool in pools if pool == (name or "decode")), None)
            if not second.isdigit() or role is None or (role == "prefill" and self.mode == "agg"):
                kinds = "120" if self.mode == "agg" else "120:prefill or 120:decode"
                raise errors.ConfigError(f"--kill {text}: expected a second and a pool: {kinds}")
            deaths.append(plan_cluster.WorkerDeath(float(second), role))
        return deaths

    @property
    def targets_s(self) -> tuple[float, float]:
        """Return the targets of TTFT and ITL in seconds. Raises ConfigError as the planner does."""
        return (
            planner_config.parse_duration_s(self.ttft, "--ttft", 10.0),
            planner_config.parse_duration_s(self.itl, "--itl", 1.0),
        )


def run(settings: PlanConfig, write: WriteReport | None) -> None:
    """Simulate, print the table, and write figures and plots. Raises ConfigError."""
    settings.check()
    screen.check_output("--write-profile", settings.write_profile, is_directory=True)
    screen.check_output("--report-json", settings.report_json, is_directory=False)
    if not settings.policy:
        raise errors.ConfigError(f"--policy: expected some of {', '.join(plan_policies.NAMES)}")
    if settings.write_profile is not None:
        directory = Path(settings.write_profile)
        times = plan_policies.read_times(settings.profile)
        profile_files.write_profile(plan_policies.sample_profile(times), directory)
        sys.stdout.write(f"wrote {directory}\n")
        return
    if settings.trace in _SYNTHETIC:
        scenarios = make_scenarios(settings, plan_policies.read_times(settings.profile))
    else:
        trace = plan_arrivals.read_trace(
            Path(settings.trace), model=settings.model, limit=settings.limit
        )
        context = statistics.fmean(r.num_prompt + r.num_output / 2 for r in trace.requests)
        times = plan_policies.read_times(settings.profile, context)
        scenarios = make_scenarios(settings, times, trace)
    rows = _sweep(settings) if settings.sweep else _compare(settings, scenarios)
    results: list[PlanResult] = []
    with screen.progress_bar("runs", len(rows) * len(scenarios)) as on_progress:
        for name, simulate in rows:
            seeds = []
            for scenario in scenarios:
                seeds.append(replace(simulate(scenario), policy=name))
                on_progress(len(results) * len(scenarios) + len(seeds))
            results.append(plan_run.median_result(seeds))
    oracle = next((r.gpu_seconds for r in results if r.policy == "oracle"), None)
    caption = _caption(settings, scenarios)
    columns: tuple[str, ...] = COLUMNS
    table = [cells(result, oracle) for result in results]
    if settings.kill:
        columns = (*columns, "migr.")
        table = [
            (*row, f"{result.num_migrated}") for row, result in zip(table, results, strict=True)
        ]
    screen.print_table(columns, table, caption)
    screen.write_json(settings.report_json, results)
    if write is not None and settings.output is not None:
        page = write(results, screen.TableText(columns, table, caption), Path(settings.output))
        sys.stdout.write(f"wrote {page}\n")


def make_scenarios(
    settings: PlanConfig, times: StepTimes, trace: plan_arrivals.TraceRequests | None = None
) -> list[PlanScenario]:
    """Return a scenario for each seed of synthetic arrivals, or one for a trace. Raises ConfigError."""
    initial = settings.initial_replicas
    ttft_s, itl_s = settings.targets_s
    deaths = settings.deaths
    is_aggregated = settings.mode == "agg"
    scenarios = []
    if trace is None:
        make_arrivals = _SYNTHETIC[settings.trace]
        arrivals = [make_arrivals(seed=seed) for seed in range(1, settings.seeds + 1)]
    elif trace.is_own:
        arrivals = [trace.requests]
    else:
        arrivals = [plan_arrivals.scale_to_load(trace.requests, times)]
    for requests in arrivals:
        if settings.step:
            requests = plan_arrivals.add_step(requests)
        plan_arrivals.mark_servable(requests, times, ttft_s)
        scenarios.append(
            PlanScenario(
                requests=requests,
                times=times,
                ttft_s=ttft_s,
                itl_s=itl_s,
                interval_s=settings.interval,
                startup_s=settings.startup,
                role_change_s=settings.role_change,
                max_gpus=settings.max_gpu_budget,
                initial=observation.Replicas(0, sum(initial)) if is_aggregated else initial,
                is_aggregated=is_aggregated,
                deaths=deaths,
                num_hanging_starts=settings.hanging_starts,
                num_failing_starts=settings.failing_starts,
                profile_factor=settings.profile_factor,
                corrects=settings.correction,
            )
        )
    return scenarios


def _compare(settings: PlanConfig, scenarios: Sequence[PlanScenario]) -> list[tuple[str, Simulate]]:
    profile = plan_policies.sample_profile(scenarios[0].times)
    rows: list[tuple[str, Simulate]] = []
    for name in settings.policy:
        if name == "oracle":
            rows.append((name, plan_oracle.run_oracle))
        elif name == "best-fixed":
            best = plan_policies.find_best_fixed(scenarios[0])
            rows.append((f"best fixed: {plan_policies.split_name(best)}", _fixed(best)))
        elif name == "fixed":
            splits = plan_policies.fixed_splits(
                settings.fixed_workers, is_aggregated=settings.mode == "agg"
            )
            rows += [
                (f"fixed {plan_policies.split_name(split)}", _fixed(split)) for split in splits
            ]
        else:
            plan_policies.make_decide(name, scenarios[0], profile, settings.load_predictor)
            rows.append((name, _policy(name, settings.load_predictor)))
    return rows


def _sweep(settings: PlanConfig) -> list[tuple[str, Simulate]]:
    simulate = _policy("predictive", settings.load_predictor)

    def vary(startup_s: float, interval_s: float, scenario: PlanScenario) -> PlanResult:
        return simulate(replace(scenario, startup_s=startup_s, interval_s=interval_s))

    return [
        (f"start {startup_s}, every {interval_s}", functools.partial(vary, startup_s, interval_s))
        for startup_s in _SWEEP_STARTUPS
        for interval_s in _SWEEP_INTERVALS
    ]


def _fixed(replicas: observation.Replicas) -> Simulate:
    return lambda scenario: plan_run.run_fixed(scenario, replicas)


def _policy(name: str, predictor: str) -> Simulate:
    def simulate(scenario: PlanScenario) -> PlanResult:
        profile = plan_policies.sample_profile(scenario.times, scenario.profile_factor)
        decide = plan_policies.make_decide(name, scenario, profile, predictor)
        return plan_run.run(scenario, name, decide)

    return simulate


def cells(result: PlanResult, oracle_gpu_seconds: float | None) -> tuple[str, ...]:
    """Return a row of the table with `COLUMNS`."""
    ratio = f"{result.gpu_seconds / oracle_gpu_seconds:.2f}" if oracle_gpu_seconds else "-"
    latencies = (result.mean_latency, result.p90_latency, result.p99_latency)
    ttfts = (result.mean_ttft, result.p90_ttft, result.p99_ttft)
    return (
        result.policy,
        *(f"{x:.1f}" if x >= 10 else f"{x:.2f}" for x in (*latencies, *ttfts)),
        f"{result.attainment:.1%}",
        f"{result.gpu_seconds:,.0f}",
        ratio,
        f"{result.num_scalings}",
        f"{result.num_lost}",
    )


def _caption(settings: PlanConfig, scenarios: Sequence[PlanScenario]) -> str:
    requests, ttft_s, itl_s = scenarios[0].requests, scenarios[0].ttft_s, scenarios[0].itl_s
    servable = sum(request.is_servable for request in requests) / len(requests)
    injected = f", killed at {', '.join(settings.kill)}" if settings.kill else ""
    for number, fate in ((settings.hanging_starts, "hang"), (settings.failing_starts, "fail")):
        if number:
            injected += f", first starts that {fate}: {number}"
    return (
        f"{Path(settings.trace).name}{', step' if settings.step else ''}: {len(requests):,} requests in"
        f" {requests[-1].at:,.0f} s, {servable:.1%} servable; {settings.profile}, {settings.mode},"
        f" TTFT {ttft_s * 1e3:g} ms, ITL {itl_s * 1e3:g} ms, start-up {settings.startup:g} s,"
        f" every {settings.interval:g} s, from {settings.initial}, at most {settings.max_gpu_budget} GPUs{injected}"
    )
