"""What a worker is told, whichever engine it hosts; the engine's own settings stand beside it on the command line."""

from dataclasses import dataclass
from typing import Literal

from dynamo.base import config
from dynamo.preprocess import infill
from dynamo.preprocess.parsers import formats
from dynamo.protocols import instances
from dynamo.runtime import component
from dynamo.worker import system


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(component.RuntimeConfig):
    """Serve one model by one engine, to every frontend that finds this worker through discovery."""

    model: str | None = config.option(
        None,
        flag="--model",
        aliases=("--model-path",),
        help="model directory or hub name; without it, the built-in model",
    )
    model_name: str | None = config.option(
        None,
        aliases=("--served-model-name",),
        help="what clients call the model (default: the directory's name, or the hub name)",
    )
    task: Literal["auto", "generate", "embed"] = config.option(
        "auto",
        help="what the model is for; auto: embed if it is an encoder or has a modules.json, else generate",
    )
    endpoint: str | None = config.option(
        None, help="where to serve (default: dyn://NAMESPACE.backend.generate, or ….embed)"
    )
    dyn_tool_call_parser: str | None = config.option(
        None,
        env="DYN_TOOL_CALL_PARSER",
        help="how the model writes tool calls, or none (default: what its chat template speaks of)",
    )
    dyn_reasoning_parser: str | None = config.option(
        None,
        env="DYN_REASONING_PARSER",
        help="how the model writes reasoning, or none (default: what its chat template speaks of)",
    )
    dyn_infill_format: str | None = config.option(
        None,
        env="DYN_INFILL_FORMAT",
        help="how the model is asked to fill in between prompt and suffix, or none (default: it cannot)",
    )
    engine_request_limit: int = config.option(
        1024, help="requests that may run or wait here; more are refused as overload", least=1
    )
    graceful_shutdown_timeout_s: float = config.option(
        30.0,
        env="DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT",
        flag="--graceful-shutdown-timeout",
        help="seconds that running requests get to finish after SIGTERM",
        least=0,
    )
    system_host: str = config.option(
        "127.0.0.1", env="DYN_SYSTEM_HOST", help="address of /live, /health and /metrics"
    )
    system_port: int = config.option(
        system.PORT_DISABLED,
        env="DYN_SYSTEM_PORT",
        help="port of /live, /health and /metrics; -1 for none, 0 for any",
        least=system.PORT_DISABLED,
        most=65535,
    )

    def check(self) -> None:
        """Raises ConfigError for parsers and formats that are not known."""
        infill.check(self.dyn_infill_format)
        formats.check(self.dyn_tool_call_parser, self.dyn_reasoning_parser)

    @property
    def endpoint_name(self) -> instances.EndpointName:
        """Where to serve. Raises ConfigError."""
        return self.endpoint_for("generate")

    def endpoint_for(self, task: str) -> instances.EndpointName:
        """Where to serve this task. Raises ConfigError."""
        return instances.EndpointName.parse(
            self.endpoint or f"dyn://{self.namespace}.backend.{task}"
        )
