"""Checks of a request before an engine accepts it, so that an invalid one cannot fail a step and harm other requests.

The frontend has refused most of these already, with its own messages; but an engine may have other callers.
"""

import math
from collections.abc import Callable
from typing import Any

from dynamo.base import errors
from dynamo.engine import api
from dynamo.protocols import blocks, generate, model_errors

_CHOICES = range(2**32)
_SEEDS = range(-(2**63), 2**64)
# Allowed values of sampling options, in words and as a test.
_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("at least 0", lambda x: 0 <= x < math.inf),
    "top_p": ("from 0 (the likeliest token) to 1", lambda x: 0 <= x <= 1),
    "top_k": ("at least 0", lambda x: x >= 0),
    "min_p": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("above 0", lambda x: 0 < x < math.inf),
    "presence_penalty": ("a finite number", math.isfinite),
    "frequency_penalty": ("a finite number", math.isfinite),
    "seed": ("a whole number of 64 bits", lambda x: x is None or x in _SEEDS),
}


def check(request: generate.Request, facts: api.EngineFacts, *, vocab_size: int | None) -> None:
    """Raise RequestError if no engine with these facts can serve the request, WorkerLost if another worker may.

    With `vocab_size` None any token id is accepted.
    """
    _check_prompt(request, facts.context_length)
    _check_resumed(request)
    _check_sampling(request.sampling_options, facts.max_num_seqs)
    if vocab_size is not None:
        _check_tokens(request, vocab_size)
    max_tokens = request.stop_conditions.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise _invalid("max_tokens", "at least 1", max_tokens)
    for name in ("logprobs", "prompt_logprobs"):
        num_logprobs = getattr(request.output_options, name)
        if num_logprobs is not None and not 0 <= num_logprobs <= facts.max_top_logprobs:
            raise _invalid(name, f"from 0 to {facts.max_top_logprobs}", num_logprobs)
    _check_guided(request, facts)
    if request.lora_name not in (None, *facts.lora_names):
        names = ", ".join(facts.lora_names) or "none"
        raise errors.WorkerLost(  # the caller has read a model card that is no longer current
            f"this engine serves the LoRA adapters {names}; {request.lora_name!r} was asked for"
        )
    if request.data_parallel_rank not in (None, *range(facts.data_parallel_size)):
        raise _invalid(
            "data_parallel_rank", f"below {facts.data_parallel_size}", request.data_parallel_rank
        )


def _check_guided(request: generate.Request, facts: api.EngineFacts) -> None:
    guided = request.sampling_options.guided_decoding
    if guided is None:
        return
    if not facts.supports_guided:
        raise errors.InvalidRequest(
            f"{guided.param}: this engine has no guided decoding", param=guided.param
        )
    if not request.eos_token_ids:
        raise _invalid("eos_token_ids", "at least one, with which a guided answer can end", ())


def _check_prompt(request: generate.Request, context_length: int) -> None:
    if len(request.token_ids) % blocks.TOKEN_BYTES or not request.token_ids:
        raise errors.InvalidRequest(
            "the prompt must be at least one token, packed as u32;"
            f" got {len(request.token_ids)} bytes",
            param="prompt",
        )
    if request.prompt_len >= context_length:
        raise model_errors.ContextTooLong(
            f"the prompt has {request.prompt_len} tokens; at most {context_length - 1} fit here,"
            f" as prompt and answer share a context of {context_length} tokens",
            param="prompt",
        )


def _check_resumed(request: generate.Request) -> None:
    if not 0 <= request.num_resumed < request.prompt_len:
        raise _invalid("num_resumed", f"below {request.prompt_len}", request.num_resumed)
    if request.first_choice not in _CHOICES:
        raise _invalid("first_choice", f"below {len(_CHOICES)}", request.first_choice)


def _check_sampling(options: generate.SamplingOptions, max_num_seqs: int) -> None:
    if not 1 <= options.n <= max_num_seqs:
        raise _invalid("n", f"from 1 to {max_num_seqs}", options.n)
    for name, (expected, is_allowed) in _ALLOWED.items():
        value = getattr(options, name)
        if not is_allowed(value):
            raise _invalid(name, expected, value)
    for bias in options.logit_bias.values():
        if not math.isfinite(bias):
            raise _invalid("logit_bias", "finite numbers", bias)


def _check_tokens(request: generate.Request, vocab_size: int) -> None:
    named = {
        "prompt": blocks.unpack(request.token_ids),
        "logit_bias": request.sampling_options.logit_bias,
        "stop_token_ids": request.stop_conditions.stop_token_ids,
        "eos_token_ids": request.eos_token_ids,
    }
    for param, token_ids in named.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            worst = max(token_ids) if min(token_ids) >= 0 else min(token_ids)
            raise _invalid(param, f"token ids from 0 to {vocab_size - 1}", worst)


def _invalid(param: str, expected: str, value: object) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"{param}: expected {expected}, got {value!r}", param=param)
