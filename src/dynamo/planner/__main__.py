"""The command `python -m dynamo.planner`."""

import asyncio
import functools
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from dynamo.base import addresses, distribution, draining, errors, process_setup
from dynamo.base import clock as clocks
from dynamo.base import config as configuration
from dynamo.launch import allocation, children, guard
from dynamo.observability import logs
from dynamo.planner import config, service
from dynamo.planner.config import PlannerConfig, ScalingConfig
from dynamo.planner.connectors import (
    Connector,
    LocalConnector,
    LocalWorkerOptions,
    Pool,
    RegisteredWorkers,
    VirtualConnector,
    WakeUpPromise,
    endpoints,
)
from dynamo.planner.traffic_source import (
    Expand,
    FrontendSource,
    LoadSource,
    PrometheusSource,
    TrafficSource,
    keep_url,
    read_adapters,
)
from dynamo.protocols import instances
from dynamo.runtime import component, reachability

_PROG = "python -m dynamo.planner"
_CHANGING_ROLES = ("native", "mocker")  # backends with `worker.role_change`


def main() -> int:
    """Run the planner; return the exit status of the process."""
    return process_setup.run_command(_PROG, _run)


def _run() -> None:
    logs.configure()
    settings, scaling = configuration.load_parts(
        (PlannerConfig, ScalingConfig), prog=_PROG, translate=config.translate
    )
    check_wake_up(settings, scaling)
    service.make_pipeline(scaling)  # a wrong target or profile is said before anything starts
    if unreachable := service.unreachable_target(scaling):
        logging.getLogger(__name__).warning("cannot be met: %s", unreachable)
    with guard.Guard() as guardian:
        asyncio.run(serve(settings, scaling, guardian))


def check_wake_up(settings: PlannerConfig, scaling: ScalingConfig) -> None:
    """Raise ConfigError if the last worker of a model would go, and no request could start one again."""
    is_named = settings.model_name is not None
    if scaling.min_endpoint or is_named or not scaling.operation or scaling.mode == "prefill":
        return
    raise errors.ConfigError(
        "--min-endpoint 0: expected --model-name as well: without the name frontends refuse requests for a model that"
        " has no worker, so that none would start again"
    )


async def serve(settings: PlannerConfig, scaling: ScalingConfig, guardian: guard.Guard) -> None:
    """Plan until SIGTERM or SIGINT; then local workers drain. Raises ConfigError."""
    settings = reachability.with_reachable_host(settings, os.environ)
    async with await component.DistributedRuntime.open(settings) as runtime:
        stop = process_setup.stop_on_signals()
        clock = clocks.SystemClock()
        registry, (prefill, decode) = runtime.discovery, endpoints(settings.namespace)
        registered = RegisteredWorkers(registry, prefill), RegisteredWorkers(registry, decode)
        connector: Connector
        expand: Expand = keep_url
        if settings.environment == "virtual":
            connector = VirtualConnector(registry, settings.namespace, clock, registered)
        elif settings.environment == "kubernetes":
            module = distribution.load_extra(
                "dynamo.planner.kubernetes_connector",
                feature="--environment kubernetes",
                extra="kubernetes",
            )
            connector = opened = module.open_connector(clock)
            expand = opened.find_frontends
        else:
            connector = LocalConnector(
                WorkerCommand(settings, scaling.mode == "agg"),
                guardian,
                clock,
                registered=registered,
                allocator=allocation.Allocator(children.machine_resources(os.environ)),
                options=worker_options(settings, scaling, os.environ),
            )
        planner = make_service(settings, scaling, runtime, connector, clock, expand=expand)
        try:
            port = await planner.start(settings.planner_host, settings.planner_port)
            sys.stderr.write(
                f"{_PROG}: decisions at http://{addresses.join(settings.planner_host, port)}/planner/decisions\n"
            )
            name = instances.EndpointName(settings.namespace, "planner", "decisions")
            await runtime.register(name, planner.answer_report)
            await planner.run(stop)
        finally:
            await planner.close()
            await connector.close()


def worker_options(
    settings: PlannerConfig, scaling: ScalingConfig, environ: Mapping[str, str]
) -> LocalWorkerOptions:
    """Return what each local worker gets and can do, and how long its own settings let it drain."""
    return LocalWorkerOptions(
        cores=settings.cores_per_worker,
        devices=settings.devices_per_worker,
        stop_timeout_s=draining.stop_timeout_s(shlex.split(settings.worker_flags), environ),
        can_change_roles=scaling.mode != "agg" and settings.backend in _CHANGING_ROLES,
    )


def make_service(
    settings: PlannerConfig,
    scaling: ScalingConfig,
    runtime: component.DistributedRuntime,
    connector: Connector,
    clock: clocks.Clock,
    *,
    expand: Expand,
) -> service.PlannerService:
    """Make the service with the sources that the settings name. Raises ConfigError."""
    source: TrafficSource
    model, adapters = settings.model_name, functools.partial(read_adapters, runtime.discovery)
    if settings.prometheus_url is not None:
        source = PrometheusSource(settings.prometheus_url, model, clock, list_adapters=adapters)
    else:
        source = FrontendSource(
            settings.frontend_url, model, clock, expand=expand, list_adapters=adapters
        )
    prefill_load, decode_load = (
        LoadSource(runtime.events, f"{name.namespace}/{name.component}/kv_metrics", clock)
        for name in endpoints(settings.namespace)
    )
    log_file = None
    if settings.log_dir is not None:
        log_file = Path(settings.log_dir, "decisions.jsonl")
        _make_writable(log_file)
    wake_up = None
    if settings.model_name is not None:
        wake_up = WakeUpPromise(
            runtime.discovery,
            namespace=settings.namespace,
            model=settings.model_name,
            instance_id=runtime.instance_id,
        )
    return service.PlannerService(
        scaling,
        source,
        connector,
        service.Leadership(runtime.discovery, settings.namespace, runtime.instance_id, clock),
        clock,
        loads=(prefill_load, decode_load),
        wake_up=wake_up,
        log_file=log_file,
    )


def _make_writable(file: Path) -> None:
    """Make a file that can be appended to. Raises ConfigError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass
    except OSError as error:
        raise errors.ConfigError(
            f"--log-dir {file.parent}: expected a directory that can be written to: {error}"
        ) from error


class WorkerCommand:
    """The command that starts a worker of a pool."""

    def __init__(self, settings: PlannerConfig, is_aggregated: bool) -> None:
        self._settings = settings
        self._is_aggregated = is_aggregated

    def __call__(
        self, pool: Pool, number: int, resources: allocation.Allocation
    ) -> children.ChildSpec:
        """Return what to start."""
        settings = self._settings
        flags = ["--model", settings.model] if settings.model else []
        flags += ["--model-name", settings.model_name] if settings.model_name else []
        flags += ["--namespace", settings.namespace, *shlex.split(settings.worker_flags)]
        if not self._is_aggregated:  # last: it holds whatever mode the flags above name
            flags += ["--disaggregation-mode", pool]
        kind = "worker" if self._is_aggregated else f"{pool} worker"
        return children.ChildSpec(
            name=f"{kind} {number}",
            argv=[sys.executable, "-m", f"dynamo.{settings.backend}", *flags],
            environ=dict(os.environ),
            resources=resources,
        )


if __name__ == "__main__":
    sys.exit(main())
