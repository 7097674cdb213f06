"""`python -m dynamo.simulate routing --trace FILE --workers 8 --policy dynamo,estimated-ttft --load 0.8`, and
`python -m dynamo.simulate disagg`.
"""

import importlib
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from dynamo.base import config, distribution, errors
from dynamo.router import config as router_config
from dynamo.simulate import disagg_claim, routing, screen
from dynamo.simulate.config import SimulateConfig

_PROG = "python -m dynamo.simulate"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. A mistake of the user's is one sentence and 2."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["disagg"]:
            _disagg(config.load(disagg_claim.DisaggConfig, prog=_PROG, argv=argv))
        else:
            parts = (SimulateConfig, router_config.RouterConfig)
            _simulate(*config.load_parts(parts, prog=_PROG, argv=argv))
    except errors.DynamoError as error:
        sys.stderr.write(f"dynamo.simulate: {error}\n")
        return 2 if isinstance(error, errors.ConfigError) else 1
    return 0


def _simulate(told: SimulateConfig, router: router_config.RouterConfig) -> None:
    told.check()
    routing.check_policies(told.policy)
    plots = _plots(told.output)
    trace = routing.read_workload(told)
    summaries = []
    for policy in told.policy:
        with screen.bar(policy, routing.num_requests(told, trace)) as on_progress:
            summaries.append(
                routing.run(told, router, trace, policy, on_progress, time.perf_counter)
            )
    caption = _caption(told)
    screen.show(summaries, caption)
    if plots is not None and told.output is not None:
        page = plots.write(summaries, caption, Path(told.output))
        sys.stdout.write(f"wrote {page}\n")


def _disagg(told: disagg_claim.DisaggConfig) -> None:
    plots = _plots(told.output)
    disagg_claim.run(told, None if plots is None else plots.write_disagg)


def _plots(output: str | None) -> ModuleType | None:
    """The module that draws, if something is to be drawn: an extra, and half a second. Raises ConfigError."""
    if output is None:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        command = distribution.install_command("plots")
        raise errors.ConfigError(f"--output needs matplotlib, which is not installed: {command}")
    return importlib.import_module("dynamo.simulate.plots")


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
