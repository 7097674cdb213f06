"""The worker's settings for SGLang beyond SGLang's own flags, and the supported releases.

Importable without SGLang, because `--help` must work everywhere.
"""

from dataclasses import dataclass

from dynamo.base import config, distribution
from dynamo.engine.adapters import startup

SGLANG = startup.SupportedReleases(
    name="SGLang",
    package="sglang",
    install_hint=f"{distribution.install_command('sglang')} (it needs a GPU)",
    oldest=(0, 5),
    newest=(0, 5),
)
check_installed = SGLANG.check_installed


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
    """The SGLang engine."""

    load_tokenizer: bool = config.option(
        False,
        help="let SGLang load the model's tokenizer, which guided decoding and min_tokens need; SGLang then also"
        " makes text, which is discarded",
    )
    engine_args: tuple[str, ...] = config.rest(
        help="All flags of SGLang's engine are taken as well (`sglang serve --help` lists them),"
        " like --context-length or --tp-size.",
    )
