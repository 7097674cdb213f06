"""Fill-in-the-middle prompts: how a model family is asked for the text between a prompt and a suffix.

The marks in a tokenizer do not prove that its model was trained on them, so the operator names the format at the
worker (`--dyn-infill-format`).
"""

from collections.abc import Mapping, Sequence

from dynamo.base import errors
from dynamo.preprocess import inputs

NONE = "none"
FORMATS: Mapping[str, str] = {
    "qwen": "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "codegemma": "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "starcoder": "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "deepseek": "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    "codestral": "[SUFFIX]{suffix}[PREFIX]{prefix}",
}


def check(name: str | None) -> None:
    """Raise ConfigError for an unknown format."""
    if name is not None and name != NONE and name not in FORMATS:
        raise errors.ConfigError(
            f"--dyn-infill-format: expected one of {', '.join(sorted(FORMATS))}, or {NONE}, got {name!r}"
        )


def join_prompts(
    prompts: Sequence[inputs.Prompt], suffix: str | None, format_name: str | None, model: str
) -> Sequence[inputs.Prompt]:
    """Return the prompts that the model reads, each with the suffix if there is one. Raises InvalidRequest."""
    if not suffix:
        return prompts
    template = FORMATS.get(format_name or NONE)
    if template is None:
        raise errors.InvalidRequest.of_param(
            "suffix",
            f"the model {model!r} is not known to fill in the middle; leave it out, "
            "or start its worker with --dyn-infill-format",
        )
    joined = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise errors.InvalidRequest.of_param(
                "suffix", "only allowed where the prompt is a text, got token ids"
            )
        joined.append(template.format(prefix=prompt, suffix=suffix))
    return joined
