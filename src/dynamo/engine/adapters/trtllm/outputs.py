"""From what TensorRT-LLM says of one choice (`RequestOutput` with one `CompletionOutput`) to our output.

It says it with the same object again and again; what is new are its `token_ids_diff` and `logprobs_diff`.
"""

from typing import Any

from dynamo.base import errors
from dynamo.engine.adapters import choice, logprobs
from dynamo.protocols import generate


def translate(
    said: Any, index: int, request: generate.Request, *, is_first: bool
) -> generate.Output:
    """All there is to say. Raises DeadlineExceeded or EngineFailed if it was given up."""
    answer, report = said.outputs[0], request.output_options
    tokens = tuple(answer.token_ids_diff)
    if answer.finish_reason is None and not is_first and report == choice.PLAIN:
        return generate.Output(tokens, None, index)
    reason, stop_reason = _end(answer, request)
    return generate.Output(
        tokens,
        reason,
        index,
        logprobs=_scores(tokens, answer, report.logprobs),
        cached_tokens=said.cached_tokens if is_first else None,
        stop_reason=stop_reason,
    )


def _end(
    answer: Any, request: generate.Request
) -> tuple[generate.FinishReason | None, int | str | None]:
    match answer.finish_reason:
        case None:
            return None, None
        case "stop":
            return choice.end(request, answer.stop_reason)
        case "length":
            return generate.FinishReason.LENGTH, None
        case "cancelled":
            return generate.FinishReason.CANCELLED, None
        case "timeout":
            raise errors.DeadlineExceeded("TensorRT-LLM's time limit for a request passed")
        case other:
            raise errors.EngineFailed(f"TensorRT-LLM gave the request up: {other}")


def _scores(
    tokens: tuple[int, ...], answer: Any, num_top: int | None
) -> tuple[generate.TokenLogprobs, ...] | None:
    if num_top is None:
        return None
    return tuple(
        logprobs.of(step[token], step, num_top)
        for token, step in zip(tokens, answer.logprobs_diff, strict=True)
    )
