"""What one choice of a request asks for, where libraries read it alike."""

from dynamo.base import errors
from dynamo.protocols import generate

MAX_SEED = 2**63
_RESUMED_STEP = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio: far from every choice's seed
PLAIN = generate.OutputOptions()  # nothing but tokens is wanted


def is_greedy(options: generate.SamplingOptions) -> bool:
    """The likeliest token, always."""
    return options.temperature == 0 or options.top_p == 0


def stop_ids(request: generate.Request) -> list[int]:
    """All tokens that end it: those it names, and the model's end tokens."""
    stop = request.stop_conditions
    return [*stop.stop_token_ids, *(() if stop.ignore_eos else request.eos_token_ids)]


def seed(request: generate.Request, index: int) -> int | None:
    """As choices are counted from the caller; one that goes on must not draw again what it has drawn before."""
    asked = request.sampling_options.seed
    if asked is None:
        return None
    return (asked + request.first_choice + index + request.num_resumed * _RESUMED_STEP) % MAX_SEED


def end(
    request: generate.Request, stop_reason: int | str | None
) -> tuple[generate.FinishReason, int | str | None]:
    """Of a choice that was stopped. Libraries stop at an end token as at any other: which it is, the request says."""
    if stop_reason in (None, *request.eos_token_ids):
        return generate.FinishReason.EOS, None
    return generate.FinishReason.STOP, stop_reason


def refuse_resumed_shape(request: generate.Request, name: str) -> None:
    """Raises InvalidRequest for a guided answer in the middle: no library takes a grammar's state from outside."""
    guided = request.sampling_options.guided_decoding
    if guided is not None and request.num_resumed:
        raise errors.InvalidRequest(
            f"{guided.param}: {name} cannot go on with a guided answer that another worker began",
            param=guided.param,
        )


def refuse(name: str, param: str, why: str, *, is_asked: bool) -> None:
    """Raises InvalidRequest by the parameter's name for what the library cannot do, if it is asked for."""
    if is_asked:
        raise errors.InvalidRequest(f"{param}: {name} {why}", param=param)
