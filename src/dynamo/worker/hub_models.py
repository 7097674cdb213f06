"""Models of the Hugging Face hub, in its local cache: found there, downloaded, listed and removed.

`huggingface_hub` begins a file anew after each interruption, and compares no more than its length. A file whose ETag is
its SHA-256, which is so for all large ones, is therefore fetched here: into `blobs/ETAG.part`, which is checked and
then gets the name under which `snapshot_download` finds it complete. `http_get` opens a connection anew that has
brought no byte for HF_HUB_DOWNLOAD_TIMEOUT (10 s), and goes on where it was.
"""

import contextlib
import fcntl
import fnmatch
import hashlib
import os
import queue
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from dynamo.base import errors

try:
    import huggingface_hub.constants
    from huggingface_hub import constants, file_download
    from huggingface_hub import errors as hub_errors
    from huggingface_hub.utils import build_hf_headers, tqdm  # type: ignore[attr-defined]
except ValueError as error:  # it reads them as it is loaded
    raise errors.ConfigError(
        f"HF_HUB_ETAG_TIMEOUT, HF_HUB_DOWNLOAD_TIMEOUT: expected whole numbers of seconds: {error}"
    ) from error

# The hub's own tools wait 10 s; where it is down, a worker says so sooner.
HUB_TIMEOUT_S = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 5)
_ABANDONED_S = 3600.0
PART = ".part"
_AT_ONCE = 8
_ORIGINAL, _CONSOLIDATED = "original/", "consolidated"  # beginnings of names of copies
_REPORT_S = 10.0  # between two lines, where the output is no terminal
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# A file grows, so a download is seen to move, by this much at a time: of 10 MiB a slow line brings none in minutes.
constants.DOWNLOAD_CHUNK_SIZE = 2**18
_HUB_FAILURES = (
    hub_errors.HTTPError,  # type: ignore[attr-defined]  # base of its HTTP client's errors, whichever client it is
    OSError,
    ValueError,
)


def find(
    name: str,
    patterns: tuple[str, ...],
    *,
    is_whole: Callable[[Path], bool],
    on_download: Callable[[str, Path, int | None], None] | None = None,
) -> Path:
    """Return the directory of a model with the files that match these patterns. Raises ConfigError.

    What the cache has is enough if it `is_whole`. Before a download `on_download` is called with the model's name, its
    folder in the cache and its bytes, if known.
    """
    with contextlib.suppress(hub_errors.LocalEntryNotFoundError, ValueError):  # not in the cache
        directory = Path(_snapshot(name, patterns, cached=True))
        if is_whole(directory):
            return directory
    if constants.HF_HUB_OFFLINE:
        raise errors.ConfigError(
            f"model {name!r} is not in the local cache, and HF_HUB_OFFLINE forbids to download it"
        )
    sys.stderr.write(f"Looking for {name} at {constants.ENDPOINT}\n")
    folder = _folder(name)
    _remove_abandoned(folder)
    files = _files_at_hub(name, patterns)
    copies = [f"{_ORIGINAL}*"] if files is None else files.copies
    if on_download is not None:
        on_download(name, folder, (files and sum(files.sizes.values())) or None)
    try:
        if files is not None:
            fetch_large_files(name, files.commit, list(files.sizes), folder)
        return Path(_snapshot(name, patterns, cached=False, copies=copies))
    except hub_errors.GatedRepoError as error:
        raise errors.ConfigError(
            f"model {name!r} needs its owner's permission: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise errors.ConfigError(
            f"no such model: neither a directory nor a hub model is called {name!r} "
            "(a private one needs HF_TOKEN)"
        ) from error
    except _HUB_FAILURES as error:
        innermost: BaseException = error
        while innermost.__cause__ is not None:
            innermost = innermost.__cause__
        reason = " ".join(str(innermost).split()) or type(innermost).__name__
        raise errors.ConfigError(
            f"model {name!r} is not in the local cache and cannot be downloaded: {reason}; "
            "give a model directory, or none for the built-in model"
        ) from error


def _folder(name: str) -> Path:
    """Return the folder of a model in the hub's local cache."""
    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def _remove_abandoned(folder: Path) -> None:
    """Remove what downloads that were cut off an hour ago or earlier have left: each of them begins a file anew."""
    for path in folder.glob("blobs/*.incomplete"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()


class _HubFiles(NamedTuple):
    commit: str
    sizes: dict[str, int]  # in bytes, by path
    copies: list[str]  # of the weights, which are not fetched


def _files_at_hub(name: str, patterns: tuple[str, ...]) -> _HubFiles | None:
    """Return the newest commit of a model and its files, None if the hub does not tell."""
    try:
        model = huggingface_hub.HfApi().model_info(name, files_metadata=True, timeout=HUB_TIMEOUT_S)
    except _HUB_FAILURES:  # the download says what is wrong
        return None
    sizes = {
        sibling.rfilename: sibling.size or 0
        for sibling in model.siblings or ()
        if any(fnmatch.fnmatch(sibling.rfilename, pattern) for pattern in patterns)
    }
    copies = _find_copies(sizes)
    for path in copies:
        del sizes[path]
    return _HubFiles(commit=model.sha or "main", sizes=sizes, copies=copies)


def _find_copies(paths: Collection[str]) -> list[str]:
    """Return the files that have the weights once more, in the form of the software of the model's makers."""
    weights = [path for path in paths if path.endswith(".safetensors") and "/" not in path]
    copies = [path for path in weights if path.startswith(_CONSOLIDATED)]
    return [
        *(path for path in paths if path.startswith(_ORIGINAL)),
        *(copies if len(copies) < len(weights) else ()),
    ]


def _snapshot(
    name: str, patterns: tuple[str, ...], *, cached: bool, copies: Sequence[str] = ()
) -> str:
    return huggingface_hub.snapshot_download(
        name,
        allow_patterns=list(patterns),
        ignore_patterns=list(copies),
        etag_timeout=HUB_TIMEOUT_S,
        local_files_only=cached,
    )


def cached_models() -> dict[str, int]:
    """Return the size in bytes of each model in the hub's local cache, by name."""
    try:
        cache = huggingface_hub.scan_cache_dir()
    except hub_errors.CacheNotFound:
        return {}
    sizes = {repo.repo_id: repo.size_on_disk for repo in cache.repos if repo.repo_type == "model"}
    return dict(sorted(sizes.items()))


def remove_cached(name: str) -> int:
    """Remove a model from the hub's local cache; return the bytes that are free then. Raises ConfigError.

    What a download that was cut off has left goes, too: the hub's own tools do not list it before a file is whole.
    """
    folder = _folder(name)
    if not folder.is_dir():
        raise errors.ConfigError(f"{name!r} is not in the local cache; `dynamo list` shows what is")
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    freed = sum(path.stat().st_size for path in files)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise errors.ConfigError(f"{folder}: cannot be removed: {error}") from error
    return freed


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
