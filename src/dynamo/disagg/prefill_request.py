"""What a prefill worker is asked: the request itself, of one token.

So the token that comes with the prompt is the one that its answer begins with, drawn with its own temperature, seed,
penalties, grammar and limits, and the engine that answers can take it over instead of computing it again. Of several
choices each has to be drawn where it is answered: then the token is not used, and drawn in the cheapest way.
"""

import msgspec

from dynamo.protocols import generate, kv_transfer


def make(request: generate.Request) -> generate.Request:
    """For a prompt that is to be answered here."""
    if request.sampling_options.n == 1:
        stops = request.stop_conditions
        return msgspec.structs.replace(
            request,
            stop_conditions=msgspec.structs.replace(
                stops, max_tokens=1, min_tokens=min(1, stops.min_tokens), stop=()
            ),
            annotations=(),
            data_parallel_rank=None,
            kv_transfer_params=kv_transfer.PREFILL_WITH_TOKEN,
        )
    return generate.Request(
        id=request.id,
        model=request.model,
        token_ids=request.token_ids,
        stop_conditions=generate.StopConditions(max_tokens=1, min_tokens=1),
        sampling_options=generate.SamplingOptions(temperature=0.0),
        priority=request.priority,
        lora_name=request.lora_name,
        session_id=request.session_id,
        kv_transfer_params=kv_transfer.PREFILL_ONLY,
    )
