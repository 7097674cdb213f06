"""`dynamo serve`: one frontend and some workers as child processes, supervised until Ctrl-C.

The command is ready when the frontend lists the model, and says so. Until then it says what it waits for, and it gives
up when a child dies or the time is over. Afterwards a worker or frontend that dies is restarted, each time after a
longer pause and not for ever.

Each run has its own discovery directory, or a namespace of its own where the environment names a discovery
(`make_joinable`), so that two runs on one machine do not mix.
However the command ends, nothing of it is left (`launch.guard`).
"""

import asyncio
import dataclasses
import errno
import functools
import http
import itertools
import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo.base import addresses, config, draining, errors
from dynamo.base import clock as clocks
from dynamo.cli import waiting
from dynamo.cli import workers as cli_workers
from dynamo.cli.serve_options import ServeConfig
from dynamo.launch import allocation, children, guard, state, supervisor
from dynamo.planner import config as planner_config
from dynamo.runtime import component, listening
from dynamo.runtime.http import client
from dynamo.worker import engines, model_source

PROBE_TIMEOUT_S = 1.0
PROMPT = "Tell me a story about a brave cat"
DISCOVERY, NAMESPACE = "DYN_FILE_KV", "DYN_NAMESPACE"
# What a process that joins a `dynamo serve` has to have in common with it.
_PLANE_VARIABLES = (
    *(DISCOVERY, NAMESPACE, "DYN_DISCOVERY_BACKEND", "DYN_REQUEST_PLANE", "DYN_EVENT_PLANE"),
    *("ETCD_ENDPOINTS", "NATS_SERVER"),
)
FRONTEND, _PLANNER = "frontend", "planner"
_PlannerOptions = tuple[planner_config.PlannerConfig, planner_config.ScalingConfig]
_SOCKET_FOLDER_CHARS = 70  # a socket's path has 107 characters at most, and vLLM appends 37


def serve(options: ServeConfig) -> int:
    """Serve until a signal comes, and return the exit code. Raises ConfigError."""
    options.check_single()
    options.check_planner()
    engine = options.engine or engines.default_for(options.model)
    if not options.dry_run:
        check_no_tls(shlex.split(options.frontend_flags), os.environ)
        check_port(options.http_host, options.http_port)
        engines.check_installed(engine)
    options = dataclasses.replace(options, engine=engine)
    directory = engines.find_model(engine, options.model)
    if engines.kind_of(engine).reads_gguf and options.model:
        directory = Path(options.model).expanduser().resolve()  # commands name the file itself
    model = options.model_name or model_source.display_name(options.model)
    name = re.sub(r"[^\w.-]", "-", model.rpartition("/")[2]) or "model"
    with state.registered(name, model) as registration, guard.Guard() as guardian:
        if options.dry_run:
            make_joinable(registration, state.directory() / f"{registration.state.name}.discovery")
            for name, spec in _Serving(options, directory, registration, guardian).specs.items():
                print(f"# {name}\n{shell_line(registration, spec)}\n")
            return 0
        folder = guardian.make_folder("dynamo-serve-")
        make_joinable(registration, folder / "discovery")
        if engine == "vllm" and len(str(folder)) <= _SOCKET_FOLDER_CHARS:  # for its sockets
            sockets = os.environ.get("VLLM_RPC_BASE_PATH", str(folder))
            variables = registration.state.variables | {"VLLM_RPC_BASE_PATH": sockets}
            registration.update(variables=variables)
        with state.logged(registration.state.name):
            return asyncio.run(_Serving(options, directory, registration, guardian).run())


def plane_variables() -> dict[str, str]:
    """Return the variables of this environment that choose discovery, planes and namespace."""
    return {name: os.environ[name] for name in _PLANE_VARIABLES if name in os.environ}


