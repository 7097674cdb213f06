"""The use of the frontend by day, API key, tenant, model and API: sums, so that their size does not grow with requests.

At most `MAX_ROWS` rows are kept; beyond that the oldest day is dropped, and the days before `MAX_DAYS` in any case.
"""  # decider

import csv
import datetime
import functools
import io
from collections.abc import Callable, Iterable, Sequence

import msgspec

MAX_ROWS = 20_000
MAX_DAYS = 400
_DAY_S = 86_400


class UsageCounts(msgspec.Struct, kw_only=True, gc=False):
    """The sums of one row. `duration_s`: of the requests, from arrival to end."""

    num_requests: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    duration_s: float = 0.0


class UsageRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row. `day`: UTC, as 2026-11-23; `key` and `tenant` are empty where no API keys are used."""

    day: str
    key: str
    tenant: str
    model: str
    api: str
    num_requests: int
    num_errors: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    duration_s: float


class UsageTable:
    """All rows. Mutable; one event loop owns it."""

    def __init__(self) -> None:
        self.num_changes = 0  # since the start
        self._counts: dict[tuple[int, str, str, str, str], UsageCounts] = {}
        self._num_rows_by_day: dict[int, int] = {}

    def count(self, wall: float, *, key: str, tenant: str, model: str, api: str) -> UsageCounts:
        """Return the sums to which a request of this time is added."""
        self.num_changes += 1
        place = (int(wall // _DAY_S), key, tenant, model, api)
        counts = self._counts.get(place)
        if counts is None:
            self._drop_old(place[0])
            counts = self._counts[place] = UsageCounts()
            self._num_rows_by_day[place[0]] = self._num_rows_by_day.get(place[0], 0) + 1
        return counts

    def rows(self, matches: Callable[[UsageRow], bool] = lambda row: True) -> Sequence[UsageRow]:
        """Return the matching rows, the latest day first. May be called in a thread while requests are counted."""
        name = functools.cache(day_name)
        rows = (
            UsageRow(
                day=name(day), key=key, tenant=tenant, model=model, api=api,
                num_requests=counts.num_requests, num_errors=counts.num_errors,
                prompt_tokens=counts.prompt_tokens, cached_tokens=counts.cached_tokens,
                output_tokens=counts.output_tokens, duration_s=counts.duration_s,
            )
            for (day, key, tenant, model, api), counts in sorted(self._counts.items(), reverse=True)
        )  # fmt: skip
        return [row for row in rows if matches(row)]

    def load(self, rows: Iterable[UsageRow]) -> None:
        """Add rows that an earlier process has written. Raises ValueError for a day that is none."""
        for row in rows:
            day = datetime.date.fromisoformat(row.day).toordinal() - _EPOCH
            counts = self.count(
                day * _DAY_S, key=row.key, tenant=row.tenant, model=row.model, api=row.api
            )
            for name in UsageCounts.__struct_fields__:
                setattr(counts, name, getattr(counts, name) + getattr(row, name))

    def _drop_old(self, today: int) -> None:
        while self._counts:
            oldest = min(self._num_rows_by_day)
            if len(self._counts) < MAX_ROWS and today - oldest < MAX_DAYS:
                return
            del self._num_rows_by_day[oldest]
            self._counts = {
                place: counts for place, counts in self._counts.items() if place[0] != oldest
            }


_EPOCH = datetime.date(1970, 1, 1).toordinal()


def day_name(day: int) -> str:
    """Return a day, counted from 1970, as 2026-11-23."""
    return datetime.date.fromordinal(_EPOCH + day).isoformat()


def to_csv(rows: Iterable[UsageRow]) -> str:
    """Return the rows as CSV (RFC 4180) with a line of names.

    A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    output = io.StringIO()
    writer = csv.writer(output)
    writer.writerow(UsageRow.__struct_fields__)
    cell = functools.cache(lambda text: f"'{text}" if text[:1] in ("=", "+", "-", "@") else text)
    writer.writerows(
        (
            cell(row.day), cell(row.key), cell(row.tenant), cell(row.model), cell(row.api),
            row.num_requests, row.num_errors, row.prompt_tokens, row.cached_tokens,
            row.output_tokens, row.duration_s,
        )
        for row in rows
    )  # fmt: skip
    return output.getvalue()
