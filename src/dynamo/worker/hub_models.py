"""Models of the Hugging Face hub, in its local cache: found there, downloaded, listed and removed.

With `hub_download`, the only module of the workers that imports `huggingface_hub`.
"""

import contextlib
import fnmatch
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dynamo.base import errors

try:
    import huggingface_hub.constants
    from huggingface_hub import errors as hub_errors

    from dynamo.worker import hub_download
except ValueError as error:  # it reads them as it is loaded
    raise errors.ConfigError(
        f"HF_HUB_ETAG_TIMEOUT, HF_HUB_DOWNLOAD_TIMEOUT: expected whole numbers of seconds: {error}"
    ) from error

# The hub's own tools wait 10 s; where it is down, a worker says so sooner.
HUB_TIMEOUT_S = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 5)
_ABANDONED_S = 3600.0
# A file grows, so a download is seen to move, by this much at a time: of 10 MiB a slow line brings none in minutes.
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 2**18
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
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise errors.ConfigError(
            f"model {name!r} is not in the local cache, and HF_HUB_OFFLINE forbids to download it"
        )
    sys.stderr.write(f"Looking for {name} at {huggingface_hub.constants.ENDPOINT}\n")
    folder = _folder(name)
    _remove_abandoned(folder)
    files = _files_at_hub(name, patterns)
    if on_download is not None:
        on_download(name, folder, (files and sum(files.sizes.values())) or None)
    try:
        if files is not None:
            hub_download.fetch_large_files(name, files.commit, list(files.sizes), folder)
        return Path(_snapshot(name, patterns, cached=False))
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
    return Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def _remove_abandoned(folder: Path) -> None:
    """Remove what downloads that were cut off an hour ago or earlier have left: each of them begins a file anew."""
    for path in folder.glob("blobs/*.incomplete"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()


class _HubFiles(NamedTuple):
    commit: str
    sizes: dict[str, int]  # in bytes, by path


def _files_at_hub(name: str, patterns: tuple[str, ...]) -> _HubFiles | None:
    """Return the newest commit of a model and the bytes of its files, None if the hub does not tell."""
    try:
        model = huggingface_hub.HfApi().model_info(name, files_metadata=True, timeout=HUB_TIMEOUT_S)
    except _HUB_FAILURES:  # the download says what is wrong
        return None
    sizes = {
        sibling.rfilename: sibling.size or 0
        for sibling in model.siblings or ()
        if any(fnmatch.fnmatch(sibling.rfilename, pattern) for pattern in patterns)
    }
    return _HubFiles(commit=model.sha or "main", sizes=sizes)


def _snapshot(name: str, patterns: tuple[str, ...], *, cached: bool) -> str:
    return huggingface_hub.snapshot_download(
        name,
        allow_patterns=list(patterns),
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
    """Remove a model from the hub's local cache; return the bytes that are free then. Raises ConfigError."""
    freed = 0
    for part in _folder(name).glob(f"blobs/*{hub_download.PART}"):  # of a download that was cut off
        freed += part.stat().st_size
        part.unlink()
    if name not in cached_models():
        if freed:
            return freed
        raise errors.ConfigError(f"{name!r} is not in the local cache; `dynamo list` shows what is")
    cache = huggingface_hub.scan_cache_dir()
    revisions = [
        revision.commit_hash
        for repo in cache.repos
        if repo.repo_id == name and repo.repo_type == "model"
        for revision in repo.revisions
    ]
    removal = cache.delete_revisions(*revisions)
    removal.execute()
    return freed + int(removal.expected_freed_size)
