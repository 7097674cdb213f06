"""From what vLLM says of one choice to our output. Most outputs are a token and nothing else: those are `plain`."""

from collections.abc import Iterable, Mapping
from typing import Any

from dynamo.protocols import generate

_REASON = {
    "stop": generate.FinishReason.STOP,
    "repetition": generate.FinishReason.STOP,
    "length": generate.FinishReason.LENGTH,
    "abort": generate.FinishReason.CANCELLED,
}
_Alternatives = Mapping[int, Any]  # token id → vLLM's Logprob


def plain(result: Any, index: int) -> generate.Output:
    """Tokens that are neither the first nor the last, of a request that wants nothing else."""
    return generate.Output(tuple(result.outputs[0].token_ids), None, index)


def whole(
    result: Any, index: int, request: generate.Request, *, is_first_of_request: bool
) -> generate.Output:
    """All there is to say. KeyError for an end that is none (vLLM's `error`)."""
    said = result.outputs[0]
    report = request.output_options
    reason, stop_reason = _end(said, request)
    return generate.Output(
        tuple(said.token_ids),
        reason,
        index,
        logprobs=_each(said.logprobs, report.logprobs),
        cached_tokens=(result.num_cached_tokens or 0) if is_first_of_request else None,
        stop_reason=stop_reason,
        kv_transfer_params=result.kv_transfer_params,
        prompt_logprobs=_of_prompt(result.prompt_logprobs, report.prompt_logprobs),
    )


def _end(
    said: Any, request: generate.Request
) -> tuple[generate.FinishReason | None, int | str | None]:
    """vLLM stops at an end token as it stops at any other: which it is, the request says."""
    if said.finish_reason is None:
        return None, None
    if said.finish_reason == "stop" and said.stop_reason in (None, *request.eos_token_ids):
        return generate.FinishReason.EOS, None
    return _REASON[said.finish_reason], said.stop_reason


def _of_prompt(
    steps: Iterable[_Alternatives | None] | None, num_top: int | None
) -> tuple[generate.TokenLogprobs, ...] | None:
    """Of each token but the first, which nothing foretells."""
    return _each((step for step in steps if step is not None), num_top) if steps else None


def _each(
    steps: Iterable[_Alternatives] | None, num_top: int | None
) -> tuple[generate.TokenLogprobs, ...] | None:
    if steps is None or num_top is None:
        return None
    return tuple(_token(step, num_top) for step in steps)


def _token(alternatives: _Alternatives, num_top: int) -> generate.TokenLogprobs:
    """vLLM puts the chosen token before the likeliest ones."""
    chosen = next(iter(alternatives.values()))
    ranked = sorted(alternatives.items(), key=lambda item: item[1].rank)[:num_top]
    top = tuple(generate.TopLogprob(token, one.logprob) for token, one in ranked)
    return generate.TokenLogprobs(chosen.logprob, top)
