"""KV blocks that an engine shares with other engines for a while, as the engine's scheduler sees them.

An *export* is a set of blocks under a lease: they were computed for another engine, and stay in the pool until the
lease is released. `exchange` decides when that is.

An *import* is a copy of another engine's blocks into ours. If another engine has computed its prompt, a sequence gets
blocks like any other, and then takes part in no step (vLLM's state WAITING_FOR_REMOTE_KVS) until the copy has
ended. After a successful copy only its last token is left to compute: the first token of the answer if that came with
the prompt, else the last token of the prompt; or, if the other engine had only a prefix, what follows it. After a
failed copy the engine computes what its own cache lacks. The blocks of a sequence that is aborted during the copy
belong to the copy, and are freed when it ends.
"""  # decider

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from dynamo.base import errors
from dynamo.kvbm import block_tables
from dynamo.kvbm import pool as pools
from dynamo.protocols import generate, kv_transfer

_LEAST_PROBE_BYTES, _MOST_PROBE_BYTES = 2**18, 2**22
_LEAST_PROBE_S = 0.2  # a busy machine may take so long for the smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class KvImport:
    """A copy to make: blocks of a prompt that another engine has computed, and our blocks to copy them to.

    Without blocks, the prompt needs no copy, and the exporting engine can free its blocks.
    """

    import_id: int
    request: generate.Request
    remote: kv_transfer.RemoteBlocks
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    # to copy; the last token is always computed here, because its logits are needed
    num_tokens: int

    def limit_s(self, patience_s: float) -> float:
        """Return how many seconds the copy may take: `patience_s` for a whole prompt, or what computing it takes."""
        if self.remote.copy_limit_s is None:
            return math.inf
        least_s = 0.0 if self.remote.is_prefix else patience_s
        return max(least_s, self.remote.copy_limit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """The outcome of one import of blocks from another engine, for metrics and spans."""

    request_id: str
    engine_id: str  # of the exporting engine
    num_blocks: int  # copied
    duration_s: float
    error: errors.DynamoError | None  # then the prompt is computed here
    is_prefix: bool = False  # of a prefix that the exporting engine happened to have


class ProbeCopy(NamedTuple):
    """A copy whose bytes are dropped, to learn whether a link is quick enough again."""

    num_bytes: int
    limit_s: float


class LinkRecord:
    """The recent copies of prompts over the link to one engine: after one that failed, a probe has to pass.

    A probe must be as quick as the copy had to be, but is small, so that a slow link has room for other things. If a
    copy fails right after a probe has passed, the next probes are larger.
    """

    def __init__(self) -> None:
        self.due_probe: ProbeCopy | None = None  # before the next copy
        self._probe_bytes = _LEAST_PROBE_BYTES
        self._has_only_passed = False  # a probe, and no copy has succeeded since

    def note_failed_copy(self, num_bytes: int, limit_s: float) -> None:
        """Require a probe, because so many bytes were not copied within the limit."""
        if self._has_only_passed:
            self._probe_bytes = min(4 * self._probe_bytes, _MOST_PROBE_BYTES)
        self._has_only_passed = False
        size = min(self._probe_bytes, num_bytes)
        self.due_probe = ProbeCopy(size, max(_LEAST_PROBE_S, limit_s * size / num_bytes))

    def note_passed_probe(self) -> None:
        """Allow copies again."""
        self.due_probe, self._has_only_passed = None, True

    def note_copy(self) -> None:
        """Take note that a copy has succeeded."""
        self._probe_bytes, self._has_only_passed = _LEAST_PROBE_BYTES, False


class BlockLease(NamedTuple):
    """Blocks that stay in the pool for another engine; `exchange` says there where they are, and for how long."""

    lease_id: int
    block_ids: tuple[int, ...]  # positions in the registered region
    is_prefix: bool = False  # these are leading full blocks; the rest of the prompt is not computed


class BlockOwner(Protocol):
    """The engine that owns the blocks. Called on the event loop."""

    def end_import(self, import_id: int, *, is_copied: bool) -> None:
        """Let the sequence that waits for this import go on; nothing writes to its blocks any more."""

    def release_lease(self, lease_id: int) -> None:
        """Free the blocks under this lease. An unknown id is no error."""


S = TypeVar("S", bound=block_tables.PagedSequence)


class SharedBlocks(Generic[S]):
    """Leases and imports of one pool. Mutable; the owner of the pool owns it.

    Several pools that lie behind one another in one registered region (data-parallel ranks) take ids from one iterator,
    and `first_block` is the position of this pool's block 0 in the region.
    """

    def __init__(
        self,
        pool: pools.BlockPool,
        block_size: int,
        *,
        first_block: int = 0,
        ids: Iterator[int] | None = None,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._first_block = first_block
        self._ids = ids or itertools.count(1)
        self._sequence_by_import: dict[int, tuple[S, int]] = {}  # with its tokens to copy
        self._new_imports: list[KvImport] = []
        self._blocks_by_lease: dict[int, tuple[int, ...]] = {}

    def begin_import(self, sequence: S) -> bool:
        """Request the blocks that a newly admitted sequence lacks, once. Return whether the sequence has to wait."""
        remote, sequence.remote = sequence.remote, None
        if remote is None:
            return False
        first, end = self._missing_blocks(sequence, remote)
        num_tokens = min(end * self._block_size, sequence.num_tokens - 1) - sequence.num_computed
        kv_import = KvImport(
            import_id=next(self._ids),
            request=sequence.request,
            remote=remote,
            local_blocks=tuple(self._first_block + i for i in sequence.block_ids[first:end]),
            remote_blocks=remote.remote_block_ids[first:end],
            num_tokens=num_tokens if first < end else 0,
        )
        self._new_imports.append(kv_import)
        if first == end:
            return False
        self._sequence_by_import[kv_import.import_id] = sequence, num_tokens
        return True

    def take_imports(self) -> list[KvImport]:
        """Return the imports that began since the last call."""
        imports, self._new_imports = self._new_imports, []
        return imports

    def end_import(self, import_id: int, *, is_copied: bool) -> S | None:
        """Return the sequence that waited for this import; None if none did. Copied tokens count as computed."""
        sequence, num_tokens = self._sequence_by_import.pop(import_id, (None, 0))
        if sequence is not None:
            sequence.num_computed += num_tokens if is_copied else 0
        return sequence

    def lease_blocks(self, block_ids: list[int], *, is_prefix: bool = False) -> BlockLease:
        """Keep these blocks after their sequence ends."""
        lease_id, leased = next(self._ids), tuple(block_ids)
        self._pool.retain(leased)
        self._blocks_by_lease[lease_id] = leased
        return BlockLease(lease_id, tuple(self._first_block + i for i in leased), is_prefix)

    def release_lease(self, lease_id: int) -> None:
        """Free leased blocks. An unknown id is no error: the importing engine and the time limit may both release."""
        self._pool.release(self._blocks_by_lease.pop(lease_id, ()))

    def _missing_blocks(self, sequence: S, remote: kv_transfer.RemoteBlocks) -> tuple[int, int]:
        """Return the first and the end index of the blocks to copy: all tokens but the last need them.

        Nothing is copied if the other engine has too few blocks, or if the prompt is to be scored here.
        """
        num_remote = len(remote.remote_block_ids)
        first = sequence.num_computed // self._block_size
        end = -(-(sequence.num_tokens - 1) // self._block_size)
        if remote.is_prefix:
            end = min(num_remote, (sequence.num_tokens - 1) // self._block_size)
        is_scored = sequence.request.output_options.prompt_logprobs is not None
        return (first, end) if first < end <= num_remote and not is_scored else (0, 0)


def usable_first_token(
    request: generate.Request, remote: kv_transfer.RemoteBlocks | None
) -> kv_transfer.FirstToken | None:
    """Return the token with which the answer begins, if the engine that computed the prompt has drawn it.

    Each of several choices must be drawn for itself, and a prompt that is to be scored must be computed here. In a
    grammar the token may begin a word that is spelled out, and only the engine that drew it knows the rest.
    """
    if remote is None or remote.first_token is None:
        return None
    if request.sampling_options.guided_decoding is not None:
        return None
    requested, has_logprobs = request.output_options, remote.first_token.logprobs is not None
    is_complete = has_logprobs == (requested.logprobs is not None)
    is_single = request.sampling_options.n == 1 and requested.prompt_logprobs is None
    return remote.first_token if is_single and is_complete else None
