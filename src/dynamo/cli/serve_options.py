"""The options of `dynamo serve MODEL`."""

import dataclasses
import shlex
from dataclasses import dataclass

from dynamo.base import addresses, config, errors
from dynamo.cli import workers as cli_workers

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # by what stands for all addresses of a host
_OF_SEVERAL = ("memory_budget_gb", "pin", "idle_minutes")
# Flags of processes that the command sets, by the option that would pass another value on.
_SET_HERE = {
    "frontend_flags": ("--http-host", "--http-port"),
    "worker_flags": ("--model", "--model-path", "--model-name", "--served-model-name"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """HTTP API."""

    http_port: int = config.setting(8000, help="port of the API", least=1, most=65535)
    http_host: str = config.setting(
        "127.0.0.1", help="address of the API; 0.0.0.0 to serve other machines, too"
    )

    def __post_init__(self) -> None:
        host = self.http_host.removeprefix("[").removesuffix("]")  # of an IPv6 address
        object.__setattr__(self, "http_host", host)

    @property
    def url(self) -> str:
        """The address of the API on this machine."""
        host = _LOOPBACK.get(self.http_host, self.http_host)
        return f"http://{addresses.join(host, self.http_port)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(HttpConfig):
    """Locally serve a model, or a graph of services (module:Class)."""

    models: tuple[str, ...] = config.option(
        (),
        flag="",
        help="model directory, GGUF file, or name on the Hugging Face hub; without it, the built-in model; of several,"
        " each is loaded when a request comes for it. module:Class is a graph, whose flags"
        " `dynamo serve module:Class --help` shows",
    )
    model_name: str | None = config.option(
        None,
        help="name under which clients ask for the model (default: the directory's or hub name)",
    )
    engine: str | None = config.option(
        None,
        help="engine of the workers: native, mocker, vllm, llamacpp … (default: native; llamacpp for a GGUF file)",
    )
    workers: int = config.option(
        1,
        aliases=("--decode",),
        help="worker processes that answer; more than one needs as many GPUs, or cores",
        least=1,
    )
    prefill: int = config.option(
        0, help="further worker processes that compute long prompts for the others", least=0
    )
    cores_per_worker: int = config.option(
        0, help="CPU cores that each worker gets for itself; 0: all workers share all", least=0
    )
    devices_per_worker: int = config.option(
        0,
        help="GPUs that each worker gets for itself, by CUDA_VISIBLE_DEVICES; 0: all workers see all",
        least=0,
    )
    worker_flags: str = config.option(
        "",
        help='more flags for each worker, as one argument: "--max-num-seqs 64"',
        takes="text",
    )
    frontend_flags: str = config.option(
        "",
        help='more flags for the frontend, as one argument: "--router-mode kv"',
        takes="text",
    )
    planner: bool = config.option(
        False, help="let a planner start and drain workers by their load (docs/planner.md)"
    )
    planner_min_workers: int = config.option(
        1, help="least workers with --planner; 0: none while nobody asks", least=0
    )
    planner_max_workers: int = config.option(4, help="most workers with --planner", least=1)
    planner_flags: str = config.option(
        "",
        help='more flags for the planner, as one argument: "--policy predictive --ttft 300"',
        takes="text",
    )
    memory_budget_gb: float | None = config.option(
        None,
        help="with several models: gigabytes that the loaded ones may take together (default: 80 % of what is free)",
        least=0,
    )
    pin: tuple[str, ...] = config.option(
        (), help="with several models: a model that stays loaded, by its name"
    )
    idle_minutes: float = config.option(
        5.0,
        help="with several models: minutes without a request after which one is unloaded",
        least=0,
    )
    dry_run: bool = config.option(
        False, help="print the commands of the processes, and start nothing"
    )
    ready_timeout: float = config.option(
        300.0, help="seconds to wait until the model answers; more for a large model", least=0
    )

    @property
    def model(self) -> str | None:
        """The only model; None: the built-in one."""
        return self.models[0] if self.models else None

    @property
    def topology(self) -> cli_workers.Topology:
        return cli_workers.Topology(num_answering=self.workers, num_prefill=self.prefill)

    def check_passed_on(self) -> None:
        """Raise ConfigError for a flag of a process with which this command would ask for another port or model."""
        for name, flags in _SET_HERE.items():
            for word in shlex.split(getattr(self, name)):
                if (flag := word.partition("=")[0]) in flags:
                    raise errors.ConfigError(
                        f"--{name.replace('_', '-')}: {flag}: is set by `dynamo serve` itself, whose own argument"
                        " MODEL, --model-name, --http-host or --http-port says it"
                    )

    def check_single(self) -> None:
        """Raise ConfigError for a flag that has an effect with several models only."""
        for field in dataclasses.fields(self):
            if field.name in _OF_SEVERAL and getattr(self, field.name) != field.default:
                flag = f"--{field.name.replace('_', '-')}"
                raise errors.ConfigError(f"{flag}: expected several models, got one")

    def check_planner(self) -> None:
        """Raise ConfigError for flags without effect beside a planner, or without one, and for contradicting limits."""
        least, most = self.planner_min_workers, self.planner_max_workers
        if self.planner and self.workers > 1:
            raise errors.ConfigError(
                "--workers: has no effect with --planner; expected --planner-min-workers and --planner-max-workers"
            )
        if self.planner and least > most:
            raise errors.ConfigError(
                f"--planner-min-workers {least}: expected at most --planner-max-workers {most}"
            )
        for field in dataclasses.fields(self):
            is_set = getattr(self, field.name) != field.default
            if field.name.startswith("planner_") and is_set and not self.planner:
                flag = f"--{field.name.replace('_', '-')}"
                raise errors.ConfigError(f"{flag}: has no effect without --planner")
