"""A worker process, from its command line to its exit code.

0    it was told to stop and finished what it had begun
1    its engine died, or a bug of ours
2    a flag, a variable or a file is wrong: one sentence says which
130  interrupted before it served anything
"""

import asyncio
import dataclasses
import functools
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import config, errors, process_setup
from dynamo.engine import api
from dynamo.observability import logs
from dynamo.preprocess import loading
from dynamo.protocols import model_card
from dynamo.runtime import component
from dynamo.worker import (
    card,
    disaggregated,
    embedding_host,
    engines,
    fleet,
    host,
    metrics,
    model_source,
    settings,
    system,
)

_logger = logging.getLogger(__name__)
Served = host.Host | fleet.Fleet | embedding_host.EmbeddingHost
MakeHost = Callable[[component.DistributedRuntime], Served]


def main(engine_name: str) -> int:
    """Serve until told to stop."""
    prog = f"python -m dynamo.{engine_name}"
    try:
        parts = (settings.WorkerConfig, engines.settings_of(engine_name))
        worker, own = config.load_parts(parts, prog=prog)
        worker.check()
        logs.configure()
        kind = engines.kind_of(engine_name)
        if worker.max_local_prefill_length is None:
            longest = kind.max_local_prefill_length
            worker = dataclasses.replace(worker, max_local_prefill_length=longest)
        directory = model_source.resolve(worker.model, with_weights=kind.needs_weights)
        asyncio.run(_serve(worker, _host_maker(worker, engine_name, directory, own)))
    except errors.ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    except errors.EngineFailed as error:
        _logger.error("%s", error, exc_info=error.__cause__)  # noqa: TRY400 (the cause has the trace)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:
        _logger.exception("the worker died")
        return 1
    return 0


def _host_maker(
    worker: settings.WorkerConfig, engine_name: str, directory: Path, own: Any
) -> MakeHost:
    """Makes the host that the task wants, on a runtime. Raises ConfigError."""
    if model_source.task(worker.task, directory) == "embed":
        embedder = engines.build_embedder(engine_name, directory, own)
        return lambda runtime: make_embedding_host(worker, embedder, runtime, directory)
    built = engines.build_all(engine_name, directory, own, _model_name(worker))
    if len(built) == 1:
        named = engines.kind_of(engine_name).metrics
        return lambda runtime: make_host(worker, built[0], runtime, directory, passed_on=named)
    return lambda runtime: _make_fleet(worker, built, runtime, directory)


def _model_name(worker: settings.WorkerConfig) -> str:
    """What clients call the model."""
    return worker.model_name or model_source.display_name(worker.model)


async def _serve(worker: settings.WorkerConfig, make: MakeHost) -> None:
    async with await component.DistributedRuntime.open(worker) as runtime:
        served = make(runtime)
        try:
            if worker.system_port != system.PORT_DISABLED:
                await served.open_system_port(worker.system_host, worker.system_port)
            await served.start()  # until here a signal ends the process at once: nothing runs yet
            await served.run_until(process_setup.stop_on_signals())
        finally:
            await served.stop(worker.graceful_shutdown_timeout_s, worker.grace_period_s)


def make_host(
    worker: settings.WorkerConfig,
    engine: api.Engine,
    runtime: component.DistributedRuntime,
    directory: Path,
    *,
    make_card: host.MakeCard | None = None,
    counts: metrics.WorkerMetrics | None = None,
    passed_on: str | None = None,
) -> host.Host:
    """The host of the model in `directory`, as these settings want it; `passed_on` as in `WorkerMetrics`."""
    clock = clocks.SystemClock()
    counts = counts or metrics.WorkerMetrics(worker.endpoint_name, clock, passed_on=passed_on)
    make = make_card or _card_maker(worker, directory, clock)
    role = disaggregated.prepare(
        engine,
        worker,
        runtime,
        counts.registry,
        model=_model_name(worker),
        directory=directory,
    )
    made = host.Host(
        role.engine,
        runtime,
        worker.endpoint_name,
        make_card=lambda facts: disaggregated.marked(make(facts), worker, engine),
        request_limit=worker.engine_request_limit,
        clock=clock,
        counts=counts,
        traces=worker,
    )
    made.live_with(role.beside)
    if worker.patience is not None:
        made.ask_when_quiet(worker.patience)
    sleeping = engine.capabilities.sleep
    if sleeping is not None and not worker.takes_from_queue:
        made.sleep_when_told(sleeping, worker.graceful_shutdown_timeout_s, worker.grace_period_s)
    if engine.capabilities.lora_adapters is not None:
        made.change_loras_when_told(engine.capabilities.lora_adapters)
    return made


def _make_fleet(
    worker: settings.WorkerConfig,
    built: Sequence[api.Engine],
    runtime: component.DistributedRuntime,
    directory: Path,
) -> fleet.Fleet:
    """The hosts of several engines, with one card and one set of counts. Raises ConfigError."""
    worker = disaggregated.together(worker)
    clock = clocks.SystemClock()
    counts = metrics.WorkerMetrics(worker.endpoint_name, clock)
    make_card = functools.cache(_card_maker(worker, directory, clock))

    def make_one(engine: api.Engine, sibling: component.DistributedRuntime) -> host.Host:
        return make_host(worker, engine, sibling, directory, make_card=make_card, counts=counts)

    return fleet.Fleet(built, runtime, make_one, endpoint=worker.endpoint_name, counts=counts)


def _card_maker(
    worker: settings.WorkerConfig, directory: Path, clock: clocks.Clock
) -> host.MakeCard:
    name = _model_name(worker)

    def make_card(facts: api.EngineFacts) -> model_card.ModelCard:
        made = card.build(
            directory,
            name=name,
            facts=facts,
            created=int(clock.wall()),
            tool_call_parser=worker.dyn_tool_call_parser,
            reasoning_parser=worker.dyn_reasoning_parser,
            infill_format=worker.dyn_infill_format,
            migration_limit=worker.migration_limit,
        )
        loading.load_preprocessor(
            made, clock
        )  # what no frontend could read is better refused here than there
        return made

    return make_card


def make_embedding_host(
    worker: settings.WorkerConfig,
    embedder: api.Embedder,
    runtime: component.DistributedRuntime,
    directory: Path,
) -> embedding_host.EmbeddingHost:
    """The host of the model in `directory`, for vectors."""
    clock = clocks.SystemClock()
    name = _model_name(worker)

    def make_card(facts: api.EmbedderFacts) -> model_card.ModelCard:
        made = card.build_embedding(directory, name=name, facts=facts, created=int(clock.wall()))
        loading.load_preprocessor(made, clock)
        return made

    return embedding_host.EmbeddingHost(
        embedder,
        runtime,
        worker.endpoint_for("embed"),
        make_card=make_card,
        request_limit=worker.engine_request_limit,
        clock=clock,
    )
