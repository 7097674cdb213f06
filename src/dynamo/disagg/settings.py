"""What a frontend in router mode kv is told of prompts that prefill workers could compute."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from dynamo.base import config, errors
from dynamo.disagg import policy

_CONFIG_FLAG = "--router-conditional-disagg-config"
_FIELDS = tuple(one.name for one in dataclasses.fields(policy.Conditional))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRoutingConfig:
    """Prefill workers, in router mode kv."""

    disagg_policy: Literal["lengths", "estimated"] = config.option(
        "lengths",
        help="who computes a prompt, a prefill worker or who answers; lengths: by the two numbers below; estimated: by"
        " what delays this prompt and the answers that are being written least",
    )
    max_local_prefill_length: int = config.option(
        policy.MAX_LOCAL_PREFILL_LENGTH,
        help="prompt tokens, without the known prefix, that the worker computes that answers; discovery can change it",
        least=0,
    )
    max_prefill_queue_size: int = config.option(
        policy.MAX_PREFILL_QUEUE_SIZE,
        help="prompts that may wait at a prefill worker before more stay with who answers; discovery can change it",
        least=0,
    )
    prefill_timeout_s: float = config.option(
        30.0,
        help="seconds that a prompt may take at prefill workers before it is computed by who answers",
        least=0.01,
    )
    router_conditional_disagg: bool = config.option(
        False,
        env="DYN_ROUTER_CONDITIONAL_DISAGG",
        help="instead of by the two lengths above, decide as --router-conditional-disagg-config says; by default all"
        " goes to prefill workers but prompts of which fewer tokens than eff_isl_threshold, and a smaller share than"
        " eff_isl_ratio_threshold, are new to the worker that would answer",
    )
    router_conditional_disagg_config: str | None = config.option(
        None,
        env="DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG",
        help='for that, JSON: {"policy": "isl_bounding", "eff_isl_threshold": 2048, "eff_isl_ratio_threshold": 0.7};'
        " policy may be prefill_load (a prompt stays while prefill workers have more full steps to compute than"
        " prefill_busy_threshold) or isl_or_load (for either reason); with decode_busy_threshold none stays where a"
        " larger share of the blocks would be in use",
    )
    decode_fallback: bool = config.option(
        True,
        env="DYN_DECODE_FALLBACK",
        help="a prompt that no prefill worker can compute is computed by who answers; without, it is refused",
    )
    enforce_disagg: bool = config.option(
        False, env="DYN_ENFORCE_DISAGG", help="the same as --no-decode-fallback"
    )

    def check(self, router_mode: str, queue_threshold: float | None = None) -> None:
        """What the types cannot say. Raises ConfigError."""
        if self.conditional(queue_threshold) is None and not self.is_enforced:
            return
        if router_mode != "kv":
            raise errors.ConfigError(
                "--router-conditional-disagg, --enforce-disagg, --no-decode-fallback: expected --router-mode kv; "
                f"in mode {router_mode} the workers decide who computes a prompt"
            )

    @property
    def is_enforced(self) -> bool:
        """Is a prompt refused that no prefill worker can compute?"""
        return self.enforce_disagg or not self.decode_fallback

    @property
    def limits(self) -> policy.Limits:
        """Of what is computed by who answers."""
        return policy.Limits(
            max_local_prefill_length=self.max_local_prefill_length,
            max_prefill_queue_size=self.max_prefill_queue_size,
        )

    def conditional(self, queue_threshold: float | None) -> policy.Conditional | None:
        """The original's, if it is wanted; if nothing else says when a worker is busy, the router's queue does.

        Raises ConfigError.
        """
        given = self.router_conditional_disagg_config
        if not self.router_conditional_disagg:
            if given is not None:
                raise errors.ConfigError(
                    f"{_CONFIG_FLAG}: expected --router-conditional-disagg beside it"
                )
            return None
        wanted = _read(given or "{}")
        if wanted.policy == "isl_bounding" or wanted.prefill_busy_threshold is not None:
            return wanted
        if not queue_threshold:
            raise errors.ConfigError(
                f"{_CONFIG_FLAG}: {wanted.policy} needs prefill_busy_threshold, or --router-queue-threshold"
            )
        return dataclasses.replace(wanted, prefill_busy_threshold=queue_threshold)


def _read(given: str) -> policy.Conditional:
    """Raises ConfigError."""
    try:
        fields = msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise errors.ConfigError(f"{_CONFIG_FLAG}: expected a JSON object: {error}") from error
    for name in fields:
        if name not in _FIELDS:
            raise errors.ConfigError(f"{_CONFIG_FLAG}: expected {', '.join(_FIELDS)}; got {name!r}")
    try:
        return msgspec.convert(fields, policy.Conditional)
    except msgspec.ValidationError as error:
        policies = ", ".join(get_args(policy.ConditionalPolicy))
        raise errors.ConfigError(
            f"{_CONFIG_FLAG}: {error} (the policies are {policies})"
        ) from error
