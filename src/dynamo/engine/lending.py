"""Blocks that are held here for another engine: until it says that it has read them, or their time is over.

    the last output of a prompt that is held ──▶ where its blocks are; a time limit begins
    "release 7" from the reader, or the limit ──▶ the blocks are free

What the reader must know travels with that output, also the token that was drawn with it, if the reader can use it.
"""

import asyncio
import logging

import msgspec

from dynamo.engine.pulls import Owner
from dynamo.protocols import generate, kv_transfer
from dynamo.transfer import descriptors

_RELEASE = "release "
_logger = logging.getLogger(__name__)


class Lender:
    """Used on the event loop only."""

    def __init__(self, *, hold_s: float) -> None:
        """`hold_s`: for how long blocks are kept for a reader."""
        self._hold_s = hold_s
        self._owner: Owner | None = None
        self._limits: dict[int, asyncio.TimerHandle] = {}  # by hold
        self._nothing_held = asyncio.Event()
        self._nothing_held.set()

    def begin(self, owner: Owner) -> None:
        """Whose they are."""
        self._owner = owner

    def held(
        self, request: generate.Request, output: generate.Output, me: descriptors.Metadata
    ) -> generate.Output:
        """The last output of a prompt that is held, with all that a reader must know; its time begins."""
        assert output.kv_transfer_params is not None
        host, _, port = me.addresses.get("tcp", ":0").rpartition(":")
        remote = kv_transfer.RemoteBlocks(
            **output.kv_transfer_params,
            remote_engine_id=me.epoch,
            remote_host=host,
            remote_port=int(port),
            remote_hold_s=self._hold_s,
            tp_size=me.layout.tp_size,
            first_token=_first_token(request, output),
        )
        _logger.debug(
            "request_finished(%s), request_status=FINISHED_LENGTH_CAPPED, kv_transfer_params=%s",
            request.id, request.kv_transfer_params,
        )  # fmt: skip
        event_loop = asyncio.get_running_loop()
        number = remote.remote_hold_id
        self._limits[number] = event_loop.call_later(self._hold_s, self._expired, number)
        self._nothing_held.clear()
        return msgspec.structs.replace(output, kv_transfer_params=remote.as_params())

    def unheard(self, output: generate.Output) -> None:
        """Nobody waits for this output any more, so nobody will read the blocks that are held with it."""
        if output.kv_transfer_params is not None:
            self._release(output.kv_transfer_params["remote_hold_id"])

    def notified(self, sender: str, message: bytes) -> None:
        """By a reader."""
        verb, _, number = message.decode("ascii", "replace").partition(" ")
        if verb == _RELEASE.strip() and number.isdecimal():
            self._release(int(number))
        else:
            _logger.warning("%s said %r, expected %r and a number", sender, message[:40], _RELEASE)

    async def until_read(self) -> None:
        """Returns when nothing is held, because it was read or its time is over."""
        await self._nothing_held.wait()

    def close(self) -> None:
        """Hold nothing any more."""
        for limit in self._limits.values():
            limit.cancel()

    def _expired(self, number: int) -> None:
        _logger.warning("nobody came for the blocks held as %d: freeing them", number)
        self._release(number)

    def _release(self, number: int) -> None:
        limit = self._limits.pop(number, None)
        if limit is not None:
            limit.cancel()
        if self._owner is not None:
            self._owner.release_held(number)
        if not self._limits:
            self._nothing_held.set()


def release_message(remote: kv_transfer.RemoteBlocks) -> bytes:
    """What its reader has to say when it needs these blocks no more."""
    return f"{_RELEASE}{remote.remote_hold_id}".encode()


def _first_token(
    request: generate.Request, output: generate.Output
) -> kv_transfer.FirstToken | None:
    if not kv_transfer.wants_token(request.kv_transfer_params):
        return None
    return kv_transfer.FirstToken(
        output.token_ids[0],
        output.logprobs[0] if output.logprobs else None,
        output.cached_tokens,
    )
