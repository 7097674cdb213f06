"""When an answer is over: by the model's own word, by the request's, or for want of room."""

from dynamo.protocols import generate


def find(
    request: generate.Request, token_id: int, *, num_output: int, is_full: bool
) -> tuple[generate.FinishReason | None, int | None]:
    """Whether this token, the last of `num_output` so far, ends the choice, and the stop token if that was it."""
    conditions, is_eos = request.stop_conditions, token_id in request.eos_token_ids
    if is_eos and request.sampling_options.guided_decoding is not None:
        return generate.FinishReason.EOS, None  # drawn only where nothing else may come
    if num_output >= conditions.min_tokens:
        if is_eos and not conditions.ignore_eos:
            return generate.FinishReason.EOS, None
        if token_id in conditions.stop_token_ids:
            return generate.FinishReason.STOP, token_id
    if is_full or num_output == conditions.max_tokens:
        return generate.FinishReason.LENGTH, None
    return None, None
