"""What we ask about vLLM beyond its own flags. Importable without vLLM: `--help` must work everywhere."""

from dataclasses import dataclass

from dynamo.base import config


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """The vLLM engine."""

    connector: tuple[str, ...] | None = config.option(
        None,
        help="how KV blocks move between workers: nixl, lmcache, none, or the class of a connector of vLLM's; several"
        " are asked in order; --kv-transfer-config says it in full (default: nixl where it is"
        " installed, but none with --enable-sleep-mode)",
    )
    lora_modules: tuple[str, ...] = config.option(
        (), help="LoRA adapters that can be asked for, each NAME=DIRECTORY; with --enable-lora"
    )
    engine_args: tuple[str, ...] = config.rest(
        help="All flags of vLLM's engine are taken as well (`vllm serve --help=all` lists them),"
        " like --max-model-len or --tensor-parallel-size.",
    )
