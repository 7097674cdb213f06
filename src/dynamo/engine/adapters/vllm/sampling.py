"""From our request to the fields of vLLM's sampling parameters, for each choice.

Each choice is a request of its own to vLLM, which would make the same of `n`: so one can be aborted alone, and a greedy
request may have several. Their prompt is computed once, as they share a prefix.

The end tokens are those of the request, not those that vLLM finds in the model's files: it is told to ignore its own
and to stop at ours. What vLLM cannot honour is refused by name.
"""

from typing import Any

from dynamo.base import errors
from dynamo.engine.adapters import guides
from dynamo.protocols import generate

_MAX_SEED = 2**63
_RESUMED_STEP = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio: far from every choice's seed


def fields(request: generate.Request, index: int, ability: guides.Ability) -> dict[str, Any]:
    """Of choice `index`; `structured_outputs` are fields themselves. Only the first is asked what all share."""
    options, stop = request.sampling_options, request.stop_conditions
    report, is_first = request.output_options, index == 0
    is_greedy = options.temperature == 0 or options.top_p == 0
    moves = request.kv_transfer_params if is_first else None
    return {
        "temperature": 0.0 if is_greedy else options.temperature,
        "top_p": options.top_p or 1.0,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": _seed(request, index),
        "logit_bias": options.logit_bias or None,
        "structured_outputs": _structured(request, ability),
        "thinking_token_budget": request.thinking.max_tokens if request.thinking else None,
        "max_tokens": stop.max_tokens,
        "min_tokens": stop.min_tokens,
        "stop_token_ids": _stop_ids(request),
        "ignore_eos": True,
        "logprobs": report.logprobs,
        "prompt_logprobs": report.prompt_logprobs if is_first else None,
        "detokenize": False,
        "skip_clone": True,
        "extra_args": {"kv_transfer_params": moves} if moves else None,
    }


def _stop_ids(request: generate.Request) -> list[int]:
    stop = request.stop_conditions
    return [*stop.stop_token_ids, *(() if stop.ignore_eos else request.eos_token_ids)]


def _seed(request: generate.Request, index: int) -> int | None:
    """As vLLM counts the choices of a request; one that goes on must not draw again what it has drawn before."""
    seed = request.sampling_options.seed
    if seed is None:
        return None
    return (seed + request.first_choice + index + request.num_resumed * _RESUMED_STEP) % _MAX_SEED


def _structured(request: generate.Request, ability: guides.Ability) -> dict[str, Any] | None:
    guided = request.sampling_options.guided_decoding
    if guided is None:
        return None
    if request.num_resumed:
        raise errors.InvalidRequest(
            f"{guided.param}: vLLM cannot go on with a guided answer that another worker began",
            param=guided.param,
        )
    return guides.fields(guided, ability)
