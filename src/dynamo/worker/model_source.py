"""The directory of a model's files, found from what the user typed:

    nothing, or `storyteller`    the built-in model, which ships in the package
    an existing directory        that directory
    a GGUF file                  the directory of what it says of its tokens (`gguf_model`)
    what looks like a path       refused: no such directory
    a hub name (org/name)        the local Hugging Face cache; else the hub, if it answers within seconds

With `hub_download`, the only module that imports `huggingface_hub`. Every failure is one ConfigError that says what to
do; no call waits for a hub that does not answer.
"""

import contextlib
import fnmatch
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import huggingface_hub.constants
from huggingface_hub import errors as hub_errors

from dynamo.base import distribution, errors
from dynamo.engine import native
from dynamo.engine.native import model_files
from dynamo.worker import card, hub_download

BUILT_IN = "storyteller"
GGUF_SUFFIX = ".gguf"
HUB_TIMEOUT_S = 5.0
_ABANDONED_S = 3600.0
# A file grows, so a download is seen to move, by this much at a time: of 10 MiB a slow line brings none in minutes.
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 2**18
REQUIRED = ("config.json", "tokenizer.json")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_CONFIG_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_HUB_FAILURES = (
    hub_errors.HTTPError,  # type: ignore[attr-defined]  # base of its HTTP client's errors, whichever client it is
    OSError,
    ValueError,
)
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


OnDownload = Callable[[str, Path, int | None], None]


def resolve(
    model: str | None, *, with_weights: bool = True, on_download: OnDownload | None = None
) -> Path:
    """Return the directory of a model; downloads it if needed. Raises ConfigError.

    Before a download `on_download` is called with the model's name, its folder in the cache and its bytes, if known.
    """
    if model in (None, "", BUILT_IN):
        return built_in()
    assert model is not None
    path = _path_of(model)
    if path.is_dir():
        return _checked(path)
    if path.is_file() and path.suffix == GGUF_SUFFIX:
        reader = distribution.load_extra(
            "dynamo.engine.adapters.llamacpp.gguf_model", feature="a GGUF file", extra="llamacpp"
        )
        directory: Path = reader.unpack(path, card.FILES)
        return directory
    if path.exists():
        raise errors.ConfigError(
            f"{model} is a file; expected a model directory, a GGUF file or a hub name"
        )
    if path.suffix == GGUF_SUFFIX:
        raise errors.ConfigError(
            f"no such file: {model} (expected a GGUF file, or a model directory)"
        )
    if model.startswith(("/", ".", "~")) or not _HUB_NAME.fullmatch(model):
        raise errors.ConfigError(
            f"no such directory: {model} (expected a model directory, or a hub name like Qwen/Qwen3-0.6B)"
        )
    return _checked(_from_hub(model, with_weights=with_weights, on_download=on_download))


def _path_of(model: str) -> Path:
    """Return the path that a model may be. Raises ConfigError for one that cannot be looked at."""
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: `~name` of no user
        reason = getattr(error, "strerror", None) or f"{model.partition('/')[0]} is no user's home"
        raise errors.ConfigError(
            f"no such directory: {model} ({reason}; expected a model directory, or a hub name like Qwen/Qwen3-0.6B)"
        ) from error
    return path


def built_in() -> Path:
    """Return the directory of the built-in model."""
    return _checked(Path(native.__path__[0]) / BUILT_IN)


def task(requested_task: str, directory: Path) -> str:
    """Return `generate` or `encoders`: the requested task, or for `auto` the one that the files show."""
    if requested_task != "auto":
        return requested_task
    if directory.suffix == GGUF_SUFFIX:
        return "generate"
    embeds = model_files.is_sentence_transformer(directory) or model_files.is_encoder(directory)
    return "embed" if embeds else "generate"


def display_name(model: str | None) -> str:
    """Return the default name of a model for clients: its directory's, its GGUF file's or its hub name.

    Raises ConfigError.
    """
    if not model:
        return BUILT_IN
    path = _path_of(model)
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else model


def aliases(model: str | None) -> tuple[str, ...]:
    """Return further names of a model: as it was typed, that without `./`, and the last part of a hub name."""
    if not model:
        return ()
    names = dict.fromkeys((model, os.path.normpath(model), Path(model).name))
    return tuple(name for name in names if name not in ("", ".", "..", display_name(model)))


def _checked(directory: Path) -> Path:
    missing = [name for name in REQUIRED if not (directory / name).is_file()]
    if missing:
        raise errors.ConfigError(
            f"{directory} is no model directory: {' and '.join(missing)} missing "
            "(expected what Hugging Face's save_pretrained writes)"
        )
    return directory


def has_all_weights(directory: Path) -> bool:
    """Return False if files of weights are missing, as after a download that was cut off.

    The names of files say how many there are (model-00001-of-00004.safetensors).
    """
    names = {path.name for path in directory.iterdir()}
    for match in filter(None, map(_SHARD.fullmatch, names)):
        head, number, count = match.groups()
        for shard in range(1, int(count) + 1):
            if f"{head}-{shard:0{len(number)}}-of-{count}.safetensors" not in names:
                return False
    return any(name.endswith(_WEIGHT_SUFFIXES) for name in names)


def _from_hub(name: str, *, with_weights: bool, on_download: OnDownload | None) -> Path:
    patterns = _CONFIG_FILES + _WEIGHTS if with_weights else _CONFIG_FILES
    try:
        directory = _checked(Path(_snapshot(name, patterns, cached=True)))
        if not with_weights or has_all_weights(directory):
            return directory
    except (errors.ConfigError, hub_errors.LocalEntryNotFoundError, ValueError):
        pass  # not in the cache, or not all of it
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
    if name == BUILT_IN:
        raise errors.ConfigError(f"{name} is built in: expected a model that was downloaded")
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
