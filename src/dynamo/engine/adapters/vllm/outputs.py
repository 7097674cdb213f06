"""From what vLLM says of one choice to our output. Most outputs are a token and nothing else."""

from typing import Any

from dynamo.base import errors
from dynamo.engine.adapters import choice, logprobs
from dynamo.engine.adapters.vllm import connectors
from dynamo.protocols import generate

_REASON = {
    "repetition": generate.FinishReason.STOP,
    "length": generate.FinishReason.LENGTH,
    "abort": generate.FinishReason.CANCELLED,
}


def translate(
    result: Any, index: int, request: generate.Request, *, is_first: bool
) -> generate.Output:
    """All there is to say. Raises EngineFailed for an end that is none (vLLM's `error`)."""
    said, report = result.outputs[0], request.output_options
    tokens = tuple(said.token_ids)
    if said.finish_reason is None and not is_first and report == choice.PLAIN:
        return generate.Output(tokens, None, index)
    reason, stop_reason = _end(said, request)
    return generate.Output(
        tokens,
        reason,
        index,
        logprobs=logprobs.each(said.logprobs, report.logprobs),
        cached_tokens=(result.num_cached_tokens or 0) if is_first else None,
        stop_reason=stop_reason,
        kv_transfer_params=connectors.decode_params(result.kv_transfer_params),
        prompt_logprobs=_of_prompt(result.prompt_logprobs, report.prompt_logprobs),
    )


def _end(
    said: Any, request: generate.Request
) -> tuple[generate.FinishReason | None, int | str | None]:
    if said.finish_reason is None:
        return None, None
    if said.finish_reason == "stop":
        return choice.end(request, said.stop_reason)
    if said.finish_reason not in _REASON:
        raise errors.EngineFailed("vLLM gave the request up")
    return _REASON[said.finish_reason], said.stop_reason


def _of_prompt(
    steps: list[logprobs.Alternatives | None] | None, num_top: int | None
) -> tuple[generate.TokenLogprobs, ...] | None:
    """Of each token but the first, which nothing foretells."""
    if not steps:
        return None
    return logprobs.each([step for step in steps if step is not None], num_top)
