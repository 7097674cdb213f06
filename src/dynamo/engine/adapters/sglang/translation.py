"""Translation of one choice between our request and output and those of SGLang; the load of a rank.

Each choice is a request of its own, so that one can be aborted alone; their prompt is computed once, as they share a
prefix. SGLang stops at the model's own end tokens beside ours, or with `ignore_eos` at no token at all. An option that
SGLang cannot honour is refused by name.

A result is a map of `output_ids` and `meta_info`. With `incremental_streaming_output` tokens and their logprobs are
only the new ones. A logprob is (value, token, text); those of a prompt begin with (None, token, text), as nothing
predicts the first token.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.adapters import guided_decoding, translation
from dynamo.protocols import generate

_BAD_REQUEST, _UNAVAILABLE = 400, 503
_ALL_TOKENS = -1  # for top_k
_GUIDED_SUPPORT = guided_decoding.GuidedSupport(has_choice=False)
_GUIDED_FIELDS = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}


class SglangFeatures(NamedTuple):
    """Features of SGLang that depend on how it was started."""

    has_tokenizer: bool = False
    has_priority: bool = False
    is_low_first: bool = False  # the lower priority is served first


def generate_arguments(
    request: generate.Request, index: int, features: SglangFeatures
) -> dict[str, Any]:
    """Return the arguments of SGLang's `async_generate` for choice `index`. Raises InvalidRequest.

    Prompt logprobs are the first choice's only.
    """
    _refuse_unsupported(request, features)
    report = request.output_options
    prompt_logprobs = report.prompt_logprobs if index == 0 else None
    top_counts = [count for count in (report.logprobs, prompt_logprobs) if count is not None]
    priority = -request.priority if features.is_low_first else request.priority
    return {
        "sampling_params": _sampling_params(request, index),
        "return_logprob": bool(top_counts),
        "logprob_start_len": 0 if prompt_logprobs is not None else -1,  # from the first, or none
        "top_logprobs_num": max(top_counts, default=0),
        "routed_dp_rank": request.data_parallel_rank,
        # SGLang without priorities refuses a request that has one; ours is only a hint.
        "priority": priority if features.has_priority else None,
    }


def _sampling_params(request: generate.Request, index: int) -> dict[str, Any]:
    options = request.sampling_options
    params = {
        **translation.sampling_fields(request, index, "sglang"),
        "top_k": options.top_k or _ALL_TOKENS,
        "logit_bias": {str(token): bias for token, bias in options.logit_bias.items()} or None,
        "ignore_eos": request.stop_conditions.ignore_eos,
    }
    if options.guided_decoding is None:
        return params
    translation.refuse_resumed_guided(request, "SGLang")
    fields = guided_decoding.structured_output_fields(options.guided_decoding, _GUIDED_SUPPORT)
    named = {_GUIDED_FIELDS[name]: value for name, value in fields.items() if value is not None}
    return params | named


def _refuse_unsupported(request: generate.Request, features: SglangFeatures) -> None:
    stop = request.stop_conditions
    translation.refuse_param(
        "SGLang", "ignore_eos", "ignores stop tokens with it, too: leave out one of them",
        is_used=stop.ignore_eos and bool(stop.stop_token_ids),
    )  # fmt: skip
    translation.refuse_param(
        "SGLang", "min_tokens", "needs the tokenizer for it: start it with --load-tokenizer",
        is_used=stop.min_tokens > 0 and not features.has_tokenizer,
    )  # fmt: skip
    translation.refuse_param(
        "SGLang", "nvext.max_thinking_tokens", "has no limit for thoughts here",
        is_used=request.thinking is not None,
    )  # fmt: skip
    translation.refuse_param(
        "SGLang", "kv_transfer_params", "moves blocks by its own rendezvous, which is not supported yet",
        is_used=request.kv_transfer_params is not None,
    )  # fmt: skip


def translate_output(
    result: Mapping[str, Any], index: int, request: generate.Request, *, is_first: bool
) -> generate.Output:
    """Convert a result of choice `index`; `is_first` marks the request's first one.

    Raises InvalidRequest, Overloaded or EngineFailed if SGLang gave the request up.
    """
    meta, tokens = result["meta_info"], tuple(result["output_ids"])
    finish, report = meta["finish_reason"], request.output_options
    if finish is None and not is_first and report == translation.TOKENS_ONLY:
        return generate.Output(tokens, None, index)
    finish_reason, stop_reason = _finish(finish, request)
    # SGLang repeats the prompt's logprobs with every result; we report them with the choice's first.
    is_beginning = meta["completion_tokens"] == len(tokens)
    prompt_logprobs = report.prompt_logprobs if is_beginning and index == 0 else None
    return generate.Output(
        tokens,
        finish_reason,
        index,
        logprobs=_logprobs(meta, "output", report.logprobs),
        cached_tokens=meta["cached_tokens"] if is_first else None,
        stop_reason=stop_reason,
        prompt_logprobs=_logprobs(meta, "input", prompt_logprobs, skip=1),
    )


def _finish(
    finish: Mapping[str, Any] | None, request: generate.Request
) -> tuple[generate.FinishReason | None, int | str | None]:
    if finish is None:
        return None, None
    match finish["type"]:
        case "length":
            return generate.FinishReason.LENGTH, None
        case "stop":
            matched = finish["matched"]
            is_ours = matched in request.stop_conditions.stop_token_ids
            return translation.stop_finish(request, matched if is_ours else None)
    message = f"SGLang: {finish.get('message') or finish['type']}"
    if finish.get("status_code") == _BAD_REQUEST:
        raise errors.InvalidRequest(message)
    if finish.get("status_code") == _UNAVAILABLE:
        raise errors.Overloaded(message)
    raise errors.EngineFailed(message)


def _logprobs(
    meta: Mapping[str, Any], side: str, num_top: int | None, *, skip: int = 0
) -> tuple[generate.TokenLogprobs, ...] | None:
    """Convert the logprobs of the "input" or "output" tokens, without the first `skip`; the likeliest come sorted."""
    if num_top is None:
        return None
    chosen = meta[f"{side}_token_logprobs"][skip:]
    top = meta.get(f"{side}_top_logprobs", [])[skip:] if num_top else []
    return tuple(
        generate.TokenLogprobs(
            entry[0],
            tuple(
                generate.TopLogprob(token, value) for value, token, _ in (likely or ())[:num_top]
            ),
        )
        for entry, likely in zip(chosen, top or [()] * len(chosen), strict=True)
    )


def rank_load(snapshot: Any, facts: api.EngineFacts) -> translation.RankLoad:
    """Return the load of a rank from its LoadSnapshot, which is None before its first step."""
    if snapshot is None:
        return translation.RankLoad()
    return translation.RankLoad(
        num_running=snapshot.num_running_reqs,
        num_waiting=snapshot.num_waiting_reqs,
        num_blocks=snapshot.num_used_tokens // facts.kv_block_size,
        hit_rate=snapshot.cache_hit_rate,
    )
