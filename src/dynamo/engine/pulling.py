"""Copies of prompts' blocks that other engines hold, for sequences that wait for them.

    a copy that the scheduler asks for ──▶ READ ──▶ the sequence goes on, and "release 7" tells the holder

What was read may be used only if the blocks were certainly still held then, which is known by our own clock: the
parameters say for how long from when they came, and a copy that ends later counts as failed.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.engine.lending import release_message
from dynamo.engine.own_agent import OwnAgent
from dynamo.engine.pulls import Owner, PassOn, Pull
from dynamo.engine.sources import Sources
from dynamo.protocols import generate, kv_transfer
from dynamo.transfer import api as transfer

NOTIFY_S = 2.0
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A request that brought the place of its prompt's blocks, of which no copy has begun."""

    request: generate.Request
    remote: kv_transfer.RemoteBlocks
    until: float


class Puller:
    """Used on the event loop only."""

    def __init__(
        self, agent: OwnAgent, sources: Sources, *, pull_s: float, pass_on: PassOn | None
    ) -> None:
        """`pull_s` bounds a copy. What `pass_on` waits, or raises, comes before each: the way of a simulated engine."""
        self._agent, self._sources, self._pull_s = agent, sources, pull_s
        self._pass_on = pass_on
        self._owner: Owner | None = None
        self._expected: dict[str, _Expected] = {}
        self._listeners: list[Callable[[api.PullReport], None]] = []
        self._tasks = tasks.Tasks()
        self._is_closed = False

    def begin(self, owner: Owner) -> None:
        """Who is told how each copy has ended."""
        self._owner = owner

    def on_pull(self, listener: Callable[[api.PullReport], None]) -> None:
        """Call this after every copy."""
        self._listeners.append(listener)

    def expect(self, request: generate.Request, remote: kv_transfer.RemoteBlocks) -> None:
        """A copy for this request may be asked for; the time of its blocks runs from now."""
        until = asyncio.get_running_loop().time() + remote.remote_hold_s
        self._expected[request.id] = _Expected(request, remote, until)

    def aborted(self, request_id: str) -> None:
        """Whoever holds blocks for it need not any more; a copy that has begun ends by itself."""
        expected = self._expected.pop(request_id, None)
        if expected is not None:
            self._tasks.start("release remote blocks", self._let_go(expected.remote))

    def unneeded(self, request_id: str) -> None:
        """Its answer is over without a copy."""
        expected = self._expected[request_id]
        self.aborted(request_id)
        self._report(request_id, expected.remote)

    def begin_pulls(self, pulls: list[Pull]) -> None:
        """Make these copies; the loop is told how each has ended."""
        for pull in pulls if not self._is_closed else ():
            self._tasks.start("pull KV blocks", self._pull(pull))

    async def close(self) -> None:
        """End all copies. Idempotent."""
        self._is_closed = True
        await self._tasks.close()

    async def _pull(self, pull: Pull) -> None:
        began_at = asyncio.get_running_loop().time()
        error: errors.DynamoError | None = errors.Cancelled("the engine stops")
        try:
            await self._copy(pull)
            error = None
        except errors.DynamoError as failure:
            error = failure
        finally:
            assert self._owner is not None
            self._owner.end_pull(pull.number, is_copied=error is None)
        took_s = asyncio.get_running_loop().time() - began_at
        self._tell(pull, error, took_s)
        if not isinstance(error, errors.Cancelled):
            await self._let_go(pull.remote)

    async def _copy(self, pull: Pull) -> None:
        """Raises DynamoError if the blocks were not copied, or perhaps not those that were meant."""
        _logger.debug(
            "update_state_after_alloc(%s): num_external_tokens=%d, kv_transfer_params=%s",
            pull.request.id, pull.num_tokens, pull.request.kv_transfer_params,
        )  # fmt: skip
        until = self._begun(pull)
        if not pull.local_blocks:
            return
        async with self._sources.reached(pull.remote.remote_engine_id) as peer:
            await self._read(peer, pull)
        _check_time(until)

    async def _read(self, peer: transfer.Peer, pull: Pull) -> None:
        if self._pass_on is not None:
            await self._pass_on(pull)
        agent = await self._agent.started()
        copying = agent.prepare(
            transfer.Operation.READ, peer, pull.local_blocks, pull.remote_blocks
        )
        try:
            await copying.post(deadline_s=self._pull_s)
        except errors.TransferError:
            await self._sources.distrust(peer)
            raise
        finally:
            await copying.release()

    def _begun(self, pull: Pull) -> float:
        """Until when its blocks are certainly held."""
        expected = self._expected.get(pull.request.id)
        if expected is None or expected.request is not pull.request:
            raise errors.Cancelled("the request was aborted before its blocks were copied")
        del self._expected[pull.request.id]
        _check_time(expected.until)
        return expected.until

    async def _let_go(self, remote: kv_transfer.RemoteBlocks) -> None:
        """Nobody here needs them any more."""
        try:
            async with self._sources.reached(remote.remote_engine_id) as peer:
                agent = await self._agent.started()
                await agent.notify(peer, release_message(remote), deadline_s=NOTIFY_S)
        except errors.DynamoError as error:
            _logger.debug("%s keeps blocks to its limit: %s", remote.remote_engine_id, error)

    def _tell(self, pull: Pull, error: errors.DynamoError | None, took_s: float) -> None:
        if isinstance(error, errors.Cancelled):
            return
        if error is not None:
            _logger.warning("%s: its prompt is computed here: %s", pull.request.id, error)
        else:
            done = (pull.request.kv_transfer_params or {}) | {"do_remote_prefill": False}
            _logger.debug(
                "update_state_after_alloc(%s): num_external_tokens=0, kv_transfer_params=%s (%.1f ms)",
                pull.request.id, done, took_s * 1000,
            )  # fmt: skip
        num_blocks = len(pull.local_blocks)
        self._report(pull.request.id, pull.remote, num_blocks, took_s=took_s, error=error)

    def _report(
        self,
        request_id: str,
        remote: kv_transfer.RemoteBlocks,
        num_blocks: int = 0,
        *,
        took_s: float = 0.0,
        error: errors.DynamoError | None = None,
    ) -> None:
        report = api.PullReport(
            request_id=request_id,
            engine_id=remote.remote_engine_id,
            num_blocks=num_blocks,
            duration_s=took_s,
            error=error,
        )
        for listener in self._listeners:
            listener(report)


def _check_time(until: float) -> None:
    if asyncio.get_running_loop().time() > until:
        raise errors.TransferError("it took so long that the blocks may be held no more")
