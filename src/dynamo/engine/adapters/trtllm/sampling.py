"""From our request to the fields of TensorRT-LLM's sampling parameters, for each choice.

Each choice is a request of its own, so that one can be aborted alone, and greedy ones may be several. TensorRT-LLM
knows one end token, which alone it can hold back (`min_tokens`); all others are stop words. What it cannot honour is
refused by name.
"""

from typing import Any

from dynamo.engine.adapters import choice, guides
from dynamo.protocols import generate

_NONE = -1  # no end token
_NAME = "TensorRT-LLM"
_SHAPES = guides.Ability(has_choice=False)


def fields(request: generate.Request, index: int, context_length: int) -> dict[str, Any]:
    """Of choice `index`."""
    ends = () if request.stop_conditions.ignore_eos else request.eos_token_ids
    stops = [*ends[1:], *request.stop_conditions.stop_token_ids]
    _refuse(request, stops)
    stop, report = request.stop_conditions, request.output_options
    room = context_length - request.prompt_len
    return {
        **_draw(request.sampling_options),
        "seed": choice.seed(request, index),
        "max_tokens": min(stop.max_tokens or room, room),
        "min_tokens": stop.min_tokens or None,
        "end_id": ends[0] if ends else _NONE,
        "stop_token_ids": stops or None,
        "include_stop_str_in_output": True,  # the token that ends an answer belongs to it
        "logprobs": None if report.logprobs is None else max(1, report.logprobs),
        "guided_decoding": _shape(request),
        "detokenize": False,
    }


def _draw(options: generate.SamplingOptions) -> dict[str, Any]:
    penalties = {
        "repetition_penalty": options.repetition_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }
    if choice.is_greedy(options):
        return {"top_k": 1, **penalties}
    return {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,  # 0: all, with both
        "min_p": options.min_p or None,
        **penalties,
    }


def _shape(request: generate.Request) -> dict[str, Any] | None:
    guided = request.sampling_options.guided_decoding
    if guided is None:
        return None
    choice.refuse_resumed_shape(request, _NAME)
    said = guides.fields(guided, _SHAPES)
    return {name: value for name, value in said.items() if value is not None}


def _refuse(request: generate.Request, stops: list[int]) -> None:
    stop = request.stop_conditions
    choice.refuse(
        _NAME, "min_tokens", "can hold back one end token only, and this request may end with others",
        is_asked=stop.min_tokens > 0 and bool(stops),
    )  # fmt: skip
    choice.refuse(
        _NAME, "logit_bias", "is not told of it here",
        is_asked=bool(request.sampling_options.logit_bias),
    )  # fmt: skip
    choice.refuse(
        _NAME, "prompt_logprobs", "is not asked for them here",
        is_asked=request.output_options.prompt_logprobs is not None,
    )  # fmt: skip
    choice.refuse(
        _NAME, "nvext.max_thinking_tokens", "has no limit for thoughts here",
        is_asked=request.thinking is not None,
    )  # fmt: skip
    choice.refuse(
        _NAME, "kv_transfer_params", "moves blocks in its own words, which is not supported yet",
        is_asked=request.kv_transfer_params is not None,
    )  # fmt: skip
