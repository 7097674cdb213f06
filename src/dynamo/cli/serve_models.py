"""`dynamo serve A B C`: several models behind one frontend, each loaded when a request comes for it.

The models share a budget of memory (`planner.model_turns` decides, `planner.model_loader` starts and drains workers).
Before anything starts it is known what each one is estimated to take: its weights, and `OVERHEAD_GB` for the process
and its KV cache.
"""

import asyncio
import functools
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import config, draining, errors
from dynamo.cli import serve, waiting
from dynamo.cli.serve_options import ServeConfig
from dynamo.engine.native import model_files
from dynamo.kvbm import host_memory
from dynamo.launch import children, guard, state, supervisor
from dynamo.planner import model_loader, model_turns
from dynamo.protocols import instances
from dynamo.runtime import component, reachability
from dynamo.worker import engines, model_source

OVERHEAD_GB = 1.0
_FREE_SHARE = 0.8  # of the memory that is free now, for the models together


def serve_any(options: ServeConfig) -> int:
    """Serve one model, or several, until a signal comes, and return the exit code. Raises ConfigError."""
    options.check_passed_on()
    return serve_models(options) if len(options.models) > 1 else serve.serve(options)


def serve_models(options: ServeConfig) -> int:
    """Serve until a signal comes, and return the exit code. Raises ConfigError."""
    serve.check_no_tls(shlex.split(options.frontend_flags), os.environ)
    serve.check_port(options.http_host, options.http_port)
    names = [model_source.display_name(typed) for typed in options.models]
    _check_options(options, names)  # before the models are downloaded
    models = [_resolve(options, typed) for typed in options.models]
    budget_gb = options.memory_budget_gb
    if budget_gb is None:
        budget_gb = _FREE_SHARE * host_memory.available_bytes() / 1e9
    servable = [
        model_turns.ServableModel(
            name=model.name, memory_gb=model.memory_gb, is_pinned=model.name in options.pin
        )
        for model in models
    ]
    turns = model_turns.ModelTurns(
        servable, budget_gb=budget_gb, idle_s=60.0 * options.idle_minutes
    )
    with state.registered("models", ", ".join(names)) as registration, guard.Guard() as guardian:
        folder = guardian.make_folder("dynamo-serve-")
        serve.make_joinable(registration, folder / "discovery")
        os.environ |= registration.state.variables  # for the children, and for this process
        with state.logged(registration.state.name):
            run = _Run(options, models, turns, registration, guardian)
            return asyncio.run(run.run(budget_gb))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A model as it was typed, and what is known of it."""

    typed: str
    name: str
    engine: str
    path: Path
    memory_gb: float
    context_length: int


def _resolve(options: ServeConfig, typed: str) -> _Model:
    """Find a model. Raises ConfigError."""
    engine = options.engine or engines.default_for(typed)
    if not options.dry_run:
        engines.check_installed(engine)
    path = directory = engines.find_model(engine, typed)
    if engines.kind_of(engine).reads_gguf:
        path = Path(typed).expanduser().resolve()
    return _Model(
        typed=typed,
        name=model_source.display_name(typed),
        engine=engine,
        path=path,
        memory_gb=weights_gb(path) + OVERHEAD_GB,
        context_length=_context_length(directory),
    )


def _context_length(directory: Path) -> int:
    """Return the context that the model's own settings name, in tokens; 0 if they name none. Raises ConfigError."""
    settings = model_files.read_json(directory / "config.json", dict[str, Any]) or {}
    own = settings.get("text_config")
    length = (own if isinstance(own, dict) else settings).get("max_position_embeddings")
    return length if isinstance(length, int) else 0


def weights_gb(path: Path) -> float:
    """Return the size of a model's weights, which are in this file or directory."""
    files = (
        [path]
        if path.is_file()
        else [file for pattern in ("*.safetensors", "*.gguf") for file in path.glob(pattern)]
    )
    return sum(file.stat().st_size for file in files) / 1e9


