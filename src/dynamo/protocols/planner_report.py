"""The report of a planner for a console: its decisions with what it observed, and what it would do under more load.

A planner answers a `PlannerQuery` at `dyn://NAMESPACE.planner.decisions` by one `PlannerReport`.
"""

from collections.abc import Sequence

import msgspec

MOST_DECISIONS = 120  # of a report
MOST_FACTOR = 1000  # of a simulated load


class Workers(msgspec.Struct, frozen=True):
    """Numbers of workers by pool; in aggregated mode all are in the decode pool."""

    prefill: int
    decode: int


class PlannerDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision after an interval, and the load that it was made for. What could not be measured is absent."""

    time: float  # seconds since 1970; in a what-if, after its begin
    outcome: str  # up, down, rebalance, hold, skipped, advisory
    is_leader: bool
    present: Workers  # ready or starting
    replicas: Workers  # to be
    reason: str
    requests_per_s: float | None = None
    predicted_requests_per_s: float | None = None
    isl: float | None = None  # input sequence length: mean prompt tokens
    osl: float | None = None  # output sequence length: mean tokens of an answer
    ttft_ms: float | None = None
    itl_ms: float | None = None
    kv_usage: float = 0.0  # of the decode pool, 0 to 1
    num_running: int = 0
    num_waiting: int = 0


class PlannerQuery(msgspec.Struct, frozen=True, omit_defaults=True):
    """A question to a planner; `factor` asks what it would do if the last load were so many times as high.

    It is from 0 to `MOST_FACTOR`.
    """

    factor: float | None = None


class PlannerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one planner. `what_if` has the changes of a simulated future, the first decision included."""

    namespace: str
    policy: str
    mode: str
    interval_s: float
    decisions: Sequence[PlannerDecision]  # the latest first
    what_if: Sequence[PlannerDecision] | None = None
