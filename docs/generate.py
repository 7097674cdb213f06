"""`make docs`: write docs/reference.md from the code, so that it cannot drift from it (a test compares the two)."""

import dataclasses
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client

from dynamo.base import clock, config
from dynamo.cli import graph
from dynamo.cli import main as cli
from dynamo.disagg import config as disagg_config
from dynamo.disagg import metrics as disagg_metrics
from dynamo.frontend import config as frontend_config
from dynamo.frontend import metrics as frontend_metrics
from dynamo.frontend import pipeline, waiting
from dynamo.frontend import request_records as records
from dynamo.frontend.admission import metrics as admission_metrics
from dynamo.gateway import endpoint_picker
from dynamo.gateway import main as gateway
from dynamo.observability import metrics
from dynamo.operator import service as operator
from dynamo.operator import settings as operator_settings
from dynamo.operator import webhooks
from dynamo.planner import config as planner_config
from dynamo.planner import metrics as planner_metrics
from dynamo.planner import profiling
from dynamo.protocols import instances
from dynamo.router import __main__ as router_main
from dynamo.router import config as router_config
from dynamo.router import load_metrics
from dynamo.router import metrics as router_metrics
from dynamo.semantic import metrics as semantic_metrics
from dynamo.simulate import claims, disagg, plan, replay, routing, tiers
from dynamo.worker import engines, health, kv_tiers, semantic_encoder, settings

TARGET = Path(__file__).parent / "reference.md"
HEAD = """# Reference

Written by `make docs` from the code.
Each setting can be given in a TOML or JSON file (`--config FILE`, by the name of the flag with `_` for `-`; or JSON \
itself), by its variable, or by its flag; the later in this list wins.
The semantic router and its encoders are the exception: their `--config` names the YAML file that they share.
A flag with the default `True` or `False` takes no value: `--name` switches it on, `--no-name` off.

Every process also reads these variables, which no flag sets:

| variable | meaning |
|---|---|
| `DYN_LOG` | level of the log (`trace`, `debug`, `info`, `warn`, `error`, `off`), also by module: \
`warn,dynamo.runtime=debug` |
| `DYN_LOGGING_CONFIG_PATH` | TOML file with `log_level` and a table `log_filters`, which `DYN_LOG` overrides |
| `DYN_LOGGING_JSONL` | `1`: write the log as JSON lines |
| `DYN_LOG_USE_LOCAL_TZ` | `1`: write local times |
| `DYN_SDK_DISABLE_ANSI_LOGGING`, `NO_COLOR` | `1`: write the log without colours |
| `DYN_TOKEN_ECHO_DELAY_MS` | milliseconds between two tokens of `dynamo run out=echo_core` (10) |
| `DYN_CLUSTER_TOKEN` | the cluster token itself, in place of `--cluster-token-file` |
| `ETCD_AUTH_…`, `NATS_AUTH_…`, `NATS_TLS_…` | credentials for etcd and NATS ([guide](guide.md#run-on-several-hosts)) |

These are set by other processes of this project, and not by you:

| variable | set by |
|---|---|
| `DYN_LAUNCH_TOKENS` | `dynamo serve`, to find its processes when it cleans up |
| `DYN_PARENT_DGD_K8S_NAME`, `DYN_PARENT_DGD_K8S_NAMESPACE` | the Kubernetes operator: the deployment of a pod |
| `DYN_VLLM_OWNED`, `DYN_VLLM_NIXL_PAUSE_US` | a worker with vLLM, for the processes of vLLM |
"""


