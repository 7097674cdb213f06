"""`dynamo kvbm`: look at, verify or empty the file of a disk tier while no worker uses it."""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dynamo.base import config, errors
from dynamo.kvbm import storage


@dataclass(frozen=True, slots=True, kw_only=True)
class KvbmCommandConfig:
    """Look at, verify or empty the file of a disk tier of the KV cache."""

    action: Literal["ls", "verify", "clear"] = config.option(
        flag="", help="ls: what the file holds; verify: read every block; clear: forget all"
    )
    directory: str = config.option(
        flag="", env="DYN_KVBM_DISK_CACHE_DIR", help="the worker's --kvbm-nvme-path"
    )


def run(options: KvbmCommandConfig) -> int:
    """Run the action and return the exit code: 1 if blocks are damaged. Raises ConfigError."""
    file = storage.open_stored(Path(options.directory))
    actions = {"ls": _list, "verify": _verify, "clear": _clear}
    try:
        return actions[options.action](file)
    except OSError as error:
        raise errors.EngineFailed(f"{file.path}: {error}") from error
    finally:
        file.close()


def _list(file: storage.DiskFile) -> int:
    size = file.header.block_bytes
    print(f"{file.path}: {len(file.blocks)} of {file.num_slots} blocks, {size} bytes each")
    for name, value in file.header.fingerprint.items():
        print(f"  {name}: {value}")
    return 0


def _verify(file: storage.DiskFile) -> int:
    content = memoryview(mmap.mmap(-1, file.header.block_bytes))  # whole pages, for direct reads
    num_wrong = sum(bool(file.read(slot, b, (content,))) for slot, b in file.blocks.items())
    num_intact, num_damaged = len(file.blocks) - num_wrong, num_wrong + file.num_lost
    print(f"{file.path}: {num_intact} blocks are intact, {num_damaged} are not")
    return 1 if num_damaged else 0


def _clear(file: storage.DiskFile) -> int:
    file.forget()
    print(f"{file.path}: {len(file.blocks)} blocks are forgotten")
    return 0
