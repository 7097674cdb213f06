"""The directory of a model's files, found from what the user typed:

    nothing, or `storyteller`    the built-in model, which ships in the package
    an existing directory        that directory
    a GGUF file                  the directory of what it says of its tokens (`gguf_model`)
    what looks like a path       refused: no such directory
    a hub name (org/name)        the local Hugging Face cache; else the hub, if it answers within seconds

Every failure is one ConfigError that says what to do; no call waits for a hub that does not answer.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from dynamo.base import distribution, errors
from dynamo.engine import native
from dynamo.engine.native import model_files
from dynamo.worker import card

BUILT_IN = "storyteller"
GGUF_SUFFIX = ".gguf"
REQUIRED = ("config.json", "tokenizer.json")
# weights, and code that an engine runs where it is told to (vLLM's --trust-remote-code)
_ENGINE_FILES = ("*.safetensors", "*.safetensors.index.json", "*.py")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_CONFIG_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
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
    from dynamo.worker import hub_models  # 0.15 s of processor time, for names of the hub alone

    patterns = _CONFIG_FILES + _ENGINE_FILES if with_weights else _CONFIG_FILES

    def is_whole(directory: Path) -> bool:
        return not _missing(directory) and (not with_weights or has_all_weights(directory))

    return _checked(hub_models.find(model, patterns, is_whole=is_whole, on_download=on_download))


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
    if missing := _missing(directory):
        raise errors.ConfigError(
            f"{directory} is no model directory: {' and '.join(missing)} missing "
            "(expected what Hugging Face's save_pretrained writes)"
        )
    return directory


def _missing(directory: Path) -> list[str]:
    return [name for name in REQUIRED if not (directory / name).is_file()]


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