def _check_options(options: ServeConfig, names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise errors.ConfigError(f"expected models of different names, got {', '.join(names)}")
    if unknown := sorted(set(options.pin) - set(names)):
        raise errors.ConfigError(
            f"--pin {unknown[0]}: expected one of the models {', '.join(names)}"
        )
    single = {"--model-name": options.model_name, "--planner": options.planner,
              "--prefill": options.prefill, "--workers": options.workers > 1,
              "--cores-per-worker": options.cores_per_worker,
              "--devices-per-worker": options.devices_per_worker,
              "--dry-run": options.dry_run}  # fmt: skip
    if wrong := [flag for flag, value in single.items() if value]:
        raise errors.ConfigError(
            f"{wrong[0]} is for one model, got {len(names)}: leave it out, or serve them apart"
        )
    options.check_planner()


class _Run:
    """One run of the command."""

    def __init__(
        self,
        options: ServeConfig,
        models: list[_Model],
        turns: model_turns.ModelTurns,
        registration: state.Registration,
        guardian: guard.Guard,
    ) -> None:
        self._options = options
        self._models = models
        self._turns = turns
        self._registration = registration
        self._guard = guardian
        self._clock = clocks.SystemClock()
        self._list_child = functools.partial(serve.list_child, registration)
        self._frontend = serve.frontend_spec(options, os.environ)
        self._stop_timeout_s = max(
            draining.stop_timeout_s(words, os.environ)
            for words in (self._frontend.argv, shlex.split(options.worker_flags))
        )
        registration.update(stop_timeout_s=self._stop_timeout_s)

    async def run(self, budget_gb: float) -> int:
        """Start the frontend, then load models as they are asked for, until a signal comes; return the exit code."""
        owner = supervisor.Supervisor(
            self._guard,
            self._clock,
            waiting.say,
            stop_timeout_s=self._stop_timeout_s,
            on_start=self._list_child,
        )
        settings = reachability.with_reachable_host(
            config.load(component.RuntimeConfig, argv=(), prog="dynamo serve"), os.environ
        )
        async with await component.DistributedRuntime.open(settings) as runtime:
            loader = self._make_loader(runtime, owner)
            namespace = self._registration.state.namespace
            await runtime.register(instances.loader_endpoint(namespace), loader.change)
            return await serve.supervise(owner, self._serve(owner, loader, budget_gb))

    async def _serve(
        self, owner: supervisor.Supervisor, loader: model_loader.ModelLoader, budget_gb: float
    ) -> None:
        options = self._options
        probe = functools.partial(
            serve.lists_models,
            options.http_host,
            options.http_port,
            [model.name for model in self._models],
            need_workers=False,
        )
        try:
            await loader.announce()
            await owner.start(self._frontend)
            if await serve.wait_until_answers(
                owner, self._clock, "the frontend", probe, options.ready_timeout
            ):
                self._registration.update(url=options.url)
                print(self._banner(budget_gb), flush=True)
                owner.watch(serve.FRONTEND)
                loading = owner.run_beside("load models", loader.run())
                try:
                    await owner.run()
                finally:
                    loading.cancel()
        finally:
            await loader.close()

    def _make_loader(
        self, runtime: component.DistributedRuntime, owner: supervisor.Supervisor
    ) -> model_loader.ModelLoader:
        def start_child(child: children.Child) -> None:
            owner.adopt(child)  # a second Ctrl-C ends it at once
            self._list_child(child)

        namespace = self._registration.state.namespace
        local_models = [
            self._local_model(
                model, instances.EndpointName(namespace, f"model{number}", "generate")
            )
            for number, model in enumerate(self._models)
        ]
        return model_loader.ModelLoader(
            local_models,
            self._turns,
            runtime.discovery,
            self._guard,
            self._clock,
            model_loader.LoaderOptions(
                frontend_url=self._options.url,
                instance_id=runtime.instance_id,
                namespace=namespace,
                stop_timeout_s=self._stop_timeout_s,
            ),
            on_start=start_child,
            on_change=self._list_states,
        )

    def _local_model(
        self, model: _Model, endpoint: instances.EndpointName
    ) -> model_loader.LocalModel:
        aliases = model_source.aliases(model.typed)
        flags = ["--model", str(model.path), "--model-name", model.name]
        flags += ["--endpoint", str(endpoint), "--start-estimate-s", "1"]
        flags += ["--graceful-shutdown-timeout", str(int(model_loader.UNLOAD_S))]
        for alias in aliases:
            flags += ["--model-alias", alias]
        spec = children.ChildSpec(
            name=_process_name(model.name),
            argv=[
                *(sys.executable, "-m", f"dynamo.{model.engine}"),
                *flags,
                *shlex.split(self._options.worker_flags),
            ],
            environ=os.environ,
        )
        return model_loader.LocalModel(
            name=model.name,
            aliases=aliases,
            endpoint=endpoint,
            spec=spec,
            context_length=model.context_length,
        )

    def _list_states(self, state_by_name: Mapping[str, str]) -> None:
        """List the states of the models, and the processes that there are now."""
        former = self._registration.state.models
        for name, words in state_by_name.items():
            phase = words.partition(",")[0]
            if phase != former.get(name, "unloaded").partition(",")[0]:
                waiting.say(f"{name} is {phase}")
        loaded = {
            _process_name(name)
            for name, words in state_by_name.items()
            if not words.startswith(("unloaded", "failed"))
        }
        processes = [
            process
            for process in self._registration.state.processes
            if process.name == serve.FRONTEND or process.name in loaded
        ]
        self._registration.update(models=dict(state_by_name), processes=processes)

    def _banner(self, budget_gb: float) -> str:
        rows = "".join(
            f"  {model.name:<32} {model.memory_gb:6.1f} GB"
            f"{'  stays loaded' if model.name in self._options.pin else ''}\n"
            for model in self._models
        )
        first = self._models[0]
        return (
            f"\n{len(self._models)} models at {self._options.url}, loaded when they are asked for,"
            f" in {budget_gb:.1f} GB:\n\n{rows}\n"
            f"  state   dynamo ps {self._registration.state.name}\n"
            f"  stop    Ctrl-C, or dynamo stop {self._registration.state.name}\n\n"
            f"  {serve.curl_line(self._options.url, first.name, first.path)}\n"
        )


def _process_name(model: str) -> str:
    return re.sub(r"[^\w.-]", "-", model)
