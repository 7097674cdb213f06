"""The command `python -m dynamo.router`: the KV router as a service of its own."""

import asyncio
import logging
import os
import sys
from dataclasses import dataclass

from dynamo.base import clock as clocks
from dynamo.base import config, process_setup
from dynamo.observability import logs
from dynamo.observability import metrics as observed
from dynamo.protocols import generate, instances
from dynamo.router import config as router_config
from dynamo.router import route_factory, service
from dynamo.runtime import component, reachability

_PROG = "python -m dynamo.router"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterServiceConfig(component.RuntimeConfig):
    """Select workers for other processes: serves dyn://NAMESPACE.router.{generate,best_worker_id,free,...}."""

    endpoint: str | None = config.option(
        None, help="the workers' endpoint (default: dyn://NAMESPACE.backend.generate)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRoutingConfig(router_config.RoutingConfig):
    """How the router selects workers: by their caches and load, unless another mode is given."""

    router_mode: router_config.RouterMode = config.setting(  # noqa: RUF009 (a declaration)
        "kv", help=router_config.MODE_HELP
    )


def main() -> int:
    """Run the service; return the exit status of the process."""
    return process_setup.run_command(_PROG, _run)


def _run() -> None:
    logs.configure()
    parts = (RouterServiceConfig, ServiceRoutingConfig)
    settings, routing = config.load_parts(parts, prog=_PROG)
    target = settings.endpoint or f"dyn://{settings.namespace}.backend.generate"
    asyncio.run(serve(settings, routing, instances.EndpointName.parse(target)))


async def serve(
    settings: RouterServiceConfig,
    routing: router_config.RoutingConfig,
    target: instances.EndpointName,
) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once. Raises ConfigError."""
    settings = reachability.with_reachable_host(settings, os.environ)
    async with await component.DistributedRuntime.open(
        settings, item_type=generate.Output
    ) as runtime:
        stop = process_setup.stop_on_signals()  # before here a signal simply ends the process
        clock = clocks.SystemClock()
        factory = route_factory.RouteFactory(
            routing, runtime, clock, observed.Registry("dynamo_component")
        )
        router = service.RouterService(runtime, target, factory, clock)
        await router.start()
        try:
            await router.run(stop)
            logging.getLogger(__name__).info("stopping")
            await runtime.drain(5.0)
        finally:
            await router.close()


if __name__ == "__main__":
    sys.exit(main())
