"""From our request to what SGLang's `async_generate` takes, for each choice.

Each choice is a request of its own, so that one can be aborted alone; their prompt is computed once, as they share a
prefix. SGLang stops at the model's own end tokens beside ours, or with `ignore_eos` at no token at all. What it cannot
honour is refused by name.
"""

from typing import Any, NamedTuple

from dynamo.engine.adapters import choice, guides
from dynamo.protocols import generate

_ALL = -1  # for top_k
_SHAPES = guides.Ability(has_choice=False)
_FIELD = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}  # fmt: skip


class Ability(NamedTuple):
    """How this SGLang was started."""

    has_tokenizer: bool = False
    takes_priority: bool = False
    is_low_first: bool = False  # the lower priority is served first


def plan(request: generate.Request, index: int, ability: Ability) -> dict[str, Any]:
    """Of choice `index`. Only the first is asked what all share."""
    _refuse(request, ability)
    report, is_first = request.output_options, index == 0
    scores = report.prompt_logprobs if is_first else None
    wanted = [number for number in (report.logprobs, scores) if number is not None]
    return {
        "sampling_params": _params(request, index, ability),
        "return_logprob": bool(wanted),
        "logprob_start_len": 0 if scores is not None else -1,  # from the first token, or of none
        "top_logprobs_num": max(wanted, default=0),
        "routed_dp_rank": request.data_parallel_rank,
        "priority": _priority(request, ability),
    }


def _params(request: generate.Request, index: int, ability: Ability) -> dict[str, Any]:
    options, stop = request.sampling_options, request.stop_conditions
    is_greedy = choice.is_greedy(options)
    params = {
        "temperature": 0.0 if is_greedy else options.temperature,
        "top_p": options.top_p or 1.0,
        "top_k": options.top_k or _ALL,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "sampling_seed": choice.seed(request, index),
        "logit_bias": {str(token): bias for token, bias in options.logit_bias.items()} or None,
        "max_new_tokens": stop.max_tokens,
        "min_new_tokens": stop.min_tokens,
        "stop_token_ids": choice.stop_ids(request),
        "ignore_eos": stop.ignore_eos,
    }
    return params | _shape(request)


def _shape(request: generate.Request) -> dict[str, Any]:
    guided = request.sampling_options.guided_decoding
    if guided is None:
        return {}
    choice.refuse_resumed_shape(request, "SGLang")
    said = guides.fields(guided, _SHAPES)
    return {_FIELD[name]: value for name, value in said.items() if value is not None}


def _priority(request: generate.Request, ability: Ability) -> int | None:
    """It is a hint: where SGLang does not heed it, it would refuse a request that has one."""
    if not ability.takes_priority:
        return None
    return -request.priority if ability.is_low_first else request.priority


def _refuse(request: generate.Request, ability: Ability) -> None:
    stop = request.stop_conditions
    choice.refuse(
        "SGLang", "ignore_eos", "ignores stop tokens with it, too: leave out one of them",
        is_asked=stop.ignore_eos and bool(stop.stop_token_ids),
    )  # fmt: skip
    choice.refuse(
        "SGLang", "min_tokens", "needs the tokenizer for it: start it with --load-tokenizer",
        is_asked=stop.min_tokens > 0 and not ability.has_tokenizer,
    )  # fmt: skip
    choice.refuse(
        "SGLang", "nvext.max_thinking_tokens", "has no limit for thoughts here",
        is_asked=request.thinking is not None,
    )  # fmt: skip
    choice.refuse(
        "SGLang", "kv_transfer_params", "moves blocks by its own rendezvous, which is not supported yet",
        is_asked=request.kv_transfer_params is not None,
    )  # fmt: skip
