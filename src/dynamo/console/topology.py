"""The workers as the console shows them, and the memory of those that went, so that a loss can be seen.

A worker that leaves discovery stays in the table for `GONE_S` seconds as `gone`. What was seen longer ago than
that, because the table was not updated, is forgotten.
"""  # decider

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

GONE_S = 60.0
MAX_GONE = 64
MAX_PAGE = 200
WorkerState = Literal["ready", "down", "gone"]


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker. Figures that it publishes are None until its first report."""

    instance: str  # instance id, hexadecimal
    model: str
    role: str  # aggregated, prefill or decode
    endpoint: str
    address: str
    state: WorkerState = "ready"  # down: its connection broke, and it is still in discovery
    since: float = 0.0  # seconds since 1970, when this frontend saw it first, or saw it go
    num_requests: int = 0  # of this frontend, in flight there
    num_running: int | None = None
    num_waiting: int | None = None
    kv_active_blocks: int | None = None
    kv_total_blocks: int | None = None
    hit_rate: float | None = None
    loras: Sequence[str] = ()


class StartingWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that loads its model."""

    model: str
    namespace: str
    estimate_s: float


class TopologyPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the workers, and the number of all, by state and by role. `router_mode`: of this frontend."""

    router_mode: str
    num_open_requests: int
    total: int
    num_by_state: Mapping[str, int]
    num_by_role: Mapping[str, int]
    starting: Sequence[StartingWorker]
    workers: Sequence[WorkerRow]


class WorkerMemory:
    """The workers that were seen, and those that have left."""

    def __init__(self) -> None:
        self._present: dict[str, WorkerRow] = {}
        self._gone: dict[str, WorkerRow] = {}
        self._updated_at = 0.0

    def update(self, rows: Iterable[WorkerRow], wall: float) -> list[WorkerRow]:
        """Take the workers that there are now; return them, then those that went in the last minute."""
        if wall - self._updated_at > GONE_S:
            self._present, self._gone = {}, {}
        self._updated_at, present = wall, {}
        for row in rows:
            earlier = self._present.get(row.instance)
            since = earlier.since if earlier is not None else wall
            present[row.instance] = msgspec.structs.replace(row, since=since)
        for instance, row in self._present.items():
            if instance not in present:
                gone_row = msgspec.structs.replace(row, state="gone", since=wall, num_requests=0)
                self._gone[instance] = gone_row
        self._present = present
        self._gone = {
            instance: row
            for instance, row in list(self._gone.items())[-MAX_GONE:]
            if wall - row.since < GONE_S and instance not in present
        }
        return [*present.values(), *self._gone.values()]


def count_by(rows: Iterable[WorkerRow], field: Literal["state", "role"]) -> dict[str, int]:
    """Return the number of workers by the value of a field."""
    counts: dict[str, int] = {}
    for row in rows:
        value = getattr(row, field)
        counts[value] = counts.get(value, 0) + 1
    return counts


class WorkerQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which workers to list."""

    model: str = ""
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE

    def select(self, rows: Sequence[WorkerRow]) -> Sequence[WorkerRow]:
        """Return part of the workers, by model, role and id."""
        matching = [row for row in rows if self.model in ("", row.model)]
        matching.sort(key=lambda row: (row.model, row.role, row.instance))
        return matching[self.offset : self.offset + self.limit]
