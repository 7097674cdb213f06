"""Suspects: requests that may have killed a worker, and are sent to no other, because they would kill that too.

A worker dies for many reasons, and its requests are innocent nearly always: they migrate. A request is a suspect if
its worker died while it *prepared* the request (compiled its grammar, before any token), or if two workers died that
had it.
"""

from dynamo.protocols import generate, model_errors

MAX_DEATHS = 2  # workers that died with a request, from which on it counts as the reason


def is_suspect(request: generate.Request, num_deaths: int, *, has_tokens: bool) -> bool:
    """Return whether a request is a suspect, now that the last of `num_deaths` workers has died with it.

    `has_tokens` says whether any token of its answer has come.
    """
    is_prepared = has_tokens or request.sampling_options.guided_decoding is None
    return num_deaths >= MAX_DEATHS or (num_deaths > 0 and not is_prepared)


def make_error(request_id: str, num_deaths: int) -> model_errors.SuspectRequest:
    """Return the error of a suspect."""
    if num_deaths >= MAX_DEATHS:
        event = f"{num_deaths} workers died while they had this request"
    else:
        event = "the worker died while it prepared this request"
    return model_errors.SuspectRequest(
        f"{event} ({request_id}), so it is suspected to be the reason and is sent to no other: "
        "change it before you try again, or report it"
    )
