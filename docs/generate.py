"""`make docs`: write docs/reference.md from the code, so that it cannot drift from it (a test compares the two)."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import prometheus_client

from dynamo.base import clock, config
from dynamo.cli import main as cli
from dynamo.disagg import config as disagg_config
from dynamo.disagg import metrics as disagg_metrics
from dynamo.frontend import config as frontend_config
from dynamo.frontend import metrics as frontend_metrics
from dynamo.frontend import request_records as records
from dynamo.frontend.admission import metrics as admission_metrics
from dynamo.observability import metrics
from dynamo.operator import settings as operator_settings
from dynamo.planner import config as planner_config
from dynamo.planner import profiling
from dynamo.protocols import instances
from dynamo.router import __main__ as router_main
from dynamo.router import config as router_config
from dynamo.router import load_metrics
from dynamo.router import metrics as router_metrics
from dynamo.simulate import claims, disagg, plan, replay, routing, tiers
from dynamo.worker import engines, health, settings

TARGET = Path(__file__).parent / "reference.md"
HEAD = """# Reference

Written by `make docs` from the code.
Each setting can be given in a TOML or JSON file (`--config FILE`, by the name of the flag with `_` for `-`; or JSON
itself), by its variable, or by its flag; the later in this list wins.

Every process also reads `DYN_LOG` (levels: `info`, `debug`, `warn,dynamo.runtime=debug`, `off`),
`DYN_LOGGING_CONFIG_PATH` (a TOML file with `log_level` and a table `log_filters`; `DYN_LOG` goes beyond it),
`DYN_LOGGING_JSONL` (`1`: JSON lines) and `DYN_LOG_USE_LOCAL_TZ` (`1`: times of this place).
"""


def reference() -> str:
    """The whole page."""
    sections = [HEAD]
    for name, command in cli.COMMANDS.items():
        if dataclasses.fields(command.options):
            sections += _settings(f"dynamo {name}", command.options)
    sections += [
        *_settings(
            "python -m dynamo.frontend",
            frontend_config.FrontendConfig,
            router_config.RoutingConfig,
            disagg_config.PrefillRoutingConfig,
        ),
    ]
    sections += _settings(
        "python -m dynamo.router", router_main.RouterServiceConfig, router_config.RoutingConfig
    )
    sections += _settings(
        "python -m dynamo.planner", planner_config.PlannerConfig, planner_config.ScalingConfig
    )
    sections += _settings("python -m dynamo.metrics", load_metrics.AggregatorConfig)
    sections += _settings("python -m dynamo.profiler", profiling.ProfilerConfig)
    for name, *parts in (
        ("routing", routing.SimulateConfig, router_config.RouterConfig),
        ("replay", replay.ReplayConfig, router_config.RouterConfig),
        ("plan", plan.PlanConfig),
        ("disagg", disagg.DisaggConfig),
        ("tiers", tiers.TiersConfig),
        ("claims", claims.ClaimsConfig),
    ):
        sections += _settings(f"python -m dynamo.simulate {name}", *parts)
    sections += _settings("python -m dynamo.operator", operator_settings.OperatorConfig)
    for name in engines.KIND_BY_NAME:
        sections += _settings(
            f"python -m dynamo.{name}", settings.WorkerConfig, engines.settings_of(name)
        )
    sections += ["## Metrics of a frontend (`/metrics`)\n", *_metrics(_frontend_registry())]
    sections += [
        "## Metrics of a worker (`/metrics` on its system port)\n",
        *_metrics(_worker_registry()),
    ]
    return "\n".join(sections)


def _settings(command: str, *parts: type) -> Iterator[str]:
    yield f"## `{command}`\n"
    yield "| flag | variable | default | meaning |\n|---|---|---|---|"
    for field in (f for part in parts for f in dataclasses.fields(part)):
        flag = field.metadata.get("flag")
        flags = [flag if flag is not None else "--" + field.name.replace("_", "-")]
        flags = flags if flags[0] else [field.name.upper()]  # a positional argument
        flags += field.metadata.get("aliases", ())
        variable = config.variable_of(field)
        env = f"`{variable}`" if variable else ""
        default = (
            "" if field.default in (None, "", (), dataclasses.MISSING) else f"`{field.default}`"
        )
        text = field.metadata["help"].replace("|", "\\|")
        yield f"| {', '.join(f'`{flag}`' for flag in flags)} | {env} | {default} | {text} |"
    yield ""


def _frontend_registry() -> prometheus_client.CollectorRegistry:
    registry = metrics.Registry("dynamo_frontend")
    frontend_metrics.FrontendMetrics(registry, clock.SystemClock().now)
    metrics.LoopDelay(registry, clock.SystemClock())
    records.RequestRecords(frontend_config.FrontendConfig(), registry, clock.SystemClock())
    admission_metrics.AdmissionMetrics(registry)
    router_metrics.RouterMetrics(registry, "")
    disagg_metrics.PrefillRouteMetrics(registry)
    return registry.collectors


def _worker_registry() -> prometheus_client.CollectorRegistry:
    name = instances.EndpointName("dynamo", "backend", "generate")
    registry = health.WorkerMetrics(name, clock.SystemClock()).registry
    disagg_metrics.DisaggMetrics(registry)
    disagg_metrics.PrefillJobMetrics(registry)
    return registry.collectors


def _metrics(registry: prometheus_client.CollectorRegistry) -> Iterator[str]:
    yield "| family | type | meaning |\n|---|---|---|"
    for family in sorted(registry.collect(), key=lambda family: family.name):
        suffix = "_total" if family.type == "counter" else ""
        yield f"| `{family.name}{suffix}` | {family.type} | {family.documentation} |"
    yield ""


if __name__ == "__main__":
    TARGET.write_text(reference())
    sys.stdout.write(f"wrote {TARGET}\n")
