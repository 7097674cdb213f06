"""The sums of usage: by day, bounded, written and read again."""

import time

import msgspec
import pytest

from dynamo.console import usage
from dynamo.console.usage import MAX_DAYS, MAX_ROWS, UsageTable

DAY_S = 86_400.0
NOON = 20_000 * DAY_S + DAY_S / 2  # of 2024-10-04


def record(table, wall=NOON, *, key="", tenant="", model="m", api="chat_completions", tokens=5):
    counts = table.count(wall, key=key, tenant=tenant, model=model, api=api)
    counts.num_requests += 1
    counts.output_tokens += tokens


def test_requests_are_summed_by_day_key_model_and_api():
    table = UsageTable()
    record(table)
    record(table, tokens=7)
    record(table, NOON + DAY_S, key="k", tenant="t")
    rows = table.rows()

    assert [(row.day, row.key, row.tenant, row.num_requests, row.output_tokens) for row in rows] == [
        ("2024-10-05", "k", "t", 1, 5), ("2024-10-04", "", "", 2, 12)
    ]  # fmt: skip
    assert [row.day for row in table.rows(lambda row: row.key == "k")] == ["2024-10-05"]


def test_rows_are_made_in_a_thread_while_a_new_day_begins(monkeypatch):
    table, name_day = UsageTable(), usage.day_name
    record(table)

    def name_and_count(day):
        record(table, (day + 1) * DAY_S)
        return name_day(day)

    monkeypatch.setattr(usage, "day_name", name_and_count)

    assert [row.day for row in table.rows()] == ["2024-10-04"]


def test_rows_that_were_written_go_on_after_a_restart():
    table, later = UsageTable(), UsageTable()
    record(table)
    later.load(table.rows())
    record(later)

    assert [row.num_requests for row in later.rows()] == [2]


def test_day_that_is_none_is_refused():
    table = UsageTable()
    record(table)
    row = table.rows()[0]

    with pytest.raises(ValueError, match="Invalid isoformat"):
        UsageTable().load([msgspec.structs.replace(row, day="yesterday")])


def test_old_days_are_dropped():
    table = UsageTable()
    record(table, NOON)
    record(table, NOON + MAX_DAYS * DAY_S)

    assert len(table.rows()) == 1


def test_table_of_too_many_keys_stays_bounded_and_quick():
    table = UsageTable()
    for number in range(MAX_ROWS + 50):
        record(table, NOON + DAY_S * (number // MAX_ROWS), key=f"k{number}")
    began_at = time.process_time()
    rows = table.rows()
    msgspec.json.encode(rows)

    assert len(rows) <= MAX_ROWS
    assert rows[0].day == "2024-10-05"
    assert time.process_time() - began_at < 2  # far less, on an idle machine


def test_csv_has_a_line_of_names_and_no_formulas():
    table = UsageTable()
    record(table, model='=HYPERLINK("x")')
    names, row, *_ = usage.to_csv(table.rows()).splitlines()

    assert names.startswith("day,key,tenant,model,api,num_requests")
    assert row == '2024-10-04,,,"\'=HYPERLINK(""x"")",chat_completions,1,0,0,0,5,0.0'
