"""The export of KV blocks: blocks computed for another engine, leased until it has read them or a time limit passes.

    last output of the prompt ──▶ the KV transfer parameters say where the blocks are; the time limit begins
    "release 7" from the importing engine, or the time limit ──▶ the blocks of lease 7 are free

The first token of the answer, drawn with the prompt, travels with the same parameters if the other engine can use it.
"""

import asyncio
import logging

import msgspec

from dynamo.base import addresses
from dynamo.base import clock as clocks
from dynamo.kvbm.sharing import BlockOwner
from dynamo.protocols import generate, kv_transfer
from dynamo.transfer import descriptors

PREFIX_LEASE_S = 8.0  # at most, for a prefix: its reader waits no longer than computing takes
_RELEASE = "release "
_logger = logging.getLogger(__name__)


class KvExporter:
    """The leases of one engine. Used on the event loop only."""

    def __init__(self, clock: clocks.Clock, *, lease_s: float) -> None:
        """`lease_s`: seconds that blocks are kept for the importing engine."""
        self._clock = clock
        self._lease_s = lease_s
        self._owner: BlockOwner | None = None
        self._timers: dict[int, clocks.Timer] = {}  # by lease id
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def set_owner(self, owner: BlockOwner) -> None:
        """Set the engine that owns the blocks."""
        self._owner = owner

    def publish_lease(
        self, request: generate.Request, output: generate.Output, me: descriptors.Metadata
    ) -> generate.Output:
        """Complete the last output of an exported prompt with all that its reader needs, and start the time limit."""
        assert output.kv_transfer_params is not None
        assert output.kv_transfer_params.remote is not None
        first_token = None
        params = request.kv_transfer_params
        if params is not None and params.do_first_token:
            logprobs = output.logprobs[0] if output.logprobs else None
            first_token = kv_transfer.FirstToken(
                output.token_ids[0], logprobs, output.cached_tokens
            )
        lease_s = self._lease_s
        if output.kv_transfer_params.remote.is_prefix:
            lease_s = min(lease_s, PREFIX_LEASE_S)
        host, port = addresses.split(me.addresses["tcp"]) if "tcp" in me.addresses else ("", 0)
        remote = msgspec.structs.replace(
            output.kv_transfer_params.remote,
            remote_engine_id=me.epoch,
            remote_host=host,
            remote_port=port,
            remote_hold_s=lease_s,
            tp_size=me.layout.tp_size,
            first_token=first_token,
        )
        _logger.debug(
            "request_finished(%s), request_status=FINISHED_LENGTH_CAPPED, kv_transfer_params=%s",
            request.id, kv_transfer.to_log(request.kv_transfer_params),
        )  # fmt: skip
        lease_id = remote.remote_hold_id
        self._timers[lease_id] = self._clock.call_later(lease_s, self._expire, lease_id)
        self._is_idle.clear()
        params = kv_transfer.KvTransferParams(do_remote_prefill=True, remote=remote)
        return msgspec.structs.replace(output, kv_transfer_params=params)

    def cancel_lease(self, output: generate.Output) -> None:
        """Free the blocks of an output that has no receiver any more, so that no engine will read them."""
        params = output.kv_transfer_params
        if params is not None and params.remote is not None:
            self._release(params.remote.remote_hold_id)

    def handle_notification(self, sender: str, message: bytes) -> None:
        """Release a lease at the word of the engine that has read the blocks."""
        verb, _, lease_id = message.decode("ascii", "replace").partition(" ")
        if verb == _RELEASE.strip() and lease_id.isdecimal():
            self._release(int(lease_id))
        else:
            _logger.warning("%s said %r, expected %r and a number", sender, message[:40], _RELEASE)

    async def wait_until_released(self) -> None:
        """Return when no lease is left: all were released, or their time limits have passed."""
        await self._is_idle.wait()

    def close(self) -> None:
        """Cancel all time limits."""
        for timer in self._timers.values():
            timer.cancel()

    def _expire(self, lease_id: int) -> None:
        _logger.warning("no engine read the blocks of lease %d in time: freeing them", lease_id)
        self._release(lease_id)

    def _release(self, lease_id: int) -> None:
        timer = self._timers.pop(lease_id, None)
        if timer is not None:
            timer.cancel()
        if self._owner is not None:
            self._owner.release_lease(lease_id)
        if not self._timers:
            self._is_idle.set()


def release_message(remote: kv_transfer.RemoteBlocks) -> bytes:
    """Return the notification by which the importing engine releases the lease."""
    return f"{_RELEASE}{remote.remote_hold_id}".encode()
