"""The limits of local prefill, as discovery says them: they change while all runs."""

import logging
from collections.abc import Callable

import msgspec

from dynamo.disagg import policy
from dynamo.runtime import discovery

_logger = logging.getLogger(__name__)
_decode_change = msgspec.json.Decoder(policy.Change).decode


async def follow(
    registry: discovery.Discovery,
    model: str,
    default: policy.Limits,
    apply: Callable[[policy.Limits], None],
) -> None:
    """Tell `apply` the limits of this model whenever they change, until cancelled; what is not said is as `default`."""
    key = policy.key_of(model)
    async for change in registry.watch(key):
        if change.key != key:
            continue  # of a model whose name begins like ours
        try:
            said = _decode_change(change.value) if isinstance(change, discovery.Put) else None
        except msgspec.DecodeError as error:
            _logger.warning("ignored %s in discovery: %s", key, error)
            continue
        limits = default.changed(said or policy.Change())
        apply(limits)
        _logger.info("limits of local prefill: %s", limits)
