"""The KV memory of the mock engine and its cache tiers: real blocks of a real pool, named by their content; only the
bytes are missing.

The rules are those of the native engine (`kvbm.block_tables`): a choice gets all blocks of its prompt at admission, and
one more whenever its answer has filled the last.

The tiers of one rank have the real decisions of `kvbm.tiered_cache`, and copies that only take time. Copies between two
tiers follow one another at the bandwidth of the slower one, as if it were one device.
"""  # decider

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo.base import clock as clocks
from dynamo.engine.mock.answers import MockAnswer, TokenCycle
from dynamo.kvbm import block_tables, tier_jobs, tier_policy, tiered_cache, tiers
from dynamo.kvbm import pool as pools
from dynamo.protocols import blocks, generate, kv_events


@dataclass(slots=True, kw_only=True, eq=False)
class MockChoice(block_tables.PagedSequence):
    """One choice of one request, with its blocks."""

    cycle: TokenCycle
    answer: MockAnswer
    outputs: Sequence[generate.Output]  # one for each token of the cycle
    seed: int = blocks.SEED  # of its block hashes
    num_output: int = 0
    next_check: int = 0  # the number of output tokens at which the batch has to look at it

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + self.num_output


class MockMemory(block_tables.BlockTables[MockChoice]):
    """The block tables of one simulated rank, and the bytes by which another engine can check a block."""

    def __init__(
        self, *, num_blocks: int, block_size: int, prefix_caching: bool, watermark: float = 0.01
    ) -> None:
        """`watermark`: the share of the blocks that admission leaves free while other choices run."""
        super().__init__(
            num_blocks=num_blocks, block_size=block_size, prefix_caching=prefix_caching
        )
        self._names: memoryview | None = None
        self._is_exported = False
        self.num_reserved = max(1, round(num_blocks * watermark))

    def store_names(self, names: memoryview, *, is_exported: bool) -> None:
        """Keep each block's hash in the first 8 bytes of its memory; written only if other engines may copy it."""
        self._names, self._is_exported = names, is_exported

    def is_import_intact(self, choice: MockChoice) -> bool:
        """Return True if no full block of the prompt that was copied has the hash of another block."""
        if self._names is None:
            return True
        end = min(choice.num_computed + self.block_size - 1, choice.prompt_len) // self.block_size
        full = slice(choice.num_committed, end)
        copied = zip(choice.block_ids[full], choice.sequence_hashes[full], strict=False)
        return all(self._names[block * self.block_size] in (0, name) for block, name in copied)

    def num_slots(self, choice: MockChoice) -> int:
        """Return the number of tokens for which the choice has blocks."""
        return len(choice.block_ids) * self.block_size

    def commit(self, choice: MockChoice, num_computed: int) -> range:
        """Register the blocks that these tokens fill; they hold their names from then on."""
        new = super().commit(choice, num_computed)
        if self._names is not None and self._is_exported:
            for i in new:
                self._names[choice.block_ids[i] * self.block_size] = choice.sequence_hashes[i]
        return new

    def _hash(self, choice: MockChoice) -> None:
        if not self.prefix_caching:
            return
        names = choice.sequence_hashes
        start = len(names) * self.block_size
        num_hashed = max(0, start - choice.prompt_len)  # output tokens in hashed blocks
        added = choice.request.token_ids[start * blocks.TOKEN_BYTES :] + choice.cycle.packed(
            choice.answer.start + num_hashed, choice.num_output - num_hashed
        )
        local = blocks.local_hashes(added, self.block_size, choice.seed)
        choice.local_hashes += local
        names += blocks.sequence_hashes(local, names[-1] if names else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTiersConfig:
    """The sizes and speeds of simulated tiers."""

    num_host_blocks: int
    num_disk_blocks: int
    host_bytes_per_s: float
    disk_bytes_per_s: float
    block_size: int  # tokens
    block_bytes: int


def make_cache(pool: pools.BlockPool, config: SimulatedTiersConfig) -> tiered_cache.TieredCache:
    """Return the empty tiers below a pool."""
    host = tiers.Tier(kv_events.HOST, config.num_host_blocks, pool.events)
    disk = None
    if config.num_disk_blocks:
        disk = tiers.Tier(kv_events.DISK, config.num_disk_blocks, pool.events)
    return tiered_cache.TieredCache(
        pool, host, disk, block_size=config.block_size, block_bytes=config.block_bytes
    )


class SimulatedCopies:
    """The copies of one rank's cache. Used on the event loop only."""

    def __init__(
        self,
        cache: tiered_cache.TieredCache,
        config: SimulatedTiersConfig,
        clock: clocks.Clock,
        end_copy: Callable[[tier_jobs.TierCopy, float], None],
    ) -> None:
        """`end_copy` is called with each copy that ends and the seconds that it took."""
        self._cache, self._config, self._clock, self._end_copy = cache, config, clock, end_copy
        self._free_at: dict[tier_policy.Path, float] = {}

    def begin(self, on_late: Callable[[], None]) -> None:
        """Begin the copies that the cache wants; `on_late` is called when a request stops waiting for one."""
        self._cache.record_time(self._clock.now())
        for copy in self._cache.take_copies():
            is_disk = kv_events.DISK in copy.path
            rate = self._config.disk_bytes_per_s if is_disk else self._config.host_bytes_per_s
            now, seconds = self._clock.now(), copy.num_bytes / rate
            ends_at = max(now, self._free_at.get(copy.path, now)) + seconds
            self._free_at[copy.path] = ends_at
            self._clock.call_later(ends_at - now, self._end_copy, copy, seconds)
            if copy.limit_s is not None and copy.limit_s < ends_at - now:
                self._clock.call_later(copy.limit_s, self._stop_waiting, copy, on_late)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Record a step of the rank, from which the cache learns what computing takes."""
        self._cache.cost.record_step(num_tokens, seconds)

    def _stop_waiting(self, copy: tier_jobs.TierCopy, on_late: Callable[[], None]) -> None:
        self._cache.stop_waiting(copy)
        on_late()
