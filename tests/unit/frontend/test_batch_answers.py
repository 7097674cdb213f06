"""Answers of lines are rows of one line, and are kept in memory while the journal cannot take them."""

import asyncio
import itertools
import json
import os
import threading

import pytest

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend.apis import error_dialects
from dynamo.frontend.batches import journal, lines, runner
from dynamo.protocols import model_errors
from dynamo.testing.clock import VirtualClock


class FullJournal:
    """A journal without room for the first three attempts."""

    def __init__(self):
        self.num_refused, self.answers = 0, []

    def add_answers(self, _batch_id, answers):
        if self.num_refused < 3:
            self.num_refused += 1
            raise errors.Unavailable("database or disk is full")
        self.answers += answers


async def test_answers_are_written_once_there_is_room_again(caplog):
    clock, full = VirtualClock(), FullJournal()
    writer = runner.AnswerWriter(full, "batch_1", clock)
    answers = [journal.LineAnswer(number, False, b"{}") for number in range(4)]
    adding = asyncio.gather(*map(writer.add, answers))
    while not adding.done():
        await clock.advance(runner.POLL_S)
    await adding

    assert full.num_refused == 3
    assert sorted(full.answers) == answers
    assert "batch_1 waits to write answers: database or disk is full" in caplog.text


def test_row_is_one_line_for_readers_that_split_at_line_separators():
    body = {"text": "a\u2028b\u2029c\x85d"}
    row = lines.answer_row("id", "one", 200, json.dumps(body, ensure_ascii=False).encode())
    (line,) = row.decode().splitlines()

    assert json.loads(line)["response"]["body"] == body


def test_byte_order_mark_that_an_editor_writes_before_the_first_line_is_left_out():
    line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": {}}
    row = json.dumps(line).encode("utf-8-sig")

    assert lines.parse(row, 1, "/v1/completions", 1000).custom_id == "one"


@pytest.mark.parametrize(
    ("url", "fields", "expected"),
    [
        ("/v1/responses", {}, False),
        ("/v1/responses", {"store": None}, False),
        ("/v1/responses", {"store": True}, True),
        ("/v1/chat/completions", {}, None),
    ],
)
def test_response_of_a_line_is_stored_only_if_the_line_says_so(url, fields, expected):
    line = lines.BatchLine(custom_id="a", method="POST", url=url, body={"model": "m"} | fields)

    assert json.loads(lines.request_body(line)).get("store") is expected


