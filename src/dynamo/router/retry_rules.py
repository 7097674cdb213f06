"""The rules for a request without a worker: for how long it waits for one, and when it is sent to no other.

Waiting: for how long a request waits for a worker while no worker can take it.

    nobody serves, nobody is expected     `wait_s`: restarted workers are back within seconds, and so long a frontend
                                          that has just started may take to read discovery
    a worker is starting or waking up     as long as that is estimated to take, with some reserve
    too many requests wait already        not at all
    the request plane's server is away    an answer that has begun waits for it as well, for `outage_s` at most

New requests wait by this rule, and so do those that have lost their worker. It does no I/O: a caller that waits asks it
again and again.

Suspects: requests that may have killed a worker, and are sent to no other, because they would kill that too.

A worker dies for many reasons, and its requests are innocent nearly always: they migrate. A request is a suspect if
its worker died while it *prepared* the request (compiled its grammar, before any token), or if two workers died that
had it. Where many die at once, a request may be sent to one that is dead already: that one never had it, and counts as
lost, not as dead (`runtime.backends.multiplex`).
"""  # decider

from dataclasses import dataclass

from dynamo.protocols import model_errors

_START_RESERVE = 1.5  # times its estimate, a start may take


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitPolicy:
    """The seconds for which a request waits for a worker, and how many may wait at once."""

    wait_s: float = 5.0
    max_waiting: int = 1000  # new requests of one process
    outage_s: float = 90.0

    def limit_s(self, start_s: float | None) -> float:
        """Return for how many seconds a request waits in all.

        `start_s` is the estimated duration of the start that is under way, in seconds; None: no worker is expected.
        """
        return self.wait_s if start_s is None else max(self.wait_s, _START_RESERVE * start_s)

    def has_room(self, num_waiting: int) -> bool:
        """Return whether one more request may wait, beside `num_waiting` others."""
        return num_waiting < self.max_waiting


MAX_DEATHS = 2  # workers that died with a request, from which on it counts as the reason


def is_suspect(num_deaths: int, *, is_prepared: bool) -> bool:
    """Return whether a request is a suspect, now that the last of `num_deaths` workers has died with it.

    `is_prepared` says whether that worker had prepared it: a token of its answer has come, or it has no grammar.
    """
    return num_deaths >= MAX_DEATHS or (num_deaths > 0 and not is_prepared)


def make_error(request_id: str, num_deaths: int) -> model_errors.SuspectRequest:
    if num_deaths >= MAX_DEATHS:
        event = f"{num_deaths} workers died while they had this request"
    else:
        event = "the worker died while it prepared this request"
    return model_errors.SuspectRequest(
        f"{event} ({request_id}), so it is suspected to be the reason and is sent to no other: "
        "change it before you try again, or report it"
    )
