"""The processes as the console shows them, and the memory of workers that went, so that a loss can be seen.

A worker that leaves discovery stays in the table: as `draining` for as long as it says so in its load reports, then for
`GONE_S` seconds as `gone`. One that sleeps is announced in discovery. What was seen longer ago than `GONE_S`, because
the table was not updated, is forgotten.
"""  # decider

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

GONE_S = 60.0
MAX_GONE = 64
MAX_PAGE = 200
MAX_PROCESSES = 50  # other frontends and routers that are listed
RECENT_S = 60.0  # in which an ended request counts as a recent transfer
WorkerState = Literal["ready", "down", "draining", "asleep", "gone"]


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker. Figures that it publishes are None until its first report."""

    instance: str  # instance id, hexadecimal
    model: str
    role: str  # aggregated, prefill or decode
    endpoint: str
    address: str
    # down: its connection broke, and it is still in discovery; gone: it left discovery, and is silent
    state: WorkerState = "ready"
    since: float = (
        0.0  # seconds since 1970, when this frontend saw it first, or saw it drain, sleep or go
    )
    num_requests: int = 0  # of this frontend, in flight there
    num_running: int | None = None
    num_waiting: int | None = None
    kv_active_blocks: int | None = None
    kv_total_blocks: int | None = None
    hit_rate: float | None = None
    loras: Sequence[str] = ()
    tiers: Sequence[str] = ()  # where the router's index knows blocks of it


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A frontend, or a router that is a process of its own."""

    instance: str  # instance id, hexadecimal
    kind: Literal["frontend", "router"]
    namespace: str
    address: str
    host: str = ""
    router_mode: str = ""
    state: Literal["ready", "draining"] = "ready"
    is_self: bool = False  # it answers this question


class TransferRow(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of this frontend whose prompts a prefill worker computed for a decode worker."""

    prefill: str  # instance id, hexadecimal
    decode: str
    num_open: int
    num_recent: int  # that ended in the last `RECENT_S`


class StartingWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that loads its model."""

    model: str
    namespace: str
    estimate_s: float


class TopologyPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the workers, and the number of all, by state and by role. `router_mode`: of this frontend.

    `num_processes` counts frontends and routers by kind; the first ones of them are listed, and this frontend.
    """

    router_mode: str
    num_open_requests: int
    total: int
    num_by_state: Mapping[str, int]
    num_by_role: Mapping[str, int]
    starting: Sequence[StartingWorker]
    workers: Sequence[WorkerRow]
    num_processes: Mapping[str, int] = {}
    processes: Sequence[ProcessRow] = ()
    transfers: Sequence[TransferRow] = ()  # most requests first


def _is_silent(_: WorkerRow) -> WorkerRow | None:
    return None


class WorkerMemory:
    """The workers that were seen, and those that have left."""

    def __init__(self) -> None:
        self._present: dict[str, WorkerRow] = {}
        self._gone: dict[str, WorkerRow] = {}
        self._updated_at = 0.0

    def update(
        self,
        rows: Iterable[WorkerRow],
        wall: float,
        find_draining: Callable[[WorkerRow], WorkerRow | None] = _is_silent,
    ) -> list[WorkerRow]:
        """Take the workers that there are now; return them, then those that went in the last minute.

        `find_draining` returns the present row of a worker that left discovery and reports that it drains, else None.
        """
        if wall - self._updated_at > GONE_S:
            self._present, self._gone = {}, {}
        self._updated_at, present = wall, {}
        for row in rows:
            present[row.instance] = _with_since(row, self._present.get(row.instance), wall)
        left = {
            instance: row
            for instance, row in (self._gone | self._present).items()
            if instance not in present
        }
        self._present, self._gone = present, {}
        for instance, row in list(left.items())[-MAX_GONE:]:
            gone = msgspec.structs.replace(row, state="gone", num_requests=0)
            changed = _with_since(find_draining(row) or gone, row, wall)
            if changed.state != "gone" or wall - changed.since < GONE_S:
                self._gone[instance] = changed
        return [*present.values(), *self._gone.values()]


def _with_since(row: WorkerRow, earlier: WorkerRow | None, wall: float) -> WorkerRow:
    """Return the row with the time of its state; a connection that breaks and returns does not change it."""
    is_same = earlier is not None and _phase(earlier) == _phase(row)
    return msgspec.structs.replace(row, since=earlier.since if earlier and is_same else wall)


def _phase(row: WorkerRow) -> str:
    return "ready" if row.state == "down" else row.state


def count_transfers(pairs: Iterable[tuple[str, str, bool]]) -> Sequence[TransferRow]:
    """Count requests, each (prefill worker, decode worker, is in flight), by both workers; most of them first."""
    counts: dict[tuple[str, str], list[int]] = {}
    for prefill, decode, is_open in pairs:
        counts.setdefault((prefill, decode), [0, 0])[not is_open] += 1
    rows = [
        TransferRow(prefill=prefill, decode=decode, num_open=num_open, num_recent=num_recent)
        for (prefill, decode), (num_open, num_recent) in counts.items()
    ]
    rows.sort(key=lambda row: (-row.num_open, -row.num_recent, row.prefill, row.decode))
    return rows[:MAX_PAGE]


def count_by(
    rows: Iterable[WorkerRow | ProcessRow], field: Literal["state", "role", "kind"]
) -> dict[str, int]:
    """Return the number of rows by the value of a field."""
    counts: dict[str, int] = {}
    for row in rows:
        value = getattr(row, field)
        counts[value] = counts.get(value, 0) + 1
    return counts


class WorkerQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which workers to list."""

    model: str = ""
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE

    def select(self, rows: Sequence[WorkerRow]) -> Sequence[WorkerRow]:
        """Return part of the workers, by model, role and id."""
        matching = [row for row in rows if self.model in ("", row.model)]
        matching.sort(key=lambda row: (row.model, row.role, row.instance))
        return matching[self.offset : self.offset + self.limit]
