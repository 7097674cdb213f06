"""The options of the cache tiers, and the tiers that they describe."""

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import xxhash

from dynamo.base import config, distribution, errors
from dynamo.kvbm import agents, host_memory, slot_file, tier_policy
from dynamo.kvbm import pool as pools
from dynamo.kvbm import storage as storages
from dynamo.kvbm.tier_copies import TierCopies
from dynamo.kvbm.tiered_cache import DISK, HOST, TieredCache
from dynamo.kvbm.tiers import Tier, TierSlots
from dynamo.protocols import kv_events
from dynamo.transfer import api, descriptors

STORAGE_TIERS = {
    "hbm": kv_events.DEVICE,
    "host_dram": HOST,
    "nvme_ssd": DISK,
    "object_store": kv_events.REMOTE,
}
_OPTIONS = {  # that nothing but their tier reads
    HOST: ("kvbm_cpu_cache_gb", "kvbm_cpu_cache_override_num_blocks"),
    DISK: ("kvbm_nvme_path", "kvbm_disk_cache_gb", "kvbm_disk_cache_override_num_blocks"),
    kv_events.REMOTE: ("kvbm_object_store",),
}
_logger = logging.getLogger(__name__)
_FINGERPRINT = (
    "dtype",
    "block_size",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "tp_size",
    "tp_rank",
)
AUTO_DISK_SHARE = 0.5  # of the free space
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # files of weights
_NUM_PARTS, _SAMPLE_BYTES = 1024, 4096  # of a file of weights, for `identify_model`


