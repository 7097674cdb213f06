"""The rule for waiting: for how long a request waits for a worker while no worker can take it.

    nobody serves, nobody is expected     `wait_s`: restarted workers are back within seconds, and so long a frontend
                                          that has just started may take to read discovery
    a worker is starting or waking up     as long as that is estimated to take, with some reserve
    too many requests wait already        not at all
    the request plane's server is away    an answer that has begun waits for it as well, for `outage_s` at most

New requests wait by this rule, and so do those that have lost their worker. It does no I/O: a caller that waits asks it
again and again.
"""

from dataclasses import dataclass

_START_RESERVE = 1.5  # times its estimate, a start may take


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitPolicy:
    """The limits of waiting."""

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
