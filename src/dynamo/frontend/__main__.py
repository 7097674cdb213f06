"""`python -m dynamo.frontend`: one HTTP door to all models that workers serve."""

import asyncio
import importlib.metadata
import os
import signal
import sys

from dynamo.base import config as configuration
from dynamo.base import errors, garbage
from dynamo.frontend import config, http_workers, service
from dynamo.observability import logs
from dynamo.router import config as router_config
from dynamo.runtime import component


def main() -> int:
    """The process's exit status."""
    if "--version" in sys.argv[1:]:
        sys.stdout.write(f"Dynamo Frontend {importlib.metadata.version('pydynamo')}\n")
        return 0
    prog = "python -m dynamo.frontend"
    try:
        logs.configure()
        parts = (config.FrontendConfig, router_config.RoutingConfig)
        door, routing = configuration.load_parts(parts, prog=prog)
        if door.http_workers > 1:
            return http_workers.serve(door, sys.argv[1:])
        asyncio.run(serve(door, routing))
    except errors.ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


async def serve(door: config.FrontendConfig, routing: router_config.RoutingConfig) -> None:
    """Until SIGTERM or SIGINT; a second one ends the process at once. Raises ConfigError."""
    garbage.collect_rarely()
    async with await component.DistributedRuntime.open(door) as runtime:
        stop = asyncio.Event()  # until here a signal ends the process at once: nothing runs yet
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, stop, number)
        async with service.Frontend(door, runtime, routing) as frontend:
            loop.add_signal_handler(signal.SIGHUP, frontend.reload_keys)
            await frontend.run(stop)


def _stop(stop: asyncio.Event, number: int) -> None:
    if stop.is_set():
        os._exit(128 + number)
    stop.set()


if __name__ == "__main__":
    sys.exit(main())
