"""What a worker is told, whichever engine it hosts; the engine's own settings stand beside it on the command line."""

from dataclasses import dataclass
from typing import Literal

from dynamo.base import config, errors
from dynamo.disagg import policy
from dynamo.preprocess import infill
from dynamo.preprocess.parsers import formats
from dynamo.protocols import instances
from dynamo.runtime import component
from dynamo.worker import canary, system


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
        None,
        help="where to serve (default: dyn://NAMESPACE.backend.generate, ….prefill.generate, or ….backend.embed)",
    )
    is_prefill_worker: bool = config.option(
        False, help="compute prompts for decode workers; the same as --disaggregation-mode prefill"
    )
    disaggregation_mode: Literal["agg", "prefill", "decode"] | None = config.option(
        None,
        help="agg: compute all prompts here; prefill: only compute prompts, for others; decode: have long prompts"
        " computed by prefill workers, by shared memory where they are on this host; by default, as decode but without"
        " memory that is made ready for it",
    )
    prefill_endpoint: str | None = config.option(
        None, help="where prefill workers serve (default: dyn://NAMESPACE.prefill.generate)"
    )
    disagg_policy: Literal["lengths", "estimated"] = config.option(
        "lengths",
        help="who computes a prompt, here or a prefill worker; lengths: by the two numbers below; estimated: by what"
        " delays this prompt and the answers that are being written here least",
    )
    max_local_prefill_length: int | None = config.option(
        None,
        help="prompt tokens, without the known prefix, that are always computed here; discovery can change it"
        f" (default: {policy.MAX_LOCAL_PREFILL_LENGTH}; with vLLM 0, as NVIDIA Dynamo has it)",
        least=0,
    )
    max_prefill_queue_size: int = config.option(
        policy.MAX_PREFILL_QUEUE_SIZE,
        help="prompts that may wait at a prefill worker before more are computed here; discovery can change it",
        least=0,
    )
    prefill_queue: Literal["direct", "queue"] = config.option(
        "direct",
        env="DYN_PREFILL_QUEUE",
        help="how prompts get to prefill workers, said to both sides: each to one of them, or through a queue in NATS"
        " (JetStream) from which all of them take",
    )
    prefill_timeout_s: float = config.option(
        30.0, help="seconds that a prompt may take elsewhere before it is computed here", least=0.01
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
    migration_limit: int | None = config.option(
        None,
        env="DYN_MIGRATION_LIMIT",
        help="how often a request may go on at another worker, if less often than the frontend says",
        least=0,
    )
    graceful_shutdown_timeout_s: float = config.option(
        30.0,
        env="DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT",
        flag="--graceful-shutdown-timeout",
        help="seconds that running requests get to finish after SIGTERM",
        least=0,
    )
    grace_period_s: float = config.option(
        0.0,
        env="DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
        flag="--graceful-shutdown-grace-period",
        help="seconds after SIGTERM in which new requests of frontends that have not noticed are still taken;"
        " without, they are told to ask another worker, and do",
        least=0,
    )
    health_check_enabled: bool = config.option(
        False,
        env="DYN_HEALTH_CHECK_ENABLED",
        help="ask an engine that is quiet for a token; one that does not answer ends this worker",
    )
    canary_wait_time: float = config.option(
        10.0, env="DYN_CANARY_WAIT_TIME", help="seconds of quiet until it is asked", least=0.1
    )
    health_check_request_timeout: float = config.option(
        3.0,
        env="DYN_HEALTH_CHECK_REQUEST_TIMEOUT",
        help="seconds that it then has to answer",
        least=0.1,
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
        """Raises ConfigError for parsers and formats that are not known, and for two roles at once."""
        if self.is_prefill_worker and self.disaggregation_mode not in (None, "prefill"):
            raise errors.ConfigError(
                f"--is-prefill-worker and --disaggregation-mode {self.disaggregation_mode}: expected one of the two"
            )
        infill.check(self.dyn_infill_format)
        formats.check_names(self.dyn_tool_call_parser, self.dyn_reasoning_parser)

    @property
    def patience(self) -> canary.Patience | None:
        """With an engine that does not answer; None: it is never asked."""
        if not self.health_check_enabled:
            return None
        return canary.Patience(
            wait_s=self.canary_wait_time, answer_s=self.health_check_request_timeout
        )

    @property
    def endpoint_name(self) -> instances.EndpointName:
        """Where to serve. Raises ConfigError."""
        if self.endpoint is None and self.is_prefill:
            return self.prefill_endpoint_name
        return self.endpoint_for("generate")

    def endpoint_for(self, task: str) -> instances.EndpointName:
        """Where to serve this task. Raises ConfigError."""
        return instances.EndpointName.parse(
            self.endpoint or f"dyn://{self.namespace}.backend.{task}"
        )

    @property
    def prefill_endpoint_name(self) -> instances.EndpointName:
        """Where prefill workers serve. Raises ConfigError."""
        return instances.EndpointName.parse(
            self.prefill_endpoint or f"dyn://{self.namespace}.prefill.generate"
        )

    @property
    def is_prefill(self) -> bool:
        """Does it only compute prompts?"""
        return self.is_prefill_worker or self.disaggregation_mode == "prefill"

    @property
    def takes_from_queue(self) -> bool:
        """Does it take prompts whether or not anybody finds it?"""
        return self.is_prefill and self.prefill_queue == "queue"