def reference() -> str:
    """The whole page."""
    sections = [HEAD]
    for name, command in cli.COMMANDS.items():
        if dataclasses.fields(command.options):
            sections += _settings(f"dynamo {name}", command.options)
        if name == "serve":
            sections += _settings("dynamo serve module:Class", graph.GraphConfig)
    sections += [
        *_settings(
            "python -m dynamo.frontend",
            frontend_config.FrontendConfig,
            router_config.RoutingConfig,
            disagg_config.PrefillRoutingConfig,
        ),
    ]
    sections += _settings(
        "python -m dynamo.router", router_main.RouterServiceConfig, router_main.ServiceRoutingConfig
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
    sections += _settings("python -m dynamo.semantic_router", gateway.GatewayConfig)
    sections += _settings(
        "python -m dynamo.semantic_encoder", semantic_encoder.SemanticEncoderConfig
    )
    sections += _settings(
        "python -m dynamo.gateway.endpoint_picker", endpoint_picker.EndpointPickerConfig
    )
    for title, registry in (
        ("a frontend (`/metrics`)", _frontend_registry()),
        ("a worker (`/metrics` on its system port)", _worker_registry()),
        ("a worker with `--connector kvbm`, besides these", _tier_registry()),
        ("the planner", _planner_registry()),
        ("the operator", _operator_registry()),
        ("the semantic router, in a frontend or in its own process", _semantic_registry()),
        ("`python -m dynamo.metrics`", _load_registry()),
    ):
        sections += [f"## Metrics of {title}\n", *_metrics(registry)]
    return "\n".join(sections)


def _settings(command: str, *parts: type) -> Iterator[str]:
    yield f"## `{command}`\n"
    fields = [field for part in parts for field in dataclasses.fields(part)]
    hints = {name: hint for part in parts for name, hint in typing.get_type_hints(part).items()}
    rows = [_row(f, hints[f.name]) for f in fields if not f.metadata.get("takes_rest")]
    if rows:
        yield "| flag | variable | default | meaning |\n|---|---|---|---|"
        yield from (*rows, "")
    for field in fields:
        if field.metadata.get("takes_rest"):  # it has no flag of its own: it takes what is left
            yield f"{field.metadata['help']}\n"


def _row(field: dataclasses.Field[Any], hint: Any) -> str:
    flag = field.metadata.get("flag")
    flags = [flag if flag is not None else "--" + field.name.replace("_", "-")]
    flags = flags if flags[0] else [field.name.upper()]  # a positional argument
    flags += field.metadata.get("aliases", ())
    variable = config.variable_of(field)
    env = f"`{variable}`" if variable else ""
    default = f"`{text}`" if (text := config.default_text(field)) else ""
    text = (field.metadata["help"] + _choices(field, hint)).replace("|", "\\|")
    return f"| {', '.join(f'`{flag}`' for flag in flags)} | {env} | {default} | {text} |"


def _choices(field: dataclasses.Field[Any], hint: Any) -> str:
    """Return the values that an option may have, where its help does not name all of them but the default."""
    kinds = (hint, *typing.get_args(hint))  # with `| None`, the second
    values = next((typing.get_args(k) for k in kinds if typing.get_origin(k) is typing.Literal), ())
    is_told = all(value == field.default or value in field.metadata["help"] for value in values)
    return "" if is_told else f" (one of {', '.join(f'`{value}`' for value in values)})"


def _frontend_registry() -> prometheus_client.CollectorRegistry:
    registry = metrics.Registry("dynamo_frontend")
    frontend_metrics.FrontendMetrics(registry, clock.SystemClock().now)
    metrics.LoopDelay(registry, clock.SystemClock())
    waiting.WaitingMetrics(registry)
    records.RequestRecords(frontend_config.FrontendConfig(), registry, clock.SystemClock())
    admission_metrics.AdmissionMetrics(registry)
    pipeline.UnknownParameters(registry, refuses=False)
    router_metrics.RouterMetrics(registry, "")
    disagg_metrics.PrefillRouteMetrics(registry)
    return registry.collectors


def _worker_registry() -> prometheus_client.CollectorRegistry:
    name = instances.EndpointName("dynamo", "backend", "generate")
    registry = health.WorkerMetrics(name, clock.SystemClock()).registry
    disagg_metrics.DisaggMetrics(registry)
    disagg_metrics.PrefillJobMetrics(registry)
    disagg_metrics.PeerPrefixMetrics(registry)
    return registry.collectors


def _tier_registry() -> prometheus_client.CollectorRegistry:
    registry = metrics.Registry("dynamo_component")
    kv_tiers.KvTierMonitor(_NoTiers(), registry)
    return registry.collectors


class _NoTiers:
    """An engine without tiers, of which a monitor has the same metrics."""

    def report_tiers(self) -> None:
        """Return no report."""


def _planner_registry() -> prometheus_client.CollectorRegistry:
    return planner_metrics.PlannerMetrics(
        planner_config.ScalingConfig().targets, ""
    ).registry.collectors


def _operator_registry() -> prometheus_client.CollectorRegistry:
    registry = operator.OperatorMetrics().registry
    webhooks.WebhookMetrics(registry)
    return registry.collectors


def _semantic_registry() -> prometheus_client.CollectorRegistry:
    registry = metrics.Registry("llm")
    semantic_metrics.SemanticMetrics(registry)
    return registry.collectors


def _load_registry() -> prometheus_client.CollectorRegistry:
    name = instances.EndpointName("dynamo", "backend", "generate")
    return load_metrics.LoadMetrics(name, None).registry.collectors


def _metrics(registry: prometheus_client.CollectorRegistry) -> Iterator[str]:
    yield "| family | type | meaning |\n|---|---|---|"
    for family in sorted(registry.collect(), key=lambda family: family.name):
        suffix = "_total" if family.type == "counter" else ""
        yield f"| `{family.name}{suffix}` | {family.type} | {family.documentation} |"
    yield ""


if __name__ == "__main__":
    TARGET.write_text(reference())
    sys.stdout.write(f"wrote {TARGET}\n")
