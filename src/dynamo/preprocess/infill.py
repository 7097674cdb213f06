"""Text between a prompt and a suffix: how the families that were trained for it are asked to fill it in.

That a tokenizer has the marks does not say that its model knows what they mean, so who starts a worker says so.
"""

from collections.abc import Mapping, Sequence

from dynamo.base import errors
from dynamo.protocols import openai_completions

NONE = "none"
FORMATS: Mapping[str, str] = {
    "qwen": "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "codegemma": "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "starcoder": "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "deepseek": "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    "codestral": "[SUFFIX]{suffix}[PREFIX]{prefix}",
}


def check(name: str | None) -> None:
    """Raises ConfigError for a name that is not known."""
    if name is not None and name != NONE and name not in FORMATS:
        raise errors.ConfigError(
            f"--dyn-infill-format: expected one of {', '.join(sorted(FORMATS))}, or {NONE}, got {name!r}"
        )


def prompts(
    request: openai_completions.CompletionRequest, name: str | None
) -> Sequence[openai_completions.Prompt]:
    """What the model is to read: the prompts, around them the suffix if there is one. Raises InvalidRequest."""
    if not request.suffix:
        return request.prompts
    form = FORMATS.get(name or NONE)
    if form is None:
        raise errors.InvalidRequest(
            f"suffix: the model {request.model!r} is not known to fill in the middle; leave it out, "
            "or start its worker with --dyn-infill-format",
            param="suffix",
        )
    return [_join(form, prompt, request.suffix) for prompt in request.prompts]


def _join(form: str, prompt: openai_completions.Prompt, suffix: str) -> str:
    if not isinstance(prompt, str):
        raise errors.InvalidRequest(
            "suffix: only allowed where the prompt is a text, got token ids", param="suffix"
        )
    return form.format(prefix=prompt, suffix=suffix)
