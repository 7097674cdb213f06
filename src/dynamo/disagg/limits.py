"""The limits of local prefill, as discovery says them: they change while all runs."""

import logging

import msgspec

from dynamo.disagg import policy
from dynamo.runtime import discovery

_logger = logging.getLogger(__name__)
_decode_change = msgspec.json.Decoder(policy.Change).decode


async def follow(registry: discovery.Discovery, model: str, lengths: policy.Lengths) -> None:
    """Tell it the limits of this model whenever they change, until cancelled."""
    key = policy.key_of(model)
    async for change in registry.watch(key):
        if change.key != key:
            continue  # of a model whose name begins like ours
        try:
            said = _decode_change(change.value) if isinstance(change, discovery.Put) else None
        except msgspec.DecodeError as error:
            _logger.warning("ignored %s in discovery: %s", key, error)
            continue
        lengths.change(said or policy.Change())
        _logger.info("limits of local prefill: %s", lengths.limits)
