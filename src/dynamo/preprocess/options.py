"""From the parameters of a request, a model's defaults and its limits to how to sample and when to stop.

Of several places that say something, the first counts: the request's root, its `nvext`, the model's files, OpenAI's
default.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from dynamo.base import errors
from dynamo.preprocess import generation_defaults
from dynamo.protocols import generate, model_errors, openai_embeddings, openai_fields

T = TypeVar("T")
MIN_TEXT = 2**18  # characters that any text may have, whatever the context
CHARS_PER_TOKEN = 16  # more than any language has on average; three to five are usual


def sampling(
    request: openai_fields.GenerationFields,
    defaults: generation_defaults.GenerationDefaults,
    vocab_size: int,
    guided: generate.GuidedDecoding | None = None,
) -> generate.SamplingOptions:
    """How to draw tokens. Raises InvalidRequest."""
    extensions = request.extensions
    top_k = _first(request.top_k, extensions.top_k, defaults.top_k, default=0)
    if request.logit_bias:
        check_ids(request.logit_bias, vocab_size, "logit_bias")
    return generate.SamplingOptions(
        n=request.num_drawn,
        temperature=0.0
        if extensions.greed_sampling
        else _first(request.temperature, defaults.temperature, default=1.0),
        top_k=max(top_k, 0),
        top_p=_first(request.top_p, defaults.top_p, default=1.0),
        min_p=_first(request.min_p, defaults.min_p, default=0.0),
        repetition_penalty=_first(
            request.repetition_penalty,
            extensions.repetition_penalty,
            defaults.repetition_penalty,
            default=1.0,
        ),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=request.seed,
        logit_bias=request.logit_bias or {},
        guided_decoding=guided,
    )


def output(request: openai_fields.GenerationFields) -> generate.OutputOptions:
    """What the engine shall report. To choose the best of several answers takes their log probabilities."""
    asked = request.num_logprobs
    return generate.OutputOptions(
        logprobs=0 if asked is None and request.is_chosen else asked,
        prompt_logprobs=asked if request.is_echoed else None,
    )


def stop_conditions(
    request: openai_fields.GenerationFields, max_tokens: int, vocab_size: int
) -> generate.StopConditions:
    """When to end. Raises InvalidRequest."""
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise errors.InvalidRequest(
            f"min_tokens: expected at most the {max_tokens} tokens that may come, got {min_tokens}",
            param="min_tokens",
        )
    if request.stop_token_ids:
        check_ids(request.stop_token_ids, vocab_size, "stop_token_ids")
    return generate.StopConditions(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=request.stops,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=_first(request.ignore_eos, request.extensions.ignore_eos, default=False),
    )


def answer_len(
    *, asked: int | None, default: int | None, prompt_len: int, context_length: int, param: str
) -> int:
    """How many tokens may come: what was asked, else the default, and never more than fits. Raises RequestError."""
    if not prompt_len:
        raise errors.InvalidRequest(f"{param}: expected at least one token, got none", param=param)
    left = context_length - prompt_len
    if asked is not None and asked > left:
        raise model_errors.ContextTooLong(
            f"This model's maximum context length is {context_length} tokens. However, you requested "
            f"{prompt_len + asked} tokens ({prompt_len} in the {param}, {asked} in the completion). "
            f"Please reduce the length of the {param} or completion.",
            param=param,
        )
    if left < 1:
        raise model_errors.ContextTooLong(
            f"This model's maximum context length is {context_length} tokens, prompt and completion "
            f"together. However, your {param} resulted in {prompt_len} tokens. "
            f"Please reduce the length of the {param}.",
            param=param,
        )
    return min(_first(asked, default, default=left), left)


def check_text(length: int, context_length: int, param: str) -> None:
    """Refuse so many characters (or token ids) before they are worked on, where they cannot fit the context.

    A tokenizer takes 100 bytes and a microsecond for each.
    How many characters a token has at most cannot be known (some tokenizers make one of a whole run of blanks), so the
    bound is generous: texts to which it applies are at least three times too long. Raises ContextTooLong.
    """
    most = max(MIN_TEXT, context_length * CHARS_PER_TOKEN)
    if length > most:
        raise model_errors.ContextTooLong(
            f"This model's maximum context length is {context_length} tokens. However, your {param} has the "
            f"length {length}; expected at most {most} characters or ids. Please reduce the length of the {param}.",
            param=param,
        )


def check_messages(num_messages: int, context_length: int, param: str) -> None:
    """Refuse more messages than there is room for tokens before they are rendered. Raises ContextTooLong."""
    if num_messages > context_length:
        raise model_errors.ContextTooLong(
            f"This model's maximum context length is {context_length} tokens. However, your {param} "
            f"has {num_messages} parts, of at least one token each. Please reduce their number.",
            param=param,
        )


def check_inputs(lengths: Sequence[int], context_length: int) -> None:
    """Whether inputs of so many tokens can be embedded. Raises RequestError."""
    for number, length in enumerate(lengths):
        if not length:
            raise errors.InvalidRequest(
                f"input: expected at least one token in each, got none in number {number}",
                param="input",
            )
        if length > context_length:
            raise model_errors.ContextTooLong(
                f"This model's maximum context length is {context_length} tokens. However, input number "
                f"{number} has {length} tokens. Please reduce its length.",
                param="input",
            )
    if sum(lengths) > openai_embeddings.MAX_TOKENS:
        raise errors.InvalidRequest(
            f"input: expected at most {openai_embeddings.MAX_TOKENS} tokens in all inputs together, "
            f"got {sum(lengths)}",
            param="input",
        )


def check_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest if one is no token of the model."""
    highest, lowest = max(token_ids, default=0), min(token_ids, default=0)
    if highest >= vocab_size or lowest < 0:
        wrong = highest if highest >= vocab_size else lowest
        raise errors.InvalidRequest(
            f"{param}: expected token ids from 0 to {vocab_size - 1}, got {wrong}", param=param
        )


def _first(*values: T | None, default: T) -> T:
    """The first that is not None."""
    for value in values:
        if value is not None:
            return value
    return default