def make_joinable(registration: state.Registration, directory: Path) -> None:
    """Write into the state by which variables processes join, such as this directory for discovery.

    Where the environment names a discovery that others use as well, a namespace of its own keeps their models apart.
    """
    variables = plane_variables()
    options = config.load(component.RuntimeConfig, prog="dynamo serve", argv=())
    namespace = options.namespace
    if options.discovery_backend == "file" and DISCOVERY not in variables:
        variables[DISCOVERY] = str(directory)
    else:
        if NAMESPACE not in variables:
            namespace = free_namespace(registration, namespace, variables.get(DISCOVERY))
        variables[NAMESPACE] = namespace
    registration.update(namespace=namespace, variables=variables)


def free_namespace(registration: state.Registration, name: str, discovery: str | None) -> str:
    """Return this name, or one with a number, that no other `dynamo serve` has in the same discovery."""
    try:
        running = state.running()
    except errors.ConfigError:  # there is no place for states
        return name
    taken_namespaces = {
        other.namespace
        for other in running
        if other.name != registration.state.name and other.variables.get(DISCOVERY) == discovery
    }
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken_namespaces)


def check_no_tls(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a frontend with TLS: this command, and the planner, ask it over plain HTTP."""
    flags = [word.partition("=")[0] for word in words]
    for name in ("--tls-cert-path", "DYN_TLS_CERT_PATH"):
        if name in flags or environ.get(name):
            raise errors.ConfigError(
                f"{name}: dynamo serve asks its frontend over plain HTTP: start one with TLS by itself"
                " (python -m dynamo.frontend), or leave TLS to a proxy"
            )


def check_port(host: str, port: int, *, other: str = "--http-port (make run PORT=...)") -> None:
    """Check before anything starts: a server at this port would be mistaken for our frontend.

    Raises ConfigError, which says how to choose another port by `other`.
    """
    try:
        family, number = addresses.resolve(host)
        socket.create_server((number, port), family=family).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise errors.ConfigError(
                f"cannot listen on {addresses.join(host, port)}: {error}"
            ) from error
        raise errors.ConfigError(
            f"port {port} is in use: stop the other process or choose {other}"
        ) from error


class _Serving:
    """One run of the command."""

    def __init__(
        self,
        options: ServeConfig,
        directory: Path,
        registration: state.Registration,
        guardian: guard.Guard,
    ) -> None:
        self._options = options
        self._directory = directory
        self._registration = registration
        self._name = registration.state.model
        self._variables = registration.state.variables
        self._environ = os.environ | self._variables
        self._clock = clocks.SystemClock()
        self._topology = options.topology
        if model_source.task("auto", directory) == "embed":  # it has no prompts to compute apart
            self._topology = cli_workers.Topology(num_answering=options.workers)
        self._planner: _PlannerOptions | None = None
        self.specs = self._make_specs()
        stop_timeout_s = max(
            draining.stop_timeout_s(spec.argv, spec.environ) for spec in self.specs.values()
        )
        registration.update(stop_timeout_s=stop_timeout_s)
        self._supervisor = supervisor.Supervisor(
            guardian,
            self._clock,
            waiting.say,
            stop_timeout_s=stop_timeout_s,
            on_start=functools.partial(list_child, registration),
        )

    async def run(self) -> int:
        """Start all, wait until the model answers, and supervise; return the exit code."""
        return await supervise(self._supervisor, self._serve())

    async def _serve(self) -> None:
        """Start, wait until the model answers, supervise. Raises ChildDied."""
        for spec in self.specs.values():
            await self._supervisor.start(spec)
        options = self._options
        probe = functools.partial(
            lists_models,
            options.http_host,
            options.http_port,
            [self._name],
            need_workers=not self._starts_asleep,
        )
        if not await wait_until_answers(
            self._supervisor, self._clock, self._name, probe, options.ready_timeout
        ):
            return
        self._registration.update(url=options.url)
        print(self._banner(), flush=True)
        for name in self.specs:
            self._supervisor.watch(name)
        await self._supervisor.run()

    def _make_specs(self) -> dict[str, children.ChildSpec]:
        options = self._options
        allocator = allocation.Allocator(children.machine_resources(self._environ))
        specs = {FRONTEND: frontend_spec(options, self._environ)}
        if options.planner:
            return specs | {_PLANNER: self._planner_spec()}
        for name, mode in self._topology.modes.items():
            resources = allocator.acquire(
                num_cores=options.cores_per_worker, num_devices=options.devices_per_worker
            )
            role = ("--disaggregation-mode", mode) if mode is not None else ()
            flags = ["--model", str(self._directory), "--model-name", self._name, *role]
            if not options.model_name:
                for alias in model_source.aliases(options.model):
                    flags += ["--model-alias", alias]
            flags += shlex.split(options.worker_flags)
            specs[name] = children.ChildSpec(
                name=name,
                argv=[sys.executable, "-m", f"dynamo.{options.engine}", *flags],
                environ=self._environ,
                resources=resources,
            )
        return specs

    def _planner_spec(self) -> children.ChildSpec:
        options = self._options
        values = {
            "--backend": options.engine,
            "--model": self._directory,
            "--model-name": self._name,
            "--mode": "disagg" if options.prefill else "agg",
            "--frontend-url": options.url,
            "--planner-port": listening.find_free_ports(1),
            "--adjustment-interval": 2,
            "--min-endpoint": options.planner_min_workers,
            "--max-workers": options.planner_max_workers,
            "--max-gpu-budget": options.planner_max_workers * (2 if options.prefill else 1),
            "--cores-per-worker": options.cores_per_worker,
            "--devices-per-worker": options.devices_per_worker,
            "--worker-flags": options.worker_flags,
        }
        flags = ["--environment", "local"]
        flags += [text for flag, value in values.items() for text in (flag, str(value))]
        more = shlex.split(options.planner_flags)
        given_flags = {word.partition("=")[0] for word in more}
        flags += more

        def translate(content: dict[str, Any]) -> dict[str, Any]:
            translated = planner_config.translate(content)
            for flag, value in values.items():
                name = flag.removeprefix("--").replace("-", "_")
                if flag not in given_flags and str(translated.get(name, value)) != str(value):
                    raise errors.ConfigError(
                        f"--config: {name}: has no effect, since `dynamo serve` passes {flag} {value}: leave it out, or"
                        f" give {flag} beside --config"
                    )
            return translated

        parts = planner_config.PlannerConfig, planner_config.ScalingConfig
        environ = self._environ
        try:
            self._planner = config.load_parts(
                parts,
                prog=_PLANNER,
                argv=flags,
                environ=environ,
                translate=translate,
            )
        except errors.ConfigError as error:
            raise errors.ConfigError(f"--planner-flags: {error}") from error
        argv = [sys.executable, "-m", "dynamo.planner", *flags]
        return children.ChildSpec(name=_PLANNER, argv=argv, environ=environ)

    def _banner(self) -> str:
        options = self._options
        url = options.url
        join = ""
        if not options.planner:  # it counts the workers that it has started
            words = [f"{key}={shlex.quote(value)}" for key, value in self._variables.items()]
            worker = shlex.join(self.specs[self._topology.answering[0]].argv)
            join = f"  join      {' '.join([*words, worker])}\n"
        started = self._supervisor.child_by_name.items()
        pids = ", ".join(f"{name} {child.pid}" for name, child in started)
        return (
            f"\n{self._name} answers at {url} (in a browser: chat, and what happens inside)\n\n"
            f"  workers   {self._describe_workers()}\n"
            f"  pids      dynamo {os.getpid()}, {pids}\n"
            f"  engine    {options.engine}, model {self._directory}\n"
            f"  namespace {self._registration.state.namespace}\n"
            f"{join}"
            f"  stop      Ctrl-C, or dynamo stop {self._registration.state.name}\n\n"
            f"  {curl_line(url, self._name, self._directory)}\n"
        )

    @property
    def _starts_asleep(self) -> bool:
        return self._planner is not None and not self._planner[1].min_endpoint

    def _describe_workers(self) -> str:
        if self._planner is None:
            return self._topology.describe()
        settings, scaling = self._planner
        asleep = "; the first request starts one" if self._starts_asleep else ""
        address = addresses.join(settings.planner_host, settings.planner_port)
        return (
            f"{scaling.min_endpoint} to {scaling.max_workers}, by load{asleep};"
            f" decisions at http://{address}/planner/decisions"
        )


def frontend_spec(options: ServeConfig, environ: Mapping[str, str]) -> children.ChildSpec:
    flags = ["--http-host", options.http_host, "--http-port", str(options.http_port)]
    flags += shlex.split(options.frontend_flags)
    argv = [sys.executable, "-m", "dynamo.frontend", *flags]
    return children.ChildSpec(name=FRONTEND, argv=argv, environ=environ)


def list_child(registration: state.Registration, child: children.Child) -> None:
    """List a child that was started, with the line that starts it by hand."""
    shell = shell_line(registration, child.spec)
    registration.add_process(state.ProcessState(name=child.spec.name, pid=child.pid, shell=shell))


def shell_line(registration: state.Registration, spec: children.ChildSpec) -> str:
    """Return the line that starts a child by hand."""
    return children.shell_line(
        spec.argv,
        environ=registration.state.variables,
        resources=spec.resources,
        directory=os.getcwd(),
    )


async def supervise(owner: supervisor.Supervisor, work: Awaitable[None]) -> int:
    """Do the work with children of `owner`, which a signal stops; say how it ended, and return the exit code."""
    end, exit_code = "stopped", 0
    async with owner:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            numbers.append(signal.SIGHUP)
        notice = "stopping; running requests finish first (once more: at once)"
        owner.stop_on(numbers, functools.partial(waiting.say, notice))
        try:
            await work
        except children.ChildDied as death:
            end, exit_code = str(death), death.exit_code
    waiting.say(end)
    return exit_code


async def wait_until_answers(
    owner: supervisor.Supervisor,
    clock: clocks.Clock,
    name: str,
    probe: Callable[[], Awaitable[bool]],
    limit_s: float,
) -> bool:
    """Wait until the probe of what the children serve is true; False if a signal came first. Raises ChildDied."""
    progress = waiting.Progress(f"waiting for {name}", limit_s=limit_s, clock=clock)
    try:
        return await owner.wait_until(probe, timeout_s=limit_s, on_wait=progress.show)
    except TimeoutError:
        last_lines = {name: child.last_line for name, child in owner.child_by_name.items()}
        words = "; ".join(f"{child}: {line}" for child, line in last_lines.items() if line)
        raise children.ChildDied(
            f"{name} did not answer within {limit_s:g} s (--ready-timeout); last words: {words or 'none'}"
        ) from None


def curl_line(url: str, model: str, directory: Path) -> str:
    """Return a command to paste into a shell that prints a story, or the vector that a model for embeddings makes."""
    path = "chat/completions"
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 200}
    if model_source.task("auto", directory) == "embed":
        path, fields = "embeddings", {"input": PROMPT}
    body = {"model": model, **fields}
    return (
        f"curl {url}/v1/{path} \\\n"
        f"    -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps(body))}"
    )


async def lists_models(
    host: str, port: int, names: Sequence[str], *, need_workers: bool = True
) -> bool:
    """Return whether the frontend at this address lists these models, or any at all without names.

    A frontend that wants API keys lists nothing without one, but tells whether it is healthy: a worker is ready. That
    is waited for unless no worker needs to run yet, as for models that are loaded by their first request.
    """
    url = f"http://{addresses.join(host, port)}/v1/models"
    try:
        status, answer = await client.request("GET", url, timeout_s=PROBE_TIMEOUT_S)
        if status == http.HTTPStatus.UNAUTHORIZED:
            return not need_workers or await is_healthy(host, port)
        listed = {entry["id"] for entry in msgspec.json.decode(answer)["data"]}
        return listed.issuperset(names) if names else bool(listed)
    except (errors.Unavailable, msgspec.DecodeError, ValueError, KeyError, TypeError):
        return False


async def is_healthy(host: str, port: int) -> bool:
    """Return whether the service at this address says that it is healthy."""
    url = f"http://{addresses.join(host, port)}/health"
    try:
        status, _ = await client.request("GET", url, timeout_s=PROBE_TIMEOUT_S)
    except errors.Unavailable:
        return False
    return status == 200