def begin_batch(folder, *custom_ids, clock=None):
    """Return a journal, and a batch in progress with these lines, or one."""
    files = journal.BatchJournal(folder / "files", clock or VirtualClock(), max_bytes=10**9)
    files.prepare()
    partial = files.new_partial()
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": "m"}}
    rows = [json.dumps(line | {"custom_id": custom_id}) for custom_id in custom_ids or ("one",)]
    partial.write_text("\n".join(rows))
    file = files.add_file(partial, tenant="", filename="a.jsonl")
    asked = lines.BatchRequest(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    return files, files.check_input(files.add_batch(asked, "", None).id, 1000)


def make_runner(files):
    """Return a runner with the clock of its journal."""
    return runner.BatchRunner(files, files._clock, concurrency=1, max_body_bytes=1000)


def make_asker(responses):
    """Return an asker whose lines are answered by these statuses and bodies, one after the other."""
    slots = runner.LineSlots(1)
    return runner.LineAsker(
        lambda client: client.respond(*responses.pop(0)), {}, clocks.SystemClock(), slots
    )


async def test_batch_whose_file_is_lost_fails(tmp_path):
    files, batch = begin_batch(tmp_path)
    files._content(batch.input_file_id).unlink()
    batch_runner = make_runner(files)
    batch_runner._stops[batch.id] = asyncio.Event()
    await batch_runner._run_batch(batch, make_asker([]))
    ended = files.find_batch(batch.id, "")

    assert (ended.status, [error.code for error in ended.errors.data]) == (
        "failed",
        ["file_not_found"],
    )


async def test_line_that_has_waited_is_asked_again_after_a_failure(monkeypatch):
    monkeypatch.setattr(lines, "_MAX_PAUSE_S", 0.0)
    statuses = [*[503] * 5, 500, 429, 500, 200]
    responses = [(status, b"{}") for status in statuses]
    line = lines.LineRequest(1, "one", "m", b"{}")
    response = await make_asker(responses).ask("1", "/v1/completions", line)

    assert (response.status, responses) == (200, [])


@pytest.mark.parametrize(
    ("error", "num_asked"),
    [
        (model_errors.SuspectRequest("two workers died"), 1),
        (errors.WorkerDied("its worker died"), lines.MAX_ATTEMPTS),
    ],
)
async def test_line_with_which_workers_die_is_not_asked_for_ever(monkeypatch, error, num_asked):
    monkeypatch.setattr(lines, "_MAX_PAUSE_S", 0.0)
    dialect = error_dialects.OPENAI
    responses = [(dialect.status_of(error), dialect.body_of(error))] * 9
    responses.append((200, b"{}"))
    line = lines.LineRequest(1, "one", "m", b"{}")
    await make_asker(responses).ask("1", "/v1/completions", line)

    assert 10 - len(responses) == num_asked


async def test_model_that_answered_before_a_restart_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "MODEL_WAIT_S", 0)
    monkeypatch.setattr(lines, "_MAX_PAUSE_S", 0.0)
    clock = clocks.SystemClock()
    files, batch = begin_batch(tmp_path, "one", "two", clock=clock)
    row = lines.answer_row("1", "one", 200, b'{"model": "m"}')
    files.add_answers(batch.id, [journal.LineAnswer(1, False, row)])
    missing = error_dialects.OPENAI.body_of(model_errors.ModelNotFound("not yet"))
    responses = [(404, missing), (404, missing), (200, b"{}")]
    batch_runner = make_runner(files)
    batch_runner._stops[batch.id] = asyncio.Event()
    await batch_runner._run_batch(batch, make_asker(responses))

    assert files.find_batch(batch.id, "").request_counts == lines.RequestCounts(
        total=2, completed=2
    )


async def test_batch_can_be_cancelled_while_its_file_is_read(tmp_path, monkeypatch):
    files, batch = begin_batch(tmp_path)
    is_reading, may_end = threading.Event(), threading.Event()

    def read_slowly(*_):
        is_reading.set()
        may_end.wait(10)
        yield from ()

    monkeypatch.setattr(files, "unanswered", read_slowly)
    answering = asyncio.create_task(make_runner(files)._answer_lines(batch, None))
    await asyncio.to_thread(is_reading.wait, 10)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    may_end.set()


def test_batch_that_is_cancelled_as_its_last_line_is_answered_ends_as_cancelled(tmp_path):
    files, batch = begin_batch(tmp_path)
    files.add_answers(batch.id, [journal.LineAnswer(1, False, b"{}\n")])
    files.cancel_batch(batch.id, "")
    ended = files.finish(batch.id, "completed")

    assert (batch.status, ended.status) == ("in_progress", "cancelled")
    assert ended.output_file_id is not None


@pytest.mark.parametrize("num_written", [0, 1])
def test_answers_that_find_a_full_disk_leave_no_part_of_a_file(tmp_path, monkeypatch, num_written):
    files, batch = begin_batch(tmp_path)
    answers = [journal.LineAnswer(number, number > 1, b"{}\n") for number in (1, 2)]
    files.add_answers(batch.id, answers)
    attempts = itertools.count()

    def fsync(_descriptor):
        if next(attempts) == num_written:
            raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="no space left"):
        files.finish(batch.id, "completed")
    left = list((files.folder / "partial").iterdir())
    again = files.finish(batch.id, "completed")

    assert left == []
    assert again.output_file_id is not None
    assert again.error_file_id is not None
