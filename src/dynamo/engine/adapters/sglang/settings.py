"""What we ask about SGLang beyond its own flags. Importable without SGLang: `--help` must work everywhere."""

from dataclasses import dataclass

from dynamo.base import config


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
    """The SGLang engine."""

    load_tokenizer: bool = config.option(
        False,
        help="let SGLang load the model's tokenizer: guided answers and min_tokens need it; it also makes text, which"
        " nobody reads",
    )
    engine_args: tuple[str, ...] = config.rest(
        help="All flags of SGLang's engine are taken as well (`sglang serve --help` lists them),"
        " like --context-length or --tp-size.",
    )
