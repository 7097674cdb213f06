"""The settings of a worker, for any engine; the engine's own settings follow them on the command line."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dynamo.base import addresses, config, draining, errors
from dynamo.disagg import policy
from dynamo.preprocess import infill
from dynamo.preprocess.parsers import formats
from dynamo.protocols import instances
from dynamo.runtime import component
from dynamo.worker import health

Role = Literal["agg", "prefill", "decode", "embed"]
_OF_DECODERS = (
    "disagg_policy",
    "max_local_prefill_length",
    "max_prefill_queue_size",
    "prefill_timeout_s",
)
_OF_PAIRS = (*_OF_DECODERS, "prefill_queue", "prefill_endpoint")
_OF_ENGINES = ("is_prefill_worker", "is_decode_worker", "kv_peer_prefixes", "health_check_enabled")
# The settings without effect on a worker of a role, and what such a worker does.
_WITHOUT_EFFECT: dict[Role, tuple[tuple[str, ...], str]] = {
    "agg": (_OF_PAIRS, "computes all prompts itself"),
    "prefill": (_OF_DECODERS, "computes what decode workers send it"),
    "decode": ((), ""),
    "embed": ((*_OF_PAIRS, *_OF_ENGINES), "only embeds"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(component.RuntimeConfig):
    """Serve one model by one engine, to every frontend that finds this worker through discovery."""

    model: str | None = config.option(
        None,
        flag="--model",
        aliases=("--model-path",),
        help="model directory, or name on the Hugging Face hub; without it, the built-in model",
    )
    model_name: str | None = config.option(
        None,
        aliases=("--served-model-name",),
        help="name under which clients ask for the model (default: the directory's name, or the hub name)",
    )
    model_alias: tuple[str, ...] = config.option(
        (),
        help="further names under which clients may ask for the model"
        " (default without --model-name: as it was typed, and the directory's name)",
    )
    task: Literal["auto", "generate", "embed"] = config.option(
        "auto",
        help="what the model does; auto: embed if it is an encoder or has a modules.json, else generate",
    )
    endpoint: str | None = config.option(
        None,
        help="endpoint to serve at (default: dyn://NAMESPACE.backend.generate, ….prefill.generate, or ….backend.embed)",
    )
    is_prefill_worker: bool = config.option(
        False, help="compute prompts for decode workers; the same as --disaggregation-mode prefill"
    )
    is_decode_worker: bool = config.option(
        False,
        help="let prefill workers compute long prompts; the same as --disaggregation-mode decode",
    )
    disaggregation_mode: Literal["agg", "prefill", "decode"] | None = config.option(
        None,
        aliases=("--worker-type",),
        help="agg: compute all prompts here; prefill: only compute prompts, for decode workers; decode: let prefill"
        " workers compute long prompts, and copy their KV blocks by shared memory on the same host; default: as decode,"
        " without that shared memory",
    )
    prefill_endpoint: str | None = config.option(
        None, help="endpoint of the prefill workers (default: dyn://NAMESPACE.prefill.generate)"
    )
    disagg_policy: Literal["lengths", "estimated"] = config.option(
        "lengths",
        help="where a prompt is computed; lengths: by --max-local-prefill-length and --max-prefill-queue-size;"
        " estimated: here or by a prefill worker, whichever delays it and the running answers less",
    )
    max_local_prefill_length: int | None = config.option(
        None,
        help="prompts with at most so many tokens that are not cached are computed here; discovery can change it"
        f" (default: {policy.MAX_LOCAL_PREFILL_LENGTH}; with vLLM 0, as in NVIDIA Dynamo)",
        least=0,
    )
    max_prefill_queue_size: int = config.option(
        policy.MAX_PREFILL_QUEUE_SIZE,
        help="prompts that may wait at a prefill worker; while so many wait, prompts are computed here; discovery can"
        " change it",
        least=0,
    )
    kv_peer_prefixes: bool = config.setting(
        False,
        help="copy the cached prefix of a prompt from another worker where that is estimated to be faster than"
        " computing it, and let others copy from here; with the native and the simulated engine",
    )
    prefill_queue: Literal["direct", "queue"] = config.setting(
        "direct",
        help="how prompts reach prefill workers, the same value for both sides; direct: each is sent to one of them;"
        " queue: all of them take from one queue in NATS (JetStream)",
    )
    prefill_timeout_s: float = config.option(
        30.0,
        help="seconds after which a prompt that a prefill worker has not computed is computed here",
        least=0.01,
    )
    custom_jinja_template: str | None = config.option(
        None,
        env="DYN_CUSTOM_JINJA_TEMPLATE",
        help="file with a chat template in place of the model's own, with tools and without",
    )
    default_chat_template_kwargs: str | None = config.option(
        None,
        help="JSON object of variables for the chat template, which a request may set otherwise, as"
        ' {"enable_thinking": false}',
    )
    dyn_default_thinking_mode: Literal["enabled", "disabled"] | None = config.option(
        None,
        env="DYN_DEFAULT_THINKING_MODE",
        help="whether the model thinks where a request does not say so, by the variables enable_thinking and thinking"
        " of its chat template; --default-chat-template-kwargs goes beyond it",
    )
    dyn_tool_call_parser: str | None = config.option(
        None,
        env="DYN_TOOL_CALL_PARSER",
        help="format of the model's tool calls, or none (default: found in its chat template)",
    )
    dyn_reasoning_parser: str | None = config.option(
        None,
        env="DYN_REASONING_PARSER",
        help="format of the model's reasoning, or none (default: found in its chat template)",
    )
    dyn_infill_format: str | None = config.option(
        None,
        env="DYN_INFILL_FORMAT",
        help="format of prompts to fill in between prompt and suffix, or none (default: not supported)",
    )
    engine_request_limit: int = config.option(
        1024,
        help="requests that may run or wait here; more are refused as overload, and frontends try another worker",
        least=1,
    )
    migration_limit: int | None = config.setting(
        None,
        help="times that a request may migrate to another worker; the frontend's limit holds if it is lower",
        least=0,
    )
    start_estimate_s: float = config.setting(
        120.0,
        help="seconds that a start of this worker is estimated to take, for which frontends let requests of its model"
        " wait; raise it for models that load longer",
        least=0,
    )
    graceful_shutdown_timeout_s: float = draining.WORKER.option(
        "seconds for running requests to finish after SIGTERM; increase it for long answers"
    )
    grace_period_s: float = draining.GRACE.option(
        "seconds after SIGTERM in which new requests are still accepted, from frontends that have not noticed yet;"
        " with 0 these requests migrate to another worker"
    )
    health_check_enabled: bool = config.setting(
        False,
        help="ask an engine without progress for one token, and end this worker if it does not answer",
    )
    canary_wait_time: float = config.setting(
        10.0, help="seconds without progress before the health check asks the engine", least=0.1
    )
    health_check_request_timeout: float = config.setting(
        3.0, help="seconds for the engine to answer the health check", least=0.1
    )
    system_host: str = config.setting(
        "127.0.0.1", help="address of the system port; 0.0.0.0: all networks, and its commands too"
    )
    system_port: addresses.PortRange | None = config.setting(  # noqa: RUF009 (a declaration)
        None,
        help="port of /live, /health, /metrics and commands (drain, sleep, role, adapters), all without authentication,"
        " or a range of which the first free one is used; 0: any, -1 (default): none",
    )
    system_enabled: bool | None = config.setting(
        None,
        help=f"serve the system port, at {addresses.DEFAULT_SYSTEM_PORT} without --system-port;"
        " --no-system-enabled: serve none",
    )
    startup_stall_timeout: float = config.setting(
        300.0,
        help="seconds without progress (bytes of the model, computing, reading) after which /live gives up a start",
        least=1,
    )
    system_use_endpoint_health_status: tuple[str, ...] = config.setting(
        (),
        help="endpoints that /health waits for, such as generate; those of a worker become ready together",
    )

    def check(self) -> None:
        """Raise ConfigError for an unknown parser or format, and for two roles at once."""
        roles = {
            "--is-prefill-worker": "prefill" if self.is_prefill_worker else None,
            "--is-decode-worker": "decode" if self.is_decode_worker else None,
            f"--disaggregation-mode {self.disaggregation_mode}": self.disaggregation_mode,
        }
        flags = {flag: role for flag, role in roles.items() if role is not None}
        if len({*flags.values()}) > 1:
            raise errors.ConfigError(f"{' and '.join(flags)}: expected one of them")
        _ = self.template_defaults
        infill.check(self.dyn_infill_format)
        formats.check_names(self.dyn_tool_call_parser, self.dyn_reasoning_parser)

    @property
    def template_defaults(self) -> dict[str, Any]:
        """Return the variables of the chat template that requests leave out. Raises ConfigError."""
        text, variables = self.default_chat_template_kwargs or "{}", dict[str, Any]()
        if (mode := self.dyn_default_thinking_mode) is not None:
            variables = dict.fromkeys(("enable_thinking", "thinking"), mode == "enabled")
        try:
            return variables | msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise errors.ConfigError(
                f"--default-chat-template-kwargs: expected a JSON object, got {text!r}"
            ) from error

    def find_notes(self, role: Role) -> list[str]:
        """Return which of the options that are set have no effect on a worker of this role, for an operator."""
        names, action = _WITHOUT_EFFECT[role]
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        flags = [f"--{n.replace('_', '-')}" for n in names if getattr(self, n) != defaults[n]]
        return [f"{', '.join(flags)}: no effect on a worker that {action}"] if flags else []

    @property
    def used_system_port(self) -> addresses.PortRange | None:
        """Return the ports of which /health takes the first free one, None for no system port."""
        return addresses.system_ports(self.system_port, self.system_enabled)

    @property
    def health_check(self) -> health.HealthCheck | None:
        """Return the limits of the health check of a quiet engine; None if it is switched off."""
        if not self.health_check_enabled:
            return None
        return health.HealthCheck(
            wait_s=self.canary_wait_time, answer_s=self.health_check_request_timeout
        )

    @property
    def endpoint_name(self) -> instances.EndpointName:
        """Return the endpoint to serve at. Raises ConfigError."""
        if self.endpoint is None and self.is_prefill:
            return self.prefill_endpoint_name
        return self.endpoint_for("generate")

    def endpoint_for(self, task: str) -> instances.EndpointName:
        """Return the endpoint to serve this task at. Raises ConfigError."""
        return instances.EndpointName.parse(
            self.endpoint or f"dyn://{self.namespace}.backend.{task}"
        )

    @property
    def prefill_endpoint_name(self) -> instances.EndpointName:
        """Return the endpoint of the prefill workers. Raises ConfigError."""
        return instances.EndpointName.parse(
            self.prefill_endpoint or f"dyn://{self.namespace}.prefill.generate"
        )

    @property
    def is_prefill(self) -> bool:
        """Return whether this worker only computes prompts, for decode workers."""
        return self.is_prefill_worker or self.disaggregation_mode == "prefill"

    @property
    def is_decode(self) -> bool:
        """Return whether this worker lets prefill workers compute long prompts, and says so on its card."""
        return self.is_decode_worker or self.disaggregation_mode == "decode"

    @property
    def takes_from_queue(self) -> bool:
        """Return whether this worker takes prompts from a queue, also while it is not in discovery."""
        return self.is_prefill and self.prefill_queue == "queue"
