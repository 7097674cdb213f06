"""`dynamo serve graphs.agg:Frontend -f configs/agg.yaml`: the processes of a graph of services, supervised.

The services only say which commands there are (`sdk.commands`); this module prints them (`--dry-run`), starts them
through `launch`, and restarts one that dies. Nothing reaches a process that is not printed, but for DYN_LAUNCH_TOKENS,
by which its guard finds it.
"""

import argparse
import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo.base import clock as clocks
from dynamo.base import config, distribution, draining, errors
from dynamo.cli import serve, serve_options, waiting
from dynamo.launch import allocation, children, guard, state, supervisor
from dynamo.protocols import instances
from dynamo.sdk import commands, declaration, graph, settings

_LOOK_S = 1.0  # until it is looked again whether the joined `dynamo serve` runs


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """Start the services of a graph, and supervise them."""

    target: str = config.option(flag="", help="the graph: module:Class, or file.py:Class")
    file: str | None = config.option(
        None, aliases=("-f",), help="YAML file with a section for each service"
    )
    service_name: str | None = config.option(
        None, help="start this one of the graph's services only"
    )
    working_dir: str = config.option(
        ".", help="directory from which the graph's module is imported"
    )
    dry_run: bool = config.option(False, help="print the commands, and start nothing")
    namespace: str | None = config.setting(
        None, help="namespace of the endpoints (default: the decorator's, or dynamo)"
    )
    join: str | None = config.option(
        None,
        help="take part in the `dynamo serve` of this name (`dynamo ps` lists them), and end when it has ended",
    )
    ready_timeout: float = config.option(
        600.0, help="seconds to wait until the graph answers; more for a large model", least=0
    )
    overrides: tuple[str, ...] = config.rest(
        help="--Service.key=value sets a value of a service, --Service.ServiceArgs.workers=2 the number of processes."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedGraph:
    """A graph with its configuration."""

    specs: Sequence[declaration.DeclaredService]
    values: settings.ServiceConfig
    directory: Path
    notes: Sequence[str]  # on the configuration

    @property
    def namespaces(self) -> list[str]:
        """The namespaces that the decorators or the file name; the services are all in the first one."""
        args = [self.values.process_settings(spec.name).get("dynamo") or {} for spec in self.specs]
        names = [
            str(own.get("namespace") or spec.namespace or "")
            for own, spec in zip(args, self.specs, strict=True)
        ]
        return list(filter(None, dict.fromkeys(names))) or ["dynamo"]

    def address_in(self, plan: commands.GraphPlan) -> serve_options.HttpConfig | None:
        """Return where the first service answers HTTP, if it does and is started. Raises ConfigError."""
        started = [each for each in plan.commands if each.service == self.specs[0].name]
        address = self._address_of(started[0]) if started else None
        if address is not None and len(started) > 1:
            raise errors.ConfigError(
                f"{started[0].service}.ServiceArgs.workers: expected 1, because each would listen at port"
                f" {address.http_port}, got {len(started)}"
            )
        return address

    def _address_of(self, command: commands.ServiceCommand) -> serve_options.HttpConfig | None:
        root = self.specs[0]
        if root.module == "dynamo.frontend":
            environ = {**os.environ, **command.environ}
            serve.check_no_tls(command.argv, environ)
            flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            flags.add_argument("--http-port", default=environ.get("DYN_HTTP_PORT", "8000"))
            flags.add_argument("--http-host", default=environ.get("DYN_HTTP_HOST", "127.0.0.1"))
            found = flags.parse_known_args(command.argv)[0]
            port = settings.read_port(root.name, {"port": found.http_port})
            return serve_options.HttpConfig(http_host=found.http_host, http_port=port)
        if root.methods("api"):
            section = settings.with_defaults(self.values, [root]).section(root.name)
            port = settings.read_port(root.name, section)
            return serve_options.HttpConfig(
                http_host=str(section.get("host", "127.0.0.1")), http_port=port
            )
        return None


def load(options: GraphConfig) -> LoadedGraph:
    """Import the graph and read its configuration. Raises ConfigError."""
    directory = Path(options.working_dir).resolve()
    values = settings.ServiceConfig()
    if options.file is not None:
        reader = distribution.load_extra(
            "dynamo.sdk.yaml_file", feature="a configuration in YAML", extra="sdk"
        )
        values = settings.ServiceConfig(reader.read(Path(options.file)))
    elif settings.VARIABLE in os.environ:
        values = settings.ServiceConfig.get_instance()
    specs = graph.load(options.target, directory)
    names = [spec.name for spec in specs]
    settings.ServiceConfig().with_overrides(options.overrides).check_names(
        names, "the command line"
    )
    # A file may serve several graphs, and has then sections of services that this one has not.
    of_others = [name for name in values if options.file and name not in (*names, settings.COMMON)]
    values = values.with_overrides(options.overrides)
    values.check_names([*names, *of_others], options.file or settings.VARIABLE)
    notes = [f"{options.file}: this graph has no service {name}" for name in of_others]
    loaded = LoadedGraph(specs=specs, values=values, directory=directory, notes=notes)
    if options.namespace is None and options.join is None and loaded.namespaces[1:]:
        notes.append(f"namespaces {', '.join(loaded.namespaces)}: all services are in the first")
    return loaded


def run(options: GraphConfig) -> int:
    """Serve until a signal comes, or print the commands; return the exit code. Raises ConfigError."""
    loaded = load(options)
    chosen = loaded.specs
    if options.service_name is not None:
        chosen = [graph.find(loaded.specs, options.service_name)]
    requested_namespace = options.namespace or loaded.namespaces[0]
    if not instances.is_name(requested_namespace):
        raise errors.ConfigError(
            f"namespace: expected a name of a-z, 0-9, - and _, got {requested_namespace!r}"
        )
    joined = _find_joined(options)
    with (
        state.registered(requested_namespace, options.target) as registration,
        guard.Guard() as guardian,
    ):
        name = registration.state.name
        environ = dict(joined.variables) if joined else serve.plane_variables()
        if not joined and serve.DISCOVERY not in environ:
            environ[serve.DISCOVERY] = str(
                state.directory() / f"{name}.discovery"
                if options.dry_run
                else guardian.make_folder("dynamo-serve-") / "discovery"
            )
        discovery = environ.get(serve.DISCOVERY)
        namespace = (
            joined.namespace if joined else serve.free_namespace(registration, name, discovery)
        )
        plan = commands.make(
            chosen,
            loaded.values,
            children.machine_resources(os.environ),
            target=options.target,
            directory=str(loaded.directory),
            namespace=namespace,
            environ=environ,
        )
        if not plan.commands:
            raise errors.ConfigError(
                f"nothing to start: {'; '.join(plan.notes)}; expected a service with a process"
            )
        notes = [*loaded.notes, *plan.notes]
        address = loaded.address_in(plan)
        if options.dry_run:
            for note in notes:
                print(f"# {note}")
            for command in plan.commands:
                print(f"# {command.name}\n{command.shell()}\n")
            return 0
        if address is not None:
            other = f"--{loaded.specs[0].name}.port=..."
            serve.check_port(address.http_host, address.http_port, other=other)
        for note in notes:
            waiting.say(note)
        variables = environ | {serve.NAMESPACE: namespace}
        registration.update(namespace=namespace, variables=variables)
        serving = _Serving(options, plan, registration, address, guardian, joined)
        with state.logged(name):
            return asyncio.run(serving.run(loaded.specs[0]))


def _find_joined(options: GraphConfig) -> state.ServeState | None:
    """Return the `dynamo serve` in which this one takes part, if any. Raises ConfigError for a namespace of its own."""
    if options.join is None:
        return None
    joined = state.find(options.join)
    if options.namespace not in (None, joined.namespace):
        raise errors.ConfigError(
            f"--namespace: expected none beside --join, or {joined.namespace}, which {joined.name} has,"
            f" got {options.namespace}"
        )
    return joined


class _Serving:
    """One run of the command."""

    def __init__(
        self,
        options: GraphConfig,
        plan: commands.GraphPlan,
        registration: state.Registration,
        address: serve_options.HttpConfig | None,
        guardian: guard.Guard,
        joined: state.ServeState | None = None,
    ) -> None:
        self._options, self._plan = options, plan
        self._registration, self._address = registration, address
        self._joined = joined
        self._clock = clocks.SystemClock()
        self._shells = {command.name: command.shell() for command in plan.commands}
        stop_timeout_s = max(
            draining.stop_timeout_s(
                command.argv, {**os.environ, **command.environ}, command.directory
            )
            for command in plan.commands
        )
        registration.update(stop_timeout_s=stop_timeout_s)
        self._supervisor = supervisor.Supervisor(
            guardian,
            self._clock,
            waiting.say,
            stop_timeout_s=stop_timeout_s,
            on_start=self._list_child,
        )

    async def run(self, root: declaration.DeclaredService) -> int:
        """Start all, wait until the graph answers, supervise; return the exit code."""
        return await serve.supervise(self._supervisor, self._serve(root))

    async def _serve(self, root: declaration.DeclaredService) -> None:
        """Start, wait until the first service answers, supervise. Raises ChildDied."""
        if self._joined is not None:
            self._supervisor.run_beside("watch what it joined", self._end_with(self._joined))
        for command in self._plan.commands:
            child = children.ChildSpec(
                name=command.name,
                argv=command.argv,
                environ={**os.environ, **command.environ},
                directory=command.directory,
                resources=command.resources,
            )
            await self._supervisor.start(child)

        address = self._address
        service = self._plan.commands[0].service if address is None else root.name

        async def probe() -> bool:
            if address is None:
                return True
            if root.module is None:
                return await serve.is_healthy(address.http_host, address.http_port)
            return await serve.lists_models(address.http_host, address.http_port, ())

        if await serve.wait_until_answers(
            self._supervisor, self._clock, service, probe, self._options.ready_timeout
        ):
            self._announce(root)
            for command in self._plan.commands:
                self._supervisor.watch(command.name)
            await self._supervisor.run()

    async def _end_with(self, joined: state.ServeState) -> None:
        """End when another `dynamo serve` has ended: discovery and frontend were its own, so nothing is asked here."""
        while state.is_alive(joined):
            await self._clock.sleep(_LOOK_S)
        reason = f"stopped: {joined.name}, the `dynamo serve` that this one joined, has ended"
        self._supervisor.end(children.ChildDied(reason, exit_code=0))

    def _list_child(self, child: children.Child) -> None:
        name = child.spec.name
        self._registration.add_process(
            state.ProcessState(name=name, pid=child.pid, shell=self._shells[name])
        )

    def _announce(self, root: declaration.DeclaredService) -> None:
        """Show in the state, and print, where the graph answers."""
        url = "" if self._address is None else self._address.url
        self._registration.update(url=url)
        name, namespace = self._registration.state.name, self._registration.state.namespace
        started = self._supervisor.child_by_name
        pids = ", ".join(f"{child.spec.name} {child.pid}" for child in started.values())
        single = root.name if url else None  # its port is taken
        machine = children.machine_resources(os.environ)
        more = [
            f"  one more  {line}\n"
            for line in join_lines(self._options, self._plan, machine, name, single)
        ]
        print(
            f"\n{self._options.target} {'answers at ' + url if url else 'runs'}\n\n"
            f"  namespace {namespace}\n"
            f"  pids      dynamo {os.getpid()}, {pids}\n"
            f"  commands  dynamo ps -v {name}\n"
            f"{''.join(more)}"
            f"  stop      Ctrl-C, or dynamo stop {name}\n",
            flush=True,
        )


def join_lines(
    options: GraphConfig,
    plan: commands.GraphPlan,
    machine: allocation.Allocation,
    name: str,
    single: str | None,
) -> Iterator[str]:
    """Yield a line to paste for each service that can have one more process in the graph called `name`.

    `single` is the service that cannot, and one without enough free devices of `machine` cannot either.
    """
    taken = {device for command in plan.commands for device in command.resources.devices}
    free = [device for device in machine.devices if device not in taken]
    names = [state.HOME_VARIABLE] if options.file else [state.HOME_VARIABLE, settings.VARIABLE]
    for service, command in {command.service: command for command in plan.commands}.items():
        num_devices = len(command.resources.devices)
        if service == single or num_devices > len(free):
            continue
        words = ["dynamo", "serve", options.target, "--service-name", service, "--join", name]
        words += ["-f", options.file] if options.file else []
        words += ["--working-dir", options.working_dir] if options.working_dir != "." else []
        flag = f"--{service}.ServiceArgs.workers=1"
        yield children.shell_line(
            [*words, *(word for word in options.overrides if word != flag), flag],
            environ={name: os.environ[name] for name in names if name in os.environ},
            resources=allocation.Allocation(devices=tuple(free[:num_devices])),
            directory=os.getcwd(),
        )
