"""The commands that a graph becomes: a pure function of its services, the configuration and the machine."""  # decider

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.base import errors
from dynamo.launch import allocation, children
from dynamo.sdk import declaration, settings

_UNITS = {"m": 0.001}
_MOST = 10_000  # processes of a service, cores or GPUs: the plan of a billion fills the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCommand:
    """One process: all that is needed to start it alone."""

    name: str  # of the process; several processes of a service have numbers
    service: str
    num_devices: int  # asked for, whatever this machine has
    pod_requests: Mapping[str, str]  # cores and memory asked for, in Kubernetes' quantities
    argv: tuple[str, ...]
    directory: str
    environ: Mapping[str, str]  # beside the environment of the shell
    resources: allocation.Allocation

    def shell(self) -> str:
        """Return a line to paste into a shell, which runs this process alone in the same graph."""
        return children.shell_line(
            self.argv,
            environ=self.environ,
            resources=self.resources,
            directory=self.directory,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """The commands of a graph, workers first, and what is to be said of it."""

    commands: tuple[ServiceCommand, ...]
    notes: tuple[str, ...]
    idle: tuple[ServiceCommand, ...] = ()  # of services that start no process now, one each


def make(
    specs: Sequence[declaration.DeclaredService],
    config: settings.ServiceConfig,
    machine: allocation.Allocation,
    *,
    target: str,
    directory: str,
    namespace: str,
    environ: Mapping[str, str],
) -> GraphPlan:
    """Return the commands of these services; `environ` is what the graph adds to each. Raises ConfigError."""
    config = settings.with_defaults(config, specs)
    plans = [_of_service(spec, config) for spec in specs]
    notes = [
        f"{spec.name} runs inside {spec.inside}: it has no process of its own"
        for spec in specs
        if spec.inside
    ]
    notes += [
        f"{plan.spec.name} starts no process: its workers are 0"
        for plan in plans
        if not plan.workers
    ]
    wants_cores = sum(plan.workers * plan.num_cores for plan in plans)
    wants_devices = sum(plan.workers * plan.num_devices for plan in plans)
    pins = 0 < wants_cores <= len(machine.cores)
    if wants_cores and not pins:
        notes.append(f"{wants_cores} cores are asked for, {len(machine.cores)} are here: all share")
    if wants_devices and not machine.devices:
        notes.append(f"{wants_devices} GPUs are asked for, none is here: all run on the CPU")
    allocator = allocation.Allocator(machine)
    variables = {**environ, settings.VARIABLE: json.dumps(config, sort_keys=True)}
    commands: list[ServiceCommand] = []
    idle: list[ServiceCommand] = []
    for plan in plans:
        if plan.spec.inside:
            continue
        argv = _argv(plan.spec, config, target)
        for number in range(1, max(plan.workers, 1) + 1):
            resources = allocator.acquire(
                num_cores=plan.num_cores if pins and plan.workers else 0,
                num_devices=plan.num_devices if machine.devices and plan.workers else 0,
            )
            command = ServiceCommand(
                name=f"{plan.spec.name} {number}" if plan.workers > 1 else plan.spec.name,
                service=plan.spec.name,
                num_devices=plan.num_devices,
                pod_requests=plan.pod_requests,
                argv=tuple(argv),
                directory=directory,
                environ={**variables, "DYN_NAMESPACE": namespace, **plan.environ},
                resources=resources,
            )
            (commands if plan.workers else idle).append(command)
    return GraphPlan(commands=tuple(commands), notes=tuple(notes), idle=tuple(idle))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServicePlan:
    spec: declaration.DeclaredService
    workers: int
    num_cores: int
    num_devices: int
    pod_requests: Mapping[str, str]
    environ: Mapping[str, str]


def _of_service(spec: declaration.DeclaredService, config: settings.ServiceConfig) -> _ServicePlan:
    args = config.process_settings(spec.name)
    resources = {**spec.resources, **(args.get("resources") or {})}
    return _ServicePlan(
        spec=spec,
        workers=_number(spec, "workers", args.get("workers", spec.workers)),
        num_cores=_number(spec, "resources.cpu", resources.get("cpu", 0)),
        num_devices=_number(spec, "resources.gpu", resources.get("gpu", 0)),
        pod_requests={key: str(resources[key]) for key in ("cpu", "memory") if resources.get(key)},
        environ={key: str(value) for key, value in (args.get("environment") or {}).items()},
    )


def _number(spec: declaration.DeclaredService, field: str, value: Any) -> int:
    """Return a count of workers, cores (`2`, `"500m"`) or GPUs, rounded down. Raises ConfigError."""
    text = str(value)
    try:
        number = float(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= _MOST:  # nan is neither
        raise errors.ConfigError(
            f"{spec.file}, {spec.name}, {field}: expected a number of 0 to {_MOST:,}, got {value!r}"
        )
    return int(number)


def _argv(
    spec: declaration.DeclaredService, config: settings.ServiceConfig, target: str
) -> Sequence[str]:
    module = config.process_settings(spec.name).get("module", spec.module)
    if module is None:
        return (sys.executable, "-m", "dynamo.sdk", target, "--service-name", spec.name)
    arguments = getattr(spec.cls, "arguments", None)
    flags = arguments(config) if arguments is not None else config.as_args(spec.name)
    return (sys.executable, "-m", module, *flags)
