"""`python -m dynamo.router`: the KV router as a service of its own."""

import asyncio
import logging
import signal
import sys
from dataclasses import dataclass

from dynamo.base import clock as clocks
from dynamo.base import config, errors, process_setup
from dynamo.observability import logs
from dynamo.observability import metrics as observed
from dynamo.protocols import instances
from dynamo.router import config as router_config
from dynamo.router import route_factory, service
from dynamo.runtime import component


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig(component.RuntimeConfig):
    """Choose workers for others: answers dyn://NAMESPACE.router.{generate,best_worker_id,free,...}."""

    endpoint: str | None = config.option(
        None, help="the workers' endpoint (default: dyn://NAMESPACE.backend.generate)"
    )


def main() -> int:
    """The process's exit status."""
    prog = "python -m dynamo.router"
    try:
        logs.configure()
        own, wanted = config.load_parts((ServiceConfig, router_config.RoutingConfig), prog=prog)
        target = own.endpoint or f"dyn://{own.namespace}.backend.generate"
        asyncio.run(serve(own, wanted, instances.EndpointName.parse(target)))
    except errors.ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


async def serve(
    own: ServiceConfig, wanted: router_config.RoutingConfig, target: instances.EndpointName
) -> None:
    """Until SIGTERM or SIGINT; a second one ends the process at once. Raises ConfigError."""
    async with await component.DistributedRuntime.open(own) as runtime:
        stop = process_setup.stop_on_signals()  # before here a signal simply ends the process
        made = route_factory.RouteFactory(
            wanted, runtime, clocks.SystemClock(), observed.Registry("dynamo_component")
        )
        served = service.RouterService(runtime, target, made)
        await served.start()
        try:
            await served.run(stop)
            logging.getLogger(__name__).info("stopping")
            await runtime.drain(5.0)
        finally:
            await served.close()


if __name__ == "__main__":
    sys.exit(main())
