"""From our request to the fields of vLLM's sampling parameters, for each choice.

Each choice is a request of its own to vLLM, which would make the same of `n`: so one can be aborted alone, and a greedy
request may have several. Their prompt is computed once, as they share a prefix.

The end tokens are those of the request, not those that vLLM finds in the model's files: it is told to ignore its own
and to stop at ours. What vLLM cannot honour is refused by name.
"""

from typing import Any

from dynamo.engine.adapters import choice, guides
from dynamo.engine.adapters.vllm import connectors
from dynamo.protocols import generate


def fields(request: generate.Request, index: int, ability: guides.Ability) -> dict[str, Any]:
    """Of choice `index`; `structured_outputs` are fields themselves. Only the first is asked what all share."""
    options, stop = request.sampling_options, request.stop_conditions
    report, is_first = request.output_options, index == 0
    is_greedy = choice.is_greedy(options)
    params = connectors.encode_params(request.kv_transfer_params) if is_first else None
    return {
        "temperature": 0.0 if is_greedy else options.temperature,
        "top_p": options.top_p or 1.0,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": choice.seed(request, index),
        "logit_bias": options.logit_bias or None,
        "structured_outputs": _structured(request, ability),
        "thinking_token_budget": request.thinking.max_tokens if request.thinking else None,
        "max_tokens": stop.max_tokens,
        "min_tokens": stop.min_tokens,
        "stop_token_ids": choice.stop_ids(request),
        "ignore_eos": True,
        "logprobs": report.logprobs,
        "prompt_logprobs": report.prompt_logprobs if is_first else None,
        "detokenize": False,
        "skip_clone": True,
        "extra_args": {"kv_transfer_params": params} if params else None,
    }


def _structured(request: generate.Request, ability: guides.Ability) -> dict[str, Any] | None:
    guided = request.sampling_options.guided_decoding
    if guided is None:
        return None
    choice.refuse_resumed_shape(request, "vLLM")
    return guides.fields(guided, ability)
