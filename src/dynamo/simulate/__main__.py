"""`python -m dynamo.simulate routing --trace FILE --workers 8 --policy dynamo,estimated-ttft --load 0.8`."""

import importlib
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dynamo.base import config, errors
from dynamo.router import settings
from dynamo.simulate import routing, screen
from dynamo.simulate.config import SimulateConfig


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. A mistake of the user's is one sentence and 2."""
    try:
        told, router = config.load_parts(
            (SimulateConfig, settings.RouterConfig), prog="python -m dynamo.simulate", argv=argv
        )
        _simulate(told, router)
    except errors.DynamoError as error:
        sys.stderr.write(f"dynamo.simulate: {error}\n")
        return 2 if isinstance(error, errors.ConfigError) else 1
    return 0


def _simulate(told: SimulateConfig, router: settings.RouterConfig) -> None:
    told.check()
    routing.check_policies(told.policy)
    if told.output is not None and importlib.util.find_spec("matplotlib") is None:
        raise errors.ConfigError("--output needs matplotlib: pip install 'pydynamo[plots]'")
    trace = routing.read_workload(told)
    summaries = []
    for policy in told.policy:
        with screen.bar(policy, routing.num_requests(told, trace)) as on_progress:
            summaries.append(
                routing.run(told, router, trace, policy, on_progress, time.perf_counter)
            )
    caption = _caption(told)
    screen.show(summaries, caption)
    if told.output is not None:
        plots = importlib.import_module("dynamo.simulate.plots")  # an extra, and half a second
        page = plots.write(summaries, caption, Path(told.output))
        sys.stdout.write(f"wrote {page}\n")


def _caption(told: SimulateConfig) -> str:
    cache = (
        f"{told.cache_tokens:,} tokens of cache each" if told.cache_tokens else "caches without end"
    )
    workers = f"{told.workers} workers ({told.engine}), {cache}"
    if told.trace is None:
        return f"{told.prefixes} prefixes of {told.prefix_tokens} tokens, {told.concurrency} clients; {workers}"
    at = f", load {told.load:g}" if told.engine == "fcfs" else ""
    return f"{Path(told.trace).name}{', spread' if told.spread else ''}; {workers}{at}"


if __name__ == "__main__":
    sys.exit(main())
