"""`python -m dynamo.frontend`: an HTTP server for all models that workers serve."""

import asyncio
import dataclasses
import os
import signal
import sys

from dynamo.base import config as configuration
from dynamo.base import distribution, process_setup
from dynamo.disagg import config as disagg_config
from dynamo.frontend import config, service
from dynamo.frontend.processes import http_workers
from dynamo.observability import logs
from dynamo.protocols import generate
from dynamo.router import config as router_config
from dynamo.runtime import component, reachability

_PROG = "python -m dynamo.frontend"


def main() -> int:
    """Run the frontend and return the exit status of the process."""
    return process_setup.run_command(_PROG, _run)


def _run() -> int:
    if "--version" in sys.argv[1:]:
        sys.stdout.write(f"Dynamo Frontend {distribution.version()}\n")
        return 0
    logs.configure()
    parts = (
        config.FrontendConfig,
        router_config.RoutingConfig,
        disagg_config.PrefillRoutingConfig,
    )
    settings, routing, prefill = configuration.load_parts(parts, prog=_PROG)
    host = settings.http_host.removeprefix("[").removesuffix("]")
    settings = dataclasses.replace(settings, http_host=host)
    if settings.http_workers > 1:
        return http_workers.serve(settings, sys.argv[1:])
    asyncio.run(serve(settings, routing, prefill))
    return 0


async def serve(
    settings: config.FrontendConfig,
    routing: router_config.RoutingConfig,
    prefill: disagg_config.PrefillRoutingConfig,
) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends the process at once. Raises ConfigError."""
    process_setup.collect_garbage_rarely()
    if routing.router_replica_sync or settings.semantic_router:  # other frontends connect to it
        settings = reachability.with_reachable_host(settings, os.environ)
    async with await component.DistributedRuntime.open(
        settings, item_type=generate.Output
    ) as runtime:
        # until here a signal ends the process, because nothing runs yet
        stop = process_setup.stop_on_signals()
        async with service.Frontend(settings, runtime, routing, prefill) as frontend:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, frontend.reload_keys)
            await frontend.run(stop)


if __name__ == "__main__":
    sys.exit(main())