@dataclass(frozen=True, kw_only=True)  # without slots, for classes with another base
class TierConfig:
    """Tiers of the KV cache, with --connector kvbm."""

    kvbm_storage_tiers: tuple[str, ...] = config.option(
        (),
        help="memories of KV blocks: hbm (the engine's own), host_dram, and nvme_ssd or object_store; by default hbm"
        " and host_dram, and the third if its path, URL or size is given",
    )
    kvbm_cpu_cache_gb: str | None = config.setting(
        None,
        help="size of the host tier in GB, or with a unit (500MB, 2GiB), or auto: a quarter of the memory that is left"
        " (default: auto)",
    )
    kvbm_cpu_cache_override_num_blocks: int | None = config.setting(
        None, help="size of the host tier in blocks", least=1
    )
    kvbm_disk_cache_gb: str | None = config.setting(
        None,
        help="size of the disk tier in GB, or with a unit, or auto: half of the free space (default: auto)",
    )
    kvbm_disk_cache_override_num_blocks: int | None = config.setting(
        None, help="size of the disk tier in blocks", least=1
    )
    kvbm_nvme_path: str | None = config.option(
        None,
        env="DYN_KVBM_DISK_CACHE_DIR",
        help="local directory of the disk tier's file; one for each worker, unless --kvbm-sharing-workers is above 1",
    )
    kvbm_object_store: str | None = config.setting(
        None,
        help="URL of an object store for blocks, instead of a disk: s3://BUCKET/PREFIX, gs://, az:// or file:///DIRECTORY;"
        " credentials come from the environment; workers may share it",
    )
    kvbm_object_num_blocks: int = config.setting(
        10_000,
        help="size of the object store tier in blocks; an object holds the blocks of 256 tokens, at most 16",
        least=1,
    )
    kvbm_sharing_workers: int = config.setting(
        1,
        help="workers of this host and user that share one host tier, and one disk tier: each writes an equal part of"
        " them and reads all; the sizes are those of the whole (1: nothing is shared)",
        least=1,
        most=slot_file.MAX_PARTS,
    )
    kvbm_shared_memory_dir: str | None = config.setting(
        None,
        help="directory of the shared host tier, in memory (default: dynamo-kv-UID in /dev/shm)",
    )
    kvbm_host_offload_filter: Literal["presence", "pass_all", "frequency", "presence_lfu"] = (
        config.option(
            "presence",
            help="blocks that are copied to host memory: presence (those that it lacks), frequency (seen twice),"
            " presence_lfu (seen several times), pass_all (as presence; known blocks count as used again)",
        )
    )
    kvbm_disk_offload_filter: Literal["presence", "pass_all", "frequency", "presence_lfu"] = (
        config.option("presence", help="blocks copied to the disk, as --kvbm-host-offload-filter")
    )
    kvbm_offload_ratio: float = config.option(
        1.0,
        help="share of the engine's cached blocks that may be in host memory as well",
        least=0,
        most=1,
    )

    @property
    def storage_tiers(self) -> tuple[kv_events.Tier, ...]:
        """Return the tiers below the engine's memory. Raises ConfigError for a combination that cannot be."""
        names = self.kvbm_storage_tiers or (
            "hbm",
            "host_dram",
            *(("nvme_ssd",) if self._has_disk else ()),
            *(("object_store",) if self.kvbm_object_store else ()),
        )
        if unknown := [name for name in names if name not in STORAGE_TIERS]:
            raise errors.ConfigError(
                f"--kvbm-storage-tiers: expected some of {', '.join(STORAGE_TIERS)}, got {unknown[0]!r}"
            )
        tiers = tuple(STORAGE_TIERS[name] for name in names)
        if kv_events.DEVICE not in tiers:
            raise errors.ConfigError(
                "--kvbm-storage-tiers: expected hbm first: the engine computes in its own memory"
            )
        if DISK in tiers and HOST not in tiers:
            raise errors.ConfigError(
                "--kvbm-storage-tiers: nvme_ssd needs host_dram, through which its blocks go; add it with a small"
                " --kvbm-cpu-cache-gb"
            )
        if DISK in tiers and self.kvbm_nvme_path is None:
            raise errors.ConfigError("nvme_ssd needs a directory: expected --kvbm-nvme-path")
        if kv_events.REMOTE in tiers and (HOST not in tiers or DISK in tiers):
            raise errors.ConfigError(
                "--kvbm-storage-tiers: object_store needs host_dram, and takes the place of nvme_ssd; leave one of the"
                " two away"
            )
        if kv_events.REMOTE in tiers and self.kvbm_object_store is None:
            raise errors.ConfigError("object_store needs a URL: expected --kvbm-object-store")
        return tuple(tier for tier in tiers if tier != kv_events.DEVICE)

    @property
    def _has_disk(self) -> bool:
        return any(
            (self.kvbm_nvme_path, self.kvbm_disk_cache_gb, self.kvbm_disk_cache_override_num_blocks)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvbmConfig(TierConfig, agents.TransferConfig):
    """Whether the KV cache has tiers."""

    connector: Literal["none", "null", "kvbm"] = config.option(
        "none",
        help="kvbm keeps KV blocks in host memory and on disk as well, so that a long prompt that comes again is"
        " loaded instead of computed; null is as none; blocks move between workers in any case",
    )

    @property
    def tier_names(self) -> tuple[kv_events.Tier, ...]:
        """Return the tiers below the engine's memory. Raises ConfigError for a combination that cannot be."""
        return self.storage_tiers if self.connector == "kvbm" else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStorage:
    """The memory of one process's host tier, and the file or object store below."""

    host: host_memory.HostMemory
    disk: storages.Storage | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTiers:
    """The tiers of one engine: what decides, and what copies."""

    cache: TieredCache
    copies: TierCopies


def open_tiers(
    settings: KvbmConfig,
    layout: descriptors.Layout,
    device: api.DeviceMemory,
    pool: pools.BlockPool,
    fingerprint: Mapping[str, str],
) -> OpenTiers | None:
    """Open the tiers that the settings name; None if there are none.

    `layout` is that of the `device`, the engine's own memory, which the pool pages; `fingerprint` says what
    computed the blocks. Raises ConfigError for sizes that do not fit, and for a file of another engine.
    """
    if HOST not in settings.tier_names:
        warn_of_unused(settings, settings.tier_names)
        return None
    storage = open_storage(
        settings,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        device_bytes=layout.num_bytes,
        fingerprint={**fingerprint, **{name: str(getattr(layout, name)) for name in _FINGERPRINT}},
    )
    cache = make_cache(
        settings,
        pool,
        host=storage.host.slots,
        disk=storage.disk.slots if storage.disk else None,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
    )
    host = storage.host
    copies = TierCopies(device.attach(host.window.view), host, storage.disk)
    return OpenTiers(cache=cache, copies=copies)


def open_storage(
    settings: TierConfig,
    *,
    block_size: int,
    block_bytes: int,
    device_bytes: int,
    fingerprint: Mapping[str, str],
    part: str = "",
) -> TierStorage:
    """Open the memory of the host tier, and the file of the disk tier if there is one.

    `device_bytes` is the engine's own memory, which counts as taken. `part` is the name of a rank, whose file lies in
    a directory of its own. Raises ConfigError for sizes that do not fit, and for a file of another engine.
    """
    warn_of_unused(settings, settings.storage_tiers)
    num_parts, reserved = settings.kvbm_sharing_workers, device_bytes
    if num_parts > 1:
        kind = {**fingerprint, "block_bytes": str(block_bytes)}
        path = host_memory.locate(settings.kvbm_shared_memory_dir, kind)
        reserved -= host_memory.count_spare_bytes(path)
    num_host = host_memory.count_host_blocks(
        settings.kvbm_cpu_cache_gb or "auto",
        settings.kvbm_cpu_cache_override_num_blocks,
        block_bytes,
        reserved,
    )
    if num_host < 1:
        raise errors.ConfigError(
            "--connector kvbm: there is no memory left for a host tier; stop other processes, or use --connector none"
        )
    _check_parts(num_host, num_parts, HOST)
    host: host_memory.HostMemory
    if num_parts > 1:
        host = host_memory.SharedHostMemory(
            path,
            kind,
            num_blocks=num_host,
            block_bytes=block_bytes,
            num_parts=num_parts,
            reserved=device_bytes,
        )
    else:
        host = host_memory.HostMemory(num_host, block_bytes, reserved=device_bytes)
    try:
        disk = _open_below(
            settings,
            block_size=block_size,
            block_bytes=block_bytes,
            fingerprint=fingerprint,
            part=part,
        )
    except errors.ConfigError:
        host.close()  # or its memory would stay until another worker starts
        raise
    return TierStorage(host=host, disk=disk)


def _open_below(
    settings: TierConfig,
    *,
    block_size: int,
    block_bytes: int,
    fingerprint: Mapping[str, str],
    part: str,
) -> storages.Storage | None:
    """Open the object store or the file below host memory; None if there is neither. Raises ConfigError."""
    if settings.kvbm_object_store is not None and kv_events.REMOTE in settings.storage_tiers:
        module = distribution.load_extra(
            "dynamo.kvbm.object_storage", feature="--kvbm-object-store", extra="objects"
        )
        objects: storages.Storage = module.ObjectStorage(
            settings.kvbm_object_store,
            {**fingerprint, "block_bytes": str(block_bytes)},
            num_blocks=settings.kvbm_object_num_blocks,
            block_size=block_size,
            part=part,
        )
        return objects
    if DISK not in settings.storage_tiers:
        return None
    assert settings.kvbm_nvme_path is not None
    directory = Path(settings.kvbm_nvme_path, part)
    num_slots = _count_disk_blocks(settings, directory, block_bytes)
    _check_parts(num_slots, settings.kvbm_sharing_workers, DISK)
    return storages.DiskFile(
        directory,
        fingerprint,
        block_bytes=block_bytes,
        num_slots=num_slots,
        num_parts=settings.kvbm_sharing_workers,
    )


def warn_of_unused(settings: TierConfig, tiers: tuple[kv_events.Tier, ...]) -> None:
    """Log which options are set though these tiers do not have theirs."""
    names = [name for tier, names in _OPTIONS.items() if tier not in tiers for name in names]
    unused = [f"--{n.replace('_', '-')}" for n in names if getattr(settings, n) is not None]
    if not tiers and {*settings.kvbm_storage_tiers} - {"hbm"}:
        unused.append(f"--kvbm-storage-tiers {','.join(settings.kvbm_storage_tiers)}")
    if unused:
        _logger.warning(
            "no effect without --connector kvbm and their tier in --kvbm-storage-tiers: %s",
            ", ".join(unused),
        )


def make_cache(
    settings: TierConfig,
    pool: pools.DevicePool,
    *,
    host: TierSlots,
    disk: TierSlots | None,
    block_size: int,
    block_bytes: int,
    loads_before_steps: bool = True,
) -> TieredCache:
    """Return the cache over these tiers, whose host tier has no usable slots yet but those of an earlier run."""
    below = DISK if DISK in settings.storage_tiers else kv_events.REMOTE
    host_tier = Tier(HOST, host.num, pool.events, first_slot=host.first, num_usable=0)
    host_tier.restore(host.stored)
    disk_tier = None
    if disk is not None:
        disk_tier = Tier(
            below,
            disk.num,
            pool.events,
            first_slot=disk.first,
            segment_blocks=disk.segment_blocks,
        )
        disk_tier.restore(disk.stored)
    return TieredCache(
        pool,
        host_tier,
        disk_tier,
        block_size=block_size,
        block_bytes=block_bytes,
        options=tier_policy.TierOptions(
            host_filter=tier_policy.FilterKind(settings.kvbm_host_offload_filter),
            disk_filter=tier_policy.FilterKind(settings.kvbm_disk_offload_filter),
            offload_ratio=settings.kvbm_offload_ratio,
        ),
        loads_before_steps=loads_before_steps,
    )


def identify_model(directory: Path) -> str:
    """Return a name of a checkpoint's content: of its config.json, and of a sample from each of its matrices.

    Training changes nearly all numbers of a matrix, so two checkpoints of one shape differ in it.
    """
    digest = xxhash.xxh3_128((directory / "config.json").read_bytes())
    # neither a folder nor a link to nothing
    weights = (each for each in directory.iterdir() if each.suffix in _WEIGHTS and each.is_file())
    for path in sorted(weights):
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes}".encode())
        with path.open("rb") as file:
            for first, end in _find_matrices(file, num_bytes):
                at = max(first, (first + end - _SAMPLE_BYTES) // 2)
                file.seek(at)
                digest.update(file.read(min(_SAMPLE_BYTES, end - at)))
    return digest.hexdigest()


def _find_matrices(file: BinaryIO, num_bytes: int) -> list[tuple[int, int]]:
    """Return where the matrices of a safetensors file begin and end; of others, whatever their name, equal parts."""
    header_bytes = int.from_bytes(file.read(8), "little")
    if file.name.endswith(_WEIGHTS[0]) and header_bytes < num_bytes:
        with contextlib.suppress(
            ValueError, TypeError, LookupError, AttributeError, RecursionError
        ):
            header = json.loads(file.read(header_bytes))
            offset = file.tell()
            spans = [
                each["data_offsets"] for name, each in header.items() if name != "__metadata__"
            ]
            return [(offset + first, offset + end) for first, end in spans]
    size = -(-num_bytes // _NUM_PARTS)
    return [(at, min(at + size, num_bytes)) for at in range(0, num_bytes, size or 1)]


def _check_parts(num_blocks: int, num_parts: int, tier: kv_events.Tier) -> None:
    if num_blocks < num_parts:
        raise errors.ConfigError(
            f"--kvbm-sharing-workers {num_parts}: expected a block for each in the tier {tier}, got {num_blocks}"
        )


def _count_disk_blocks(settings: TierConfig, directory: Path, block_bytes: int) -> int:
    size = settings.kvbm_disk_cache_gb or "auto"
    num_blocks = settings.kvbm_disk_cache_override_num_blocks
    if num_blocks is not None:
        return num_blocks
    if size == "auto" and (stored := storages.read_header(directory)) is not None:
        return stored.num_slots
    if size == "auto":
        existing = next(
            path for path in (directory, *directory.absolute().parents) if path.exists()
        )
        disk = os.statvfs(existing)
        num_blocks = int(AUTO_DISK_SHARE * disk.f_bavail * disk.f_frsize) // block_bytes
    else:
        num_blocks = host_memory.parse_size(size, "--kvbm-disk-cache-gb") // block_bytes
    if num_blocks < 1:
        raise errors.ConfigError(
            f"--kvbm-disk-cache-gb {size}: expected room for a block of {block_bytes} bytes; give more"
        )
    return num_blocks
