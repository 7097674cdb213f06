"""The commands `python -m dynamo.simulate routing`, `… disagg`, `… plan`, `… replay`, `… tiers` and `… claims`."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from dynamo.base import config, distribution, errors
from dynamo.router import config as router_config
from dynamo.simulate import claims, disagg, plan, replay, routing, screen, tiers

_PROG = "python -m dynamo.simulate"
_COMMANDS = ("routing", "disagg", "plan", "replay", "tiers", "claims")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 2 for invalid settings."""
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv and not argv[0].startswith("-") else ""
    prog, flags = f"{_PROG} {name or _COMMANDS[0]}", argv[1:] if name else argv
    try:
        if name == "disagg":
            settings = config.load(disagg.DisaggConfig, prog=prog, argv=flags)
            plots = _load_plots(settings.output)
            disagg.run(settings, None if plots is None else plots.write_disagg)
        elif name == "tiers":
            cells = config.load(tiers.TiersConfig, prog=prog, argv=flags)
            plots = _load_plots(cells.output)
            tiers.run(cells, None if plots is None else plots.write_tiers)
        elif name == "claims":
            claims.run(config.load(claims.ClaimsConfig, prog=prog, argv=flags))
        elif name == "plan":
            planned = config.load(plan.PlanConfig, prog=prog, argv=flags)
            plots = _load_plots(planned.output)
            plan.run(planned, None if plots is None else plots.write_plan)
        elif name == "replay":
            own = (replay.ReplayConfig, router_config.RouterConfig)
            replayed, router = config.load_parts(own, prog=prog, argv=flags)
            plots = _load_plots(replayed.output)
            replay.run(replayed, router, None if plots is None else plots.write_report)
        elif name in ("", "routing"):
            parts = (routing.SimulateConfig, router_config.RouterConfig)
            note = f"Other simulations: {', '.join(_COMMANDS[1:])}; `{_PROG} plan --help` shows their flags."
            _simulate_routing(*config.load_parts(parts, prog=prog, argv=flags, note=note))
        else:
            raise errors.ConfigError(f"expected one of {', '.join(_COMMANDS)}, got {name!r}")
    except errors.DynamoError as error:
        sys.stderr.write(f"dynamo.simulate: {error}\n")
        return 2 if isinstance(error, errors.ConfigError) else 1
    return 0


def _simulate_routing(settings: routing.SimulateConfig, router: router_config.RouterConfig) -> None:
    settings.check()
    routing.check_policies(settings.policy)
    plots = _load_plots(settings.output)
    screen.check_output("--report-json", settings.report_json, is_directory=False)
    trace = routing.read_workload(settings)
    summaries, num_requests = [], routing.num_requests(settings, trace)
    for policy in settings.policy:
        with screen.progress_bar(policy, num_requests) as on_progress:
            summaries.append(
                routing.run(settings, router, trace, policy, on_progress, time.perf_counter)
            )
    caption = f"{num_requests:,} requests, {_caption(settings)}"
    screen.print_summaries(summaries, caption)
    screen.write_json(settings.report_json, [replay.summarise_policy(s) for s in summaries])
    if plots is not None and settings.output is not None:
        page = plots.write_report(summaries, caption, Path(settings.output))
        sys.stdout.write(f"wrote {page}\n")


def _load_plots(directory: str | None) -> ModuleType | None:
    """Import the module that draws, if there is a directory for it: it takes half a second. Raises ConfigError."""
    if directory is None:
        return None
    screen.check_output("--output", directory, is_directory=True)
    return distribution.load_extra("dynamo.simulate.plots", feature="--output", extra="plots")


def _caption(settings: routing.SimulateConfig) -> str:
    cache = (
        f"{settings.cache_tokens:,} tokens of cache each"
        if settings.cache_tokens
        else "unlimited caches"
    )
    workers = f"{settings.workers} workers ({settings.engine}), {cache}"
    if settings.trace is None:
        prompts = f"{settings.prefixes} prefixes of {settings.prefix_tokens} tokens"
        return f"{prompts}, {settings.concurrency} clients; {workers}"
    at = f", load {settings.load:g}" if settings.engine == "fcfs" else ""
    return f"{Path(settings.trace).name}{', spread' if settings.spread else ''}; {workers}{at}"


if __name__ == "__main__":
    sys.exit(main())
