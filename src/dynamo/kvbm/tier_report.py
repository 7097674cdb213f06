"""The report of a tiered cache: what `GET /kvbm` shows and the metrics count; and the reads of a trace."""  # decider

import msgspec

from dynamo.kvbm import pool as pools
from dynamo.kvbm import tier_policy
from dynamo.kvbm.tier_jobs import TierCopy
from dynamo.kvbm.tiered_cache import DEVICE, DISK, HOST, REMOTE, TieredCache

_COPY_NAMES = {
    (DEVICE, HOST): "offload_blocks_d2h",
    (HOST, DISK): "offload_blocks_h2d",
    (HOST, DEVICE): "onboard_blocks_h2d",
    (DISK, HOST): "onboard_blocks_d2d",
    (HOST, REMOTE): "offload_blocks_h2o",
    (REMOTE, HOST): "onboard_blocks_o2h",
}
_COUNTS = (
    "matched_tokens", "host_lookups", "disk_lookups", "disk_hits", "failed_blocks", "late_loads", "not_worth_loading",
    "skipped_queue_full", "skipped_tier_full", "evicted", "turned_down", "turned_up", "kept_off_disk",
    "shared_blocks", "store_questions", "store_finds", "not_worth_asking",
)  # fmt: skip


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """How full a tier is. A block of the engine's own memory counts while a sequence uses it, or it can be found."""

    tier: str
    num_blocks: int
    used_blocks: int
    queued_blocks: int = 0  # that wait to be copied to it
    shared_blocks: int = 0  # that other workers have stored, and this one can read
    kept_blocks: int = 0  # with a time to live, or pinned
    refused_hints: int = 0  # blocks that got none, because half of the tier has one

    @property
    def used_percent(self) -> float:
        """The used share of the tier, 0 to 100."""
        return 100 * self.used_blocks / max(1, self.num_blocks)


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of all tiers, and what happened since the start."""

    tiers: tuple[TierUse, ...]
    copied: dict[str, int]  # blocks with copies that ended well
    counts: dict[str, int]
    host_hit_rate: float  # blocks loaded from host memory, of those looked up there
    disk_hit_rate: float  # likewise of the disk, or of the object store in its place
    bytes_per_s: dict[str, float]  # of copies, as measured or assumed
    prefill_tokens_per_s: float | None  # as measured
    offloading: str  # "on", or why it is turned down


class TierRead(msgspec.Struct, frozen=True, kw_only=True):
    """A copy from a tier, or a question to a store, for which a request waited.

    Times are those of the host's steady clock, in seconds.
    """

    tier: str
    to: str  # the tier above, or the engine's own memory
    num_blocks: int
    num_bytes: int
    began_at: float
    ended_at: float
    num_failed: int = 0  # blocks that were gone, or damaged
    is_late: bool = False  # the request went on without it

    @property
    def attributes(self) -> dict[str, str | int | bool]:
        """The attributes of its span in a trace."""
        if self.tier == self.to:  # a question
            return {
                "tier": self.tier,
                "asked_blocks": self.num_blocks,
                "found": not self.num_failed and not self.is_late,
            }
        attributes: dict[str, str | int | bool] = {
            "tier": self.tier,
            "to": self.to,
            "blocks": self.num_blocks,
            "bytes": self.num_bytes,
        }
        if self.num_failed:
            attributes["failed_blocks"] = self.num_failed
        if self.is_late:
            attributes["late"] = True
        return attributes


def describe_read(
    copy: TierCopy, began_at: float, ended_at: float, *, num_failed: int = 0
) -> TierRead:
    return TierRead(
        tier=copy.path[0],
        to=copy.path[1],
        num_blocks=len(copy.blocks),
        num_bytes=copy.num_bytes,
        began_at=began_at,
        ended_at=ended_at,
        num_failed=num_failed,
    )


def describe_late_read(copy: TierCopy, now: float) -> TierRead:
    """Return the report of a read that has not ended, and for which no request waits any more."""
    read = describe_read(copy, now - (copy.limit_s or 0.0), now)
    return msgspec.structs.replace(read, is_late=True)


def make_report(pool: pools.DevicePool, cache: TieredCache) -> TierReport:
    """Return the report of a cache. May be called by any thread: it reads numbers only."""
    counts = dict(cache.counts)
    queued = cache.num_queued
    uses = [TierUse(tier=DEVICE, num_blocks=pool.num_blocks, used_blocks=pool.num_used)]
    uses += [
        TierUse(
            tier=tier.name,
            num_blocks=tier.num_slots * tier.segment_blocks,
            used_blocks=tier.num_used * tier.segment_blocks,
            queued_blocks=queued[tier.name],
            shared_blocks=tier.num_foreign,
            kept_blocks=tier.num_kept * tier.segment_blocks,
            refused_hints=tier.num_hints_refused * tier.segment_blocks,
        )
        for tier in (cache.host, cache.disk)
        if tier is not None
    ]
    copied = {name: cache.num_copied[path] for path, name in _COPY_NAMES.items()}
    return TierReport(
        tiers=tuple(uses),
        copied=copied,
        counts={name: counts.get(name, 0) for name in _COUNTS},
        host_hit_rate=copied["onboard_blocks_h2d"] / max(1, counts.get("host_lookups", 0)),
        disk_hit_rate=counts.get("disk_hits", 0) / max(1, counts.get("disk_lookups", 0)),
        bytes_per_s={name: cache.cost.bytes_per_s(path) for path, name in _COPY_NAMES.items()},
        prefill_tokens_per_s=cache.cost.tokens_per_s,
        offloading=tier_policy.describe(cache.guard),
    )
