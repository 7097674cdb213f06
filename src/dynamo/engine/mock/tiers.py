"""The simulated cache tiers of one rank: the real decisions of `kvbm.tiered_cache`, and copies that only take time.

Copies between two tiers follow one another at the bandwidth of the slower one, as if it were one device.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dynamo.base import clock as clocks
from dynamo.kvbm import pool as pools
from dynamo.kvbm import tier_policy, tiered_cache, tiers
from dynamo.protocols import kv_events


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
        end_copy: Callable[[tiered_cache.TierCopy, float], None],
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

    def _stop_waiting(self, copy: tiered_cache.TierCopy, on_late: Callable[[], None]) -> None:
        self._cache.stop_waiting(copy)
        on_late()
