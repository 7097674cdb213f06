"""Translation of one choice between our request and output and those of TensorRT-LLM; the load from its statistics.

Each choice is a request of its own, so that one can be aborted alone, and greedy ones may be several. TensorRT-LLM
knows one end token, which alone it can hold back (`min_tokens`); all others are stop words. An option that it cannot
honour is refused by name.

A result is a `RequestOutput` with one `CompletionOutput`, and the same object after every step: only its
`token_ids_diff` and `logprobs_diff` are new.
"""

from collections.abc import Mapping
from typing import Any

from dynamo.base import errors
from dynamo.engine.adapters import guided_decoding, translation
from dynamo.protocols import generate

_NO_END_TOKEN = -1
_NAME = "TensorRT-LLM"
_GUIDED_SUPPORT = guided_decoding.GuidedSupport(has_choice=False)


def sampling_fields(request: generate.Request, index: int, context_length: int) -> dict[str, Any]:
    """Return the fields of TensorRT-LLM's SamplingParams for choice `index`. Raises InvalidRequest."""
    options, stop, report = (
        request.sampling_options,
        request.stop_conditions,
        request.output_options,
    )
    end_ids = () if stop.ignore_eos else request.eos_token_ids
    stop_ids = [*end_ids[1:], *stop.stop_token_ids]
    _refuse_unsupported(request, stop_ids)
    max_output = context_length - request.prompt_len
    guided = None
    if options.guided_decoding is not None:
        translation.refuse_resumed_guided(request, _NAME)
        fields = guided_decoding.structured_output_fields(options.guided_decoding, _GUIDED_SUPPORT)
        guided = {name: value for name, value in fields.items() if value is not None}
    sampling = translation.sampling_fields(request, index, "trtllm")
    sampling["min_p"] = options.min_p or None
    if translation.is_greedy(options):
        for name in ("temperature", "top_p", "min_p"):
            del sampling[name]
        sampling["top_k"] = 1
    return {  # top_k 0: all tokens; without top_p and top_k TensorRT-LLM would be greedy
        **sampling,
        "max_tokens": min(stop.max_tokens or max_output, max_output),
        "min_tokens": stop.min_tokens or None,
        "end_id": end_ids[0] if end_ids else _NO_END_TOKEN,
        "stop_token_ids": stop_ids or None,
        "include_stop_str_in_output": True,  # our outputs include the token that ends an answer
        "logprobs": None if report.logprobs is None else max(1, report.logprobs),
        "guided_decoding": guided,
        "detokenize": False,
    }


def _refuse_unsupported(request: generate.Request, stop_ids: list[int]) -> None:
    translation.refuse_param(
        _NAME, "min_tokens", "can hold back one end token only, and this request may end with others",
        is_used=request.stop_conditions.min_tokens > 0 and bool(stop_ids),
    )  # fmt: skip
    translation.refuse_param(
        _NAME, "logit_bias", "has no logit bias here",
        is_used=bool(request.sampling_options.logit_bias),
    )  # fmt: skip
    translation.refuse_param(
        _NAME, "prompt_logprobs", "has no prompt logprobs here",
        is_used=request.output_options.prompt_logprobs is not None,
    )  # fmt: skip
    translation.refuse_param(
        _NAME, "nvext.max_thinking_tokens", "has no limit for thoughts here",
        is_used=request.thinking is not None,
    )  # fmt: skip
    translation.refuse_param(
        _NAME, "kv_transfer_params", "moves blocks by a protocol of its own, which is not supported yet",
        is_used=request.kv_transfer_params is not None,
    )  # fmt: skip


def translate_output(
    result: Any, index: int, request: generate.Request, *, is_first: bool
) -> generate.Output:
    """Convert a result of choice `index`; `is_first` marks the request's first one.

    Raises DeadlineExceeded or EngineFailed if TensorRT-LLM gave the request up.
    """
    completion, report = result.outputs[0], request.output_options
    tokens = tuple(completion.token_ids_diff)
    if completion.finish_reason is None and not is_first and report == translation.TOKENS_ONLY:
        return generate.Output(tokens, None, index)
    finish_reason, stop_reason = _finish(completion, request)
    logprobs = None
    if report.logprobs is not None:
        logprobs = tuple(
            translation.token_logprobs(step[token], step, report.logprobs)
            for token, step in zip(tokens, completion.logprobs_diff, strict=True)
        )
    return generate.Output(
        tokens,
        finish_reason,
        index,
        logprobs=logprobs,
        cached_tokens=result.cached_tokens if is_first else None,
        stop_reason=stop_reason,
    )


def _finish(
    completion: Any, request: generate.Request
) -> tuple[generate.FinishReason | None, int | str | None]:
    match completion.finish_reason:
        case None:
            return None, None
        case "stop":
            return translation.stop_finish(request, completion.stop_reason)
        case "length":
            return generate.FinishReason.LENGTH, None
        case "cancelled":
            return generate.FinishReason.CANCELLED, None
        case "timeout":
            raise errors.DeadlineExceeded("TensorRT-LLM's time limit for a request passed")
        case other:
            raise errors.EngineFailed(f"TensorRT-LLM gave the request up: {other}")


def rank_load(stats: Mapping[str, Any], cache: Mapping[str, Any]) -> translation.RankLoad:
    """Return the load from the statistics of a step and their map `kvCacheStats`."""
    return translation.RankLoad(
        num_running=stats.get("numActiveRequests", 0),
        num_waiting=stats.get("numQueuedRequests", 0),
        num_blocks=cache["usedNumBlocks"],
        hit_rate=cache.get("cacheHitRate", 0.0),
    )
