"""From what SGLang says of one choice to our output: a map of `output_ids` and `meta_info`.

With `incremental_streaming_output` tokens and their logprobs are those that are new. A logprob is (value, token, text),
those of a prompt begin with (None, token, text), as nothing foretells the first token.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynamo.base import errors
from dynamo.engine.adapters import choice
from dynamo.protocols import generate

_Scored = Sequence[Any]  # value, token id, text
_BAD_REQUEST, _UNAVAILABLE = 400, 503


def translate(
    said: Mapping[str, Any], index: int, request: generate.Request, *, is_first: bool
) -> generate.Output:
    """All there is to say. Raises InvalidRequest, Overloaded or EngineFailed if SGLang gave it up."""
    meta, tokens = said["meta_info"], tuple(said["output_ids"])
    end, report = meta["finish_reason"], request.output_options
    if end is None and not is_first and report == choice.PLAIN:
        return generate.Output(tokens, None, index)
    reason, stop_reason = _end(end, request)
    begins = meta["completion_tokens"] == len(
        tokens
    )  # of this choice: a prompt's scores are told with each
    scores = report.prompt_logprobs if begins and index == 0 else None
    return generate.Output(
        tokens,
        reason,
        index,
        logprobs=_scores(meta, "output", report.logprobs),
        cached_tokens=meta["cached_tokens"] if is_first else None,
        stop_reason=stop_reason,
        prompt_logprobs=_scores(meta, "input", scores, skip=1),
    )


def _end(
    end: Mapping[str, Any] | None, request: generate.Request
) -> tuple[generate.FinishReason | None, int | str | None]:
    if end is None:
        return None, None
    match end["type"]:
        case "length":
            return generate.FinishReason.LENGTH, None
        case "stop":
            matched = end["matched"]
            is_ours = matched in request.stop_conditions.stop_token_ids
            return choice.end(request, matched if is_ours else None)
        case _:
            raise _given_up(end)


def _given_up(end: Mapping[str, Any]) -> errors.DynamoError:
    said = f"SGLang: {end.get('message') or end['type']}"
    if end.get("status_code") == _BAD_REQUEST:
        return errors.InvalidRequest(said)
    if end.get("status_code") == _UNAVAILABLE:
        return errors.Overloaded(said)
    return errors.EngineFailed(said)


def _scores(
    meta: Mapping[str, Any], side: str, num_top: int | None, *, skip: int = 0
) -> tuple[generate.TokenLogprobs, ...] | None:
    if num_top is None:
        return None
    chosen = meta[f"{side}_token_logprobs"][skip:]
    top = meta.get(f"{side}_top_logprobs", [])[skip:] if num_top else []
    return tuple(
        generate.TokenLogprobs(one[0], _likeliest(rest or (), num_top))
        for one, rest in zip(chosen, top or [()] * len(chosen), strict=True)
    )


def _likeliest(scored: Iterable[_Scored], num_top: int) -> tuple[generate.TopLogprob, ...]:
    """SGLang gives them best first."""
    return tuple(generate.TopLogprob(one[1], one[0]) for one in list(scored)[:num_top])
