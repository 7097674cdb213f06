"""Large files of a model from the hub, into its local cache: resumed where a former download ended, and verified.

`huggingface_hub` begins a file anew after each interruption, and compares no more than its length. A file whose ETag is
its SHA-256, which is so for all large ones, is therefore fetched here: into `blobs/ETAG.part`, which is checked and
then gets the name under which `snapshot_download` finds it complete. `http_get` opens a connection anew that has
brought no byte for HF_HUB_DOWNLOAD_TIMEOUT (10 s), and goes on where it was.
"""

import contextlib
import fcntl
import hashlib
import os
import queue
import re
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants, file_download
from huggingface_hub.utils import build_hf_headers, tqdm  # type: ignore[attr-defined]

PART = ".part"
_AT_ONCE = 8
_REPORT_S = 10.0  # between two lines, where the output is no terminal
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def fetch_large_files(name: str, commit: str, paths: Sequence[str], folder: Path) -> None:
    """Fetch the large ones of these files of a model into its folder of the cache.

    Raises the errors of huggingface_hub, and OSError for one that is not what its ETag says.
    """
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    waiting, ends = deque(paths), queue.SimpleQueue[BaseException | None]()

    def fetch_all() -> None:
        with contextlib.suppress(IndexError):
            while True:
                path = waiting.popleft()
                try:
                    _fetch(name, commit, path, folder / "blobs")
                except BaseException as error:  # noqa: BLE001 (raised below)
                    ends.put(error)
                else:
                    ends.put(None)

    for number in range(min(_AT_ONCE, len(paths))):
        # a daemon: after Ctrl-C, or a file that failed, nothing waits for the others
        threading.Thread(target=fetch_all, name=f"download {number}", daemon=True).start()
    try:
        for _ in paths:
            if (error := ends.get()) is not None:
                raise error
    finally:
        waiting.clear()


def _fetch(name: str, commit: str, path: str, blobs: Path) -> None:
    """Fetch one file, unless it is small or there. Of several processes one fetches it, and the others wait."""
    url = huggingface_hub.hf_hub_url(name, path, revision=commit)
    facts = huggingface_hub.get_hf_file_metadata(url)
    size, etag = facts.size or 0, facts.etag or ""
    if not _SHA256.fullmatch(etag) or not 0 < size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
        return
    headers = build_hf_headers()
    if urlsplit(facts.location).netloc != urlsplit(url).netloc:  # a CDN has credentials of its own
        headers.pop("authorization", None)
    blob, part = blobs / etag, blobs / f"{etag}{PART}"
    while not blob.exists():
        with part.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if blob.exists():  # another process had it
                break
            if not _is_at(part, file):  # another process removed it, because it was damaged
                continue
            if file.seek(0, os.SEEK_END) > size:  # the end may have moved since it was opened
                file.seek(0)
                file.truncate()
            file_download.http_get(
                facts.location,
                file,
                resume_size=file.tell(),
                headers=headers,
                expected_size=size,
                displayed_filename=path,
                tqdm_class=DownloadBar,
            )
            file.flush()
            with part.open("rb") as reader:
                digest = hashlib.file_digest(reader, "sha256").hexdigest()
            if digest != etag:
                part.unlink()
                raise OSError(f"{path}: expected the SHA-256 {etag}, got {digest}; fetch it again")
            part.rename(blob)
    part.unlink(missing_ok=True)


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Return whether an open file is the one at this path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


class DownloadBar(tqdm):  # the hub's own, which can be switched off
    """`model.safetensors [00:44:58] [████] 6.89 GiB/6.89 GiB 3.41 MiB/s (0s)`; a line every ten seconds in a log."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["bar_format"] = "{desc} [{passed}] [{bar}] {done}/{whole} {speed}/s ({left:.0f}s)"
        if not sys.stderr.isatty():
            options |= {"disable": False, "file": _Lines(), "mininterval": _REPORT_S}
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]

    @property
    def format_dict(self) -> dict[str, Any]:
        """Return what the bar is made of."""
        facts: dict[str, Any] = super().format_dict
        elapsed_s, whole = facts["elapsed"], facts["total"] or 0
        speed = facts["rate"] or ((facts["n"] - facts["initial"]) / elapsed_s if elapsed_s else 0.0)
        hours, seconds = divmod(int(elapsed_s), 3600)
        return facts | {
            "passed": f"{hours:02}:{seconds // 60:02}:{seconds % 60:02}",
            "done": _size(facts["n"]),
            "whole": _size(whole),
            "speed": _size(speed),
            "left": (whole - facts["n"]) / speed if speed else 0.0,
        }


class _Lines:
    """A file for a bar where nothing can be drawn anew: each state of it is a line."""

    def write(self, text: str) -> None:
        """Write a state as a line, and nothing for the end of the bar."""
        if line := text.strip():
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        """Let the line be seen."""
        sys.stderr.flush()


def _size(num_bytes: float) -> str:
    power = 0
    while num_bytes >= 1024 and power < len(_UNITS) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:.0f} B" if power == 0 else f"{num_bytes:.2f} {_UNITS[power]}"
