"""The worker process, from its command line to its exit code.

0    a signal stopped it, and it finished the requests that it had begun
1    its engine died, or a bug
2    a flag, a variable or a file is wrong: one sentence says which
130  interrupted before it served
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import config, errors, process_setup
from dynamo.engine import api
from dynamo.kvbm import agents
from dynamo.observability import logs
from dynamo.preprocess import loading, tokenize, tokenizer_library
from dynamo.protocols import generate, instances, model_card
from dynamo.runtime import component, reachability
from dynamo.worker import (
    card,
    disaggregated,
    embedding_host,
    engines,
    health,
    host,
    model_source,
    role_change,
    settings,
    startup,
)

_logger = logging.getLogger(__name__)
AnyHost = host.Host | host.Fleet | embedding_host.EmbeddingHost | role_change.RoleHost
MakeAnyHost = Callable[[component.DistributedRuntime], AnyHost]


def main(engine_name: str) -> int:
    """Serve with this engine until a signal comes, and return the exit code."""
    prog = f"python -m dynamo.{engine_name}"
    try:
        logs.configure()
        parts = (settings.WorkerConfig, engines.settings_of(engine_name))
        commands = ", ".join(f"dynamo.{name}" for name in engines.KIND_BY_NAME)
        worker, engine_settings = config.load_parts(
            parts, prog=prog, note=f"There is a command for each engine: python -m {commands}."
        )
        worker.check()
        worker, engine_settings = _with_reachable_hosts(worker, engine_settings)
        engines.check_installed(engine_name)
        progress = startup.StartProgress(clocks.SystemClock(), worker.startup_stall_timeout)
        with startup.early_port(
            worker.system_host, worker.used_system_port, progress
        ) as start_port:
            directory = engines.find_model(engine_name, worker.model, progress.begin_download)
            progress.begin_load()
            make_any_host = _host_factory(worker, engine_name, directory, engine_settings)
            with asyncio.Runner() as runner:
                try:
                    runner.run(_serve(worker, make_any_host, progress, start_port))
                finally:  # it waits for the threads of its executor, and an engine may hang in one
                    runner.get_loop().set_default_executor(futures.ThreadPoolExecutor())
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


def _with_reachable_hosts(
    worker: settings.WorkerConfig, engine_settings: Any
) -> tuple[settings.WorkerConfig, Any]:
    """Return both with the address at which other hosts reach requests and KV blocks. Raises ConfigError."""
    moves_blocks = isinstance(engine_settings, agents.TransferConfig)
    has_exports = moves_blocks and (worker.is_prefill or worker.kv_peer_prefixes)
    worker = reachability.with_reachable_host(
        worker,
        os.environ,
        exports_blocks=has_exports and engine_settings.kv_transfer_host is None,
    )
    if moves_blocks:
        transfer = engine_settings.kv_transfer_host, engine_settings.kv_transfer_advertise
        reachability.warn_of_loopback(worker, os.environ, *transfer, setting="DYN_KV_TRANSFER_")
        engine_settings = dataclasses.replace(engine_settings, tcp_rpc_host=worker.tcp_rpc_host)
    return worker, engine_settings


async def _serve(
    worker: settings.WorkerConfig,
    make_any_host: MakeAnyHost,
    progress: startup.StartProgress,
    start_port: startup.StartPort | None,
) -> None:
    async with await component.DistributedRuntime.open(
        worker, item_type=generate.Output
    ) as runtime:
        served = make_any_host(runtime)

        async def show_system_port() -> None:
            progress.finish()
            if start_port is not None:
                await served.system_port.start_on(start_port.release())

        try:
            served_names = {"generate", "embed", worker.endpoint_name.endpoint}
            if absent := sorted({*worker.system_use_endpoint_health_status} - served_names):
                _logger.warning(
                    "/health does not wait for %s (--system-use-endpoint-health-status), which workers do not serve",
                    ", ".join(absent),
                )
            async with _announced_start(runtime, worker):
                # until here a signal ends the process at once: nothing runs yet
                await served.start(show_system_port)
                stop = process_setup.stop_on_signals()
            await served.run_until(stop)
        finally:
            await served.stop(worker.graceful_shutdown_timeout_s, worker.grace_period_s)


@contextlib.asynccontextmanager
async def _announced_start(
    runtime: component.DistributedRuntime, worker: settings.WorkerConfig
) -> AsyncIterator[None]:
    """Have frontends let requests wait for this worker inside, unless it only computes prompts for others."""
    key = f"{instances.STARTS}{runtime.instance_id:x}"
    start = instances.WorkerStart(
        model=_model_name(worker),
        namespace=worker.namespace,
        estimate_s=worker.start_estimate_s,
    )
    try:
        if not worker.is_prefill:
            await runtime.discovery.put(key, msgspec.json.encode(start))
    except errors.Unavailable as error:
        _logger.debug("the start is not announced: %s", error)
    yield
    await runtime.discovery.delete(key)


def _host_factory(
    worker: settings.WorkerConfig, engine_name: str, directory: Path, engine_settings: Any
) -> MakeAnyHost:
    """Build the engines, and return what makes their host on a runtime. Raises ConfigError."""
    if model_source.task(worker.task, directory) == "embed":
        _log_notes(worker, "embed")
        embedder = engines.build_embedder(engine_name, directory, engine_settings)
        return lambda runtime: make_embedding_host(worker, embedder, runtime, directory)
    built = engines.build_all(engine_name, directory, engine_settings, _model_name(worker))
    kind = engines.kind_of(engine_name)
    can_change_role = len(built) == 1 and role_change.can_change_role(worker, built[0])
    moves_blocks = built[0].capabilities.kv_transfer is not None
    if len(built) > 1 or not moves_blocks or worker.disaggregation_mode == "agg":
        _log_notes(worker, "agg")
    elif worker.is_prefill and not can_change_role:
        _log_notes(worker, "prefill")
    if worker.max_local_prefill_length is None:
        length = kind.max_local_prefill_length
        worker = dataclasses.replace(worker, max_local_prefill_length=length)
    if can_change_role:
        return lambda runtime: make_role_host(worker, built[0], runtime, directory)
    if len(built) == 1:
        return lambda runtime: make_host(
            worker, built[0], runtime, directory, engine_prefix=kind.metrics
        )
    return lambda runtime: _make_fleet(worker, built, runtime, directory)


def _log_notes(worker: settings.WorkerConfig, role: settings.Role) -> None:
    for note in worker.find_notes(role):
        _logger.warning("%s", note)


def _model_name(worker: settings.WorkerConfig) -> str:
    return worker.model_name or model_source.display_name(worker.model)


def _aliases(worker: settings.WorkerConfig) -> tuple[str, ...]:
    if worker.model_alias or worker.model_name:
        return worker.model_alias
    return model_source.aliases(worker.model)


def make_host(
    worker: settings.WorkerConfig,
    engine: api.Engine,
    runtime: component.DistributedRuntime,
    directory: Path,
    *,
    make_card: host.MakeCard | None = None,
    counters: health.WorkerMetrics | None = None,
    engine_prefix: str | None = None,
    clock: clocks.Clock | None = None,
) -> host.Host:
    """Make the host of the model in `directory` from these settings; `engine_prefix` as in `WorkerMetrics`.

    All time of the worker is that of `clock`, by default the machine's.
    """
    clock = clock or clocks.SystemClock()
    counters = counters or health.WorkerMetrics(
        worker.endpoint_name, clock, engine_prefix=engine_prefix
    )
    make = make_card or _card_factory(worker, directory, clock)
    role = disaggregated.prepare_role(
        engine,
        worker,
        runtime,
        counters.registry,
        clock,
        model=_model_name(worker),
        directory=directory,
    )
    return host.Host(
        role.engine,
        runtime,
        worker.endpoint_name,
        make_card=lambda facts: disaggregated.add_role(make(facts), worker, engine),
        options=host.HostOptions(
            request_limit=worker.engine_request_limit,
            drain_timeout_s=worker.graceful_shutdown_timeout_s,
            drain_grace_s=worker.grace_period_s,
            is_aggregated=role.engine is engine and not worker.is_prefill,
            can_sleep=not worker.takes_from_queue,
            health_check=worker.health_check,
            traces=worker,
        ),
        clock=clock,
        counters=counters,
        hooks=role.hooks,
    )


def make_role_host(
    worker: settings.WorkerConfig,
    engine: api.Engine,
    runtime: component.DistributedRuntime,
    directory: Path,
) -> role_change.RoleHost:
    """Make the host of the model in `directory` that can change between prefill and decode."""

    def make(
        kept_engine: api.Engine, sibling: component.DistributedRuntime, role: role_change.Role
    ) -> host.Host:
        settled = dataclasses.replace(
            worker, disaggregation_mode=role, is_prefill_worker=False, is_decode_worker=False
        )
        return make_host(settled, kept_engine, sibling, directory)

    return role_change.RoleHost(engine, runtime, make, worker=worker, clock=clocks.SystemClock())


def _make_fleet(
    worker: settings.WorkerConfig,
    built: Sequence[api.Engine],
    runtime: component.DistributedRuntime,
    directory: Path,
) -> host.Fleet:
    """Make the hosts of several engines, with one card and one set of metrics. Raises ConfigError."""
    worker = disaggregated.require_aggregated(worker)
    clock = clocks.SystemClock()
    counters = health.WorkerMetrics(worker.endpoint_name, clock)
    make_card = functools.cache(_card_factory(worker, directory, clock))

    def make(engine: api.Engine, sibling: component.DistributedRuntime) -> host.Host:
        return make_host(worker, engine, sibling, directory, make_card=make_card, counters=counters)

    return host.Fleet(built, runtime, make, endpoint=worker.endpoint_name, counters=counters)


def _card_factory(
    worker: settings.WorkerConfig, directory: Path, clock: clocks.Clock
) -> host.MakeCard:
    name = _model_name(worker)

    def make_card(facts: api.EngineFacts) -> model_card.ModelCard:
        built = card.build(
            directory,
            name=name,
            facts=facts,
            created=int(clock.wall()),
            tool_call_parser=worker.dyn_tool_call_parser,
            reasoning_parser=worker.dyn_reasoning_parser,
            infill_format=worker.dyn_infill_format,
            migration_limit=worker.migration_limit,
        )
        if (template := worker.custom_jinja_template) is not None:
            files = card.describe_files(directory, template)
            types = dict.fromkeys((model_card.ModelType.CHAT, *built.model_type))
            built = msgspec.structs.replace(built, files=files, model_type=tuple(types))
        runtime_config = msgspec.structs.replace(
            built.runtime_config, template_defaults=worker.template_defaults
        )
        built = msgspec.structs.replace(built, runtime_config=runtime_config)
        _refuse_unreadable(built, clock)
        return msgspec.structs.replace(built, aliases=_aliases(worker))

    return make_card


def _refuse_unreadable(built: model_card.ModelCard, clock: clocks.Clock) -> None:
    """Raise ConfigError for a model with files that no frontend could use."""
    options = tokenize.TokenizerOptions(findings=tokenizer_library.FindingsDirectory.of_user())
    loading.load_preprocessor(built, clock, tokenizer_options=options)


def make_embedding_host(
    worker: settings.WorkerConfig,
    embedder: api.Embedder,
    runtime: component.DistributedRuntime,
    directory: Path,
) -> embedding_host.EmbeddingHost:
    """Make the host of the embedding model in `directory` from these settings."""
    clock = clocks.SystemClock()
    name = _model_name(worker)

    def make_card(facts: api.EmbedderFacts) -> model_card.ModelCard:
        built = card.build_embedding(
            directory,
            name=name,
            facts=facts,
            created=int(clock.wall()),
            template=worker.custom_jinja_template,
        )
        _refuse_unreadable(built, clock)
        return msgspec.structs.replace(built, aliases=_aliases(worker))

    return embedding_host.EmbeddingHost(
        embedder,
        runtime,
        worker.endpoint_for("embed"),
        make_card=make_card,
        request_limit=worker.engine_request_limit,
        clock=clock,
    )
