"""The commands `python -m dynamo.simulate routing`, `… disagg`, `… plan`, `… replay`, `… tiers` and `… claims`."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from dynamo.base import config, distribution, errors
from dynamo.router import config as router_config
from dynamo.simulate import claims, disagg, plan, replay, routing, screen, tiers

_PROG = "python -m dynamo.simulate"
_MODULES: Mapping[str, tuple[ModuleType, type, str]] = {
    "disagg": (disagg, disagg.DisaggConfig, "write_disagg"),
    "plan": (plan, plan.PlanConfig, "write_plan"),
    "tiers": (tiers, tiers.TiersConfig, "write_tiers"),
}
"""The module, the settings and the function of `plots` of each command that needs nothing else."""
_COMMANDS = ("routing", "disagg", "plan", "replay", "tiers", "claims")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 2 for invalid settings."""
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv and not argv[0].startswith("-") else ""
    prog, flags = f"{_PROG} {name or _COMMANDS[0]}", argv[1:] if name else argv
    try:
        _simulate(name or _COMMANDS[0], prog, flags)
    except errors.DynamoError as error:
        sys.stderr.write(f"dynamo.simulate: {error}\n")
        return 2 if isinstance(error, errors.ConfigError) else 1
    return 0


def _simulate(name: str, prog: str, flags: Sequence[str]) -> None:
    """Run the simulation of this name. Raises ConfigError for an unknown one and for invalid settings."""
    match name:
        case "routing":
            parts = (routing.SimulateConfig, router_config.RouterConfig)
            note = f"Other simulations: {', '.join(_COMMANDS[1:])}; `{_PROG} plan --help` shows their flags."
            _simulate_routing(*config.load_parts(parts, prog=prog, argv=flags, note=note))
        case "replay":
            own = (replay.ReplayConfig, router_config.RouterConfig)
            settings, router = config.load_parts(own, prog=prog, argv=flags)
            replay.run(settings, router, _load_plot(settings.output, "write_report"))
        case "claims":
            claims.run(config.load(claims.ClaimsConfig, prog=prog, argv=flags))
        case _ if name in _MODULES:
            module, settings_type, plot = _MODULES[name]
            settings = config.load(settings_type, prog=prog, argv=flags)
            module.run(settings, _load_plot(settings.output, plot))
        case _:
            raise errors.ConfigError(f"expected one of {', '.join(_COMMANDS)}, got {name!r}")


def _simulate_routing(settings: routing.SimulateConfig, router: router_config.RouterConfig) -> None:
    settings.check()
    routing.check_policies(settings.policy)
    write_report = _load_plot(settings.output, "write_report")
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
    if write_report is not None and settings.output is not None:
        page = write_report(summaries, caption, Path(settings.output))
        sys.stdout.write(f"wrote {page}\n")


def _load_plot(directory: str | None, name: str) -> Callable[..., Path] | None:
    """Return the function of `plots` if there is a directory for it: the import takes half a second.

    Raises ConfigError.
    """
    if directory is None:
        return None
    screen.check_output("--output", directory, is_directory=True)
    plots = distribution.load_extra("dynamo.simulate.plots", feature="--output", extra="plots")
    plot: Callable[..., Path] = getattr(plots, name)
    return plot


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
