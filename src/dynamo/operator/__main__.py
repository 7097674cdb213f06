"""The command `python -m dynamo.operator`."""

import asyncio
import os
import socket
import sys

from dynamo.base import clock as clocks
from dynamo.base import config, errors, process_setup
from dynamo.observability import logs
from dynamo.operator import service, webhooks
from dynamo.operator.settings import OperatorConfig
from dynamo.runtime.backends.kubernetes import connection

_PROG = "python -m dynamo.operator"


def main() -> int:
    """Run the operator; return the exit status of the process."""
    return process_setup.run_command(_PROG, _run, expected=errors.DynamoError)


def _run() -> None:
    logs.configure()
    asyncio.run(serve(config.load(OperatorConfig, prog=_PROG)))


async def serve(settings: OperatorConfig) -> None:
    """Reconcile until SIGTERM or SIGINT. Raises ConfigError, Forbidden and KindMissing."""
    settings.check()
    identity = f"{os.environ.get('HOSTNAME') or socket.gethostname()}-{os.getpid()}"
    async with connection.KubernetesConnection.open() as cluster:
        if settings.remove_webhooks:
            await webhooks.WebhookService(cluster, settings, clocks.SystemClock()).end_serving()
            return
        stop = process_setup.stop_on_signals()
        operator = service.OperatorService(
            cluster, settings, clocks.SystemClock(), identity=identity
        )
        await operator.run(stop)


if __name__ == "__main__":
    sys.exit(main())
