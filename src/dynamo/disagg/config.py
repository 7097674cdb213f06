"""Options of a frontend in router mode kv for prefill workers, and the limits of local prefill in discovery."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from dynamo.base import config, errors
from dynamo.disagg import policy
from dynamo.protocols import kv_transfer, model_card, wire
from dynamo.runtime import discovery

_CONFIG_FLAG = "--router-conditional-disagg-config"
_FIELDS = tuple(each.name for each in dataclasses.fields(policy.ConditionalPolicy))
_logger = logging.getLogger(__name__)
_decode_change = msgspec.json.Decoder(policy.LimitsChange).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRoutingConfig:
    """Options of prefill workers, in router mode kv."""

    disagg_policy: Literal["lengths", "estimated"] = config.option(
        "lengths",
        help="where a prompt is computed; lengths: by --max-local-prefill-length and --max-prefill-queue-size;"
        " estimated: by a prefill worker or the answering one, whichever delays it and the running answers less",
    )
    max_local_prefill_length: int | None = config.option(
        None,
        help="tokens of a prompt, without its cached prefix, up to which the answering worker computes it; can be"
        " changed in discovery while the frontend runs (default: that of the workers, which is"
        f" {policy.MAX_LOCAL_PREFILL_LENGTH}, and 0 with vLLM)",
        least=0,
    )
    max_prefill_queue_size: int = config.option(
        policy.MAX_PREFILL_QUEUE_SIZE,
        help="prompts that may wait at a prefill worker before further ones stay with the answering worker; can be"
        " changed in discovery while the frontend runs",
        least=0,
    )
    prefill_timeout_s: float = config.option(
        30.0,
        help="seconds that a prompt may take at prefill workers; after that the answering worker computes it",
        least=0.01,
    )
    router_conditional_disagg: bool = config.setting(
        False,
        help="decide where prompts are computed by --router-conditional-disagg-config; without that option every"
        " prompt goes to prefill workers, except those of which fewer tokens than eff_isl_threshold, and a smaller"
        " share than eff_isl_ratio_threshold, are new to the answering worker",
    )
    router_conditional_disagg_config: str | None = config.setting(
        None,
        help='JSON: {"policy": "isl_bounding", "eff_isl_threshold": 2048, "eff_isl_ratio_threshold": 0.7};'
        " policy may be prefill_load (a prompt stays while prefill workers have more full steps to compute than"
        " prefill_busy_threshold) or isl_or_load (for either reason); with decode_busy_threshold none stays where a"
        " larger share of the blocks would be in use",
    )
    decode_fallback: bool = config.setting(
        True,
        help="let the answering worker compute prompts that no prefill worker can compute; otherwise refuse them",
    )
    enforce_disagg: bool = config.setting(False, help="the same as --no-decode-fallback")

    def check(self, router_mode: str, queue_threshold: float | None = None) -> None:
        """Check the options against each other and the router mode. Raises ConfigError."""
        if self.conditional_policy(queue_threshold) is None and not self.is_enforced:
            return
        if router_mode != "kv":
            raise errors.ConfigError(
                "--router-conditional-disagg, --enforce-disagg, --no-decode-fallback: expected --router-mode kv; "
                f"in mode {router_mode} the workers decide who computes a prompt"
            )

    @property
    def is_enforced(self) -> bool:
        """True if prompts that no prefill worker can compute are refused."""
        return self.enforce_disagg or not self.decode_fallback

    def limits_for(self, card: model_card.ModelCard) -> policy.LocalPrefillLimits:
        """Return the limits up to which the answering worker computes prompts; the card may have one."""
        length = self.max_local_prefill_length
        if length is None:
            length = card.runtime_config.runtime_data.get(kv_transfer.LOCAL_LENGTH_KEY)
        return policy.LocalPrefillLimits(
            max_local_prefill_length=length
            if isinstance(length, int)
            else policy.MAX_LOCAL_PREFILL_LENGTH,
            max_prefill_queue_size=self.max_prefill_queue_size,
        )

    def conditional_policy(self, queue_threshold: float | None) -> policy.ConditionalPolicy | None:
        """Return the original's policy, None if it is off.

        Without a threshold of its own, a prefill worker is busy above `queue_threshold`, that of the router's queue.
        Raises ConfigError.
        """
        json = self.router_conditional_disagg_config
        if not self.router_conditional_disagg:
            if json is not None:
                raise errors.ConfigError(
                    f"{_CONFIG_FLAG}: expected --router-conditional-disagg beside it"
                )
            return None
        conditional = _decode_policy(json or "{}")
        has_threshold = conditional.prefill_busy_threshold is not None
        if conditional.policy == "isl_bounding" or has_threshold:
            return conditional
        if not queue_threshold:
            raise errors.ConfigError(
                f"{_CONFIG_FLAG}: {conditional.policy} needs prefill_busy_threshold, or --router-queue-threshold"
            )
        return dataclasses.replace(conditional, prefill_busy_threshold=queue_threshold)


async def follow_limits(
    registry: discovery.Discovery, model: str, lengths: policy.LengthPolicy
) -> None:
    """Change the policy whenever the limits of this model change in discovery, until cancelled."""
    key = policy.limits_key(model)
    async for change in registry.watch(key):
        if change.key != key:
            continue  # of a model with a longer name that begins the same
        try:
            limits = _decode_change(change.value) if isinstance(change, discovery.Put) else None
        except wire.DECODE_ERRORS as error:
            _logger.warning("ignored %s in discovery: %s", key, error)
            continue
        lengths.change_limits(limits or policy.LimitsChange())
        _logger.info("limits of local prefill: %s", lengths.limits)


def _decode_policy(json: str) -> policy.ConditionalPolicy:
    """Decode `--router-conditional-disagg-config`. Raises ConfigError."""
    try:
        fields = msgspec.json.decode(json, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise errors.ConfigError(f"{_CONFIG_FLAG}: expected a JSON object: {error}") from error
    for name in fields:
        if name not in _FIELDS:
            raise errors.ConfigError(f"{_CONFIG_FLAG}: expected {', '.join(_FIELDS)}; got {name!r}")
    try:
        return msgspec.convert(fields, policy.ConditionalPolicy)
    except msgspec.ValidationError as error:
        policies = ", ".join(get_args(policy.ConditionalRule))
        raise errors.ConfigError(
            f"{_CONFIG_FLAG}: {error} (the policies are {policies})"
        ) from error
