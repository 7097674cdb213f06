"""The workers of one command: how many of which kind, and, for `dynamo run`, a runtime in which they can be asked.

They run in this process or elsewhere; either way `dynamo run` gets a runtime in which their endpoint is registered.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynamo.base import config, errors
from dynamo.cli import waiting
from dynamo.engine import api
from dynamo.engine.mock import settings as mock_settings
from dynamo.protocols import generate, instances, model_card
from dynamo.runtime import component
from dynamo.transfer.backends import local
from dynamo.worker import engines, main, model_source, settings

REMOTE_PREFIX = "dyn://"
AUTO = "auto"  # the workers that discovery shows
ECHO_CORE, ECHO_FULL = "echo_core", "echo_full"
_LAST_MESSAGE = "{{ messages[-1]['content'] }}"
Mode = Literal["agg", "prefill", "decode"] | None  # the value of --disaggregation-mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`num_prefill` workers compute long prompts for the `num_answering` others."""

    num_answering: int = 1
    num_prefill: int = 0

    @property
    def modes(self) -> dict[str, Mode]:
        """The mode of each worker, by name; prefill workers first, so that the others find them."""
        mode: Mode = "decode" if self.num_prefill else None
        modes: dict[str, Mode] = {
            f"prefill worker {n + 1}": "prefill" for n in range(self.num_prefill)
        }
        return modes | dict.fromkeys(self.answering, mode)

    @property
    def answering(self) -> list[str]:
        """The names of the workers that clients' requests go to."""
        kind = "decode worker" if self.num_prefill else "worker"
        return [f"{kind} {n + 1}" for n in range(self.num_answering)]

    def describe(self) -> str:
        """Describe the topology in one line."""
        if not self.num_prefill:
            return (
                f"aggregated: {_count(self.num_answering, 'worker')}, computing prompts and answers"
            )
        return (
            f"disaggregated: long prompts are computed by {_count(self.num_prefill, 'prefill worker')},"
            f" answers by {_count(self.num_answering, 'decode worker')}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoConfig(mock_settings.MockConfig):
    """The simulated engine as `out=echo_core` and `out=echo_full` have it."""

    echo: bool = config.option(True, help="answer each request with its own prompt")
    tick_ms: float | None = config.option(
        10.0, env="DYN_TOKEN_ECHO_DELAY_MS", help="milliseconds between two tokens", least=0
    )


def is_remote(target: str) -> bool:
    """Return whether the target (`out=...`) names workers that run elsewhere."""
    return target == AUTO or target.startswith(REMOTE_PREFIX)


def endpoint_of(target: str) -> instances.EndpointName | None:
    """Return the endpoint of a target's workers, None where discovery shows it. Raises ConfigError."""
    if target == AUTO:
        return None
    if is_remote(target):
        return instances.EndpointName.parse(target)
    try:
        engines.kind_of(engine_of(target))
    except errors.ConfigError as error:
        raise errors.ConfigError(
            f"out={target}: {error}; also {ECHO_CORE}, {ECHO_FULL}, {AUTO} and {REMOTE_PREFIX}..."
        ) from error
    return settings.WorkerConfig().endpoint_name


def engine_of(target: str) -> str:
    """Return the name of the engine that serves a target in this process."""
    return "mocker" if target in (ECHO_CORE, ECHO_FULL) else target


def find_model(target: str, model: str | None, context_length: int | None = None) -> Path:
    """Return the directory of a model for a target of this process, downloaded if it is missing.

    Raises ConfigError, before the download for an engine that is not installed or does not take `context_length`.
    """
    _engine_settings(target, context_length)
    engines.check_installed(engine_of(target))
    return engines.find_model(engine_of(target), model)


def serves(card: model_card.ModelCard, model: str | None) -> bool:
    """Return whether a worker with this card answers for a model; None: for any."""
    return model in (None, card.display_name, *card.aliases)


async def find_endpoint(
    runtime: component.DistributedRuntime, target: str, model: str | None
) -> instances.EndpointName:
    """Return the endpoint to ask: of `auto`, one that serves this model, or any. Raises NoWorkers."""
    if (endpoint := endpoint_of(target)) is not None:
        return endpoint
    stored = await runtime.discovery.get_prefix(instances.CARDS)
    records = [msgspec.json.decode(each, type=model_card.CardRecord) for each in stored.values()]
    for record in records:
        is_prefill = record.card_json.worker_type is model_card.WorkerType.PREFILL
        if serves(record.card_json, model) and not is_prefill:
            return instances.EndpointName(record.namespace, record.component, record.endpoint)
    served = ", ".join(sorted({record.card_json.display_name for record in records})) or "no model"
    raise errors.NoWorkers(
        f"no worker serves {model or 'a model'} ({served} is served); start one: python -m dynamo.native"
    )


@contextlib.asynccontextmanager
async def join(
    target: str,
    worker: settings.WorkerConfig,
    topology: Topology,
    context_length: int | None = None,
) -> AsyncIterator[component.DistributedRuntime]:
    """Open a runtime in which the target's workers are registered; starts them unless they are remote.

    `context_length` is the longest request that those can serve. Raises ConfigError, EngineFailed or NoWorkers.
    """
    if is_remote(target):
        if topology != Topology() or context_length is not None:
            raise errors.ConfigError(
                "--prefill, --decode and --context-length are for workers that start here, but"
                f" out={target} asks those that run elsewhere"
            )
        planes = config.load(component.RuntimeConfig, prog="dynamo run", argv=())
        async with await component.DistributedRuntime.open(
            planes, item_type=generate.Output
        ) as runtime:
            endpoint = endpoint_of(target)
            path = f"{endpoint.path}/" if endpoint is not None else None
            if path and not await runtime.discovery.get_prefix(f"{instances.CARDS}{path}"):
                raise errors.NoWorkers(
                    f"no worker serves {target}; start one there: "
                    f"python -m dynamo.native --endpoint {target}"
                )
            yield runtime
        return
    memory = component.MemoryCluster()
    async with (
        await component.DistributedRuntime.in_memory(memory, item_type=generate.Output) as runtime,
        contextlib.AsyncExitStack() as stack,
    ):
        engine_settings = _engine_settings(target, context_length)
        directory = find_model(target, worker.model)
        if target == ECHO_FULL:
            directory = stack.enter_context(_with_template(directory, _LAST_MESSAGE))
        room = local.Room() if topology.num_prefill else None
        name = worker.model_name or model_source.display_name(worker.model)
        with waiting.say_regularly(lambda: f"loading {name}; Ctrl-C gives up"):
            for mode in topology.modes.values():
                engine = engines.build(
                    engine_of(target), directory, engine_settings, model_name=name, room=room
                )
                in_mode = dataclasses.replace(worker, disaggregation_mode=mode)
                await stack.enter_async_context(_serve(in_mode, engine, runtime, directory))
        yield runtime


def _engine_settings(target: str, context_length: int | None) -> Any:
    """Return the settings of the engine that serves a target in this process. Raises ConfigError."""
    name = engine_of(target)
    values: Any = (
        engines.settings_of(name)()
        if name == target
        else config.load(EchoConfig, prog="dynamo run", argv=())
    )
    if context_length is None:
        return values
    if not hasattr(values, "max_model_len"):
        raise errors.ConfigError(
            f"--context-length: out={target} does not take it in this process; start a worker with the engine's"
            f" own flag, and ask it with out=auto: python -m dynamo.{name}"
        )
    return dataclasses.replace(values, max_model_len=context_length)


@contextlib.asynccontextmanager
async def _serve(
    worker: settings.WorkerConfig,
    engine: api.Engine,
    runtime: component.DistributedRuntime,
    directory: Path,
) -> AsyncIterator[None]:
    """Serve one worker in this process, as an instance of its own."""
    sibling = runtime.sibling()
    host = main.make_host(worker, engine, sibling, directory)
    try:
        await host.start()
        yield
    finally:
        await host.stop(0)
        await sibling.close()


@contextlib.contextmanager
def _with_template(directory: Path, chat_template: str) -> Iterator[Path]:
    """Yield a directory with the files of a model and another chat template."""
    with tempfile.TemporaryDirectory() as folder:
        for path in directory.iterdir():
            if path.name != "chat_template.jinja":
                Path(folder, path.name).symlink_to(path.resolve())
        Path(folder, "chat_template.jinja").write_text(chat_template)
        yield Path(folder)
