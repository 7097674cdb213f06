"""Answers of lines are rows of one line, and are kept in memory while the journal cannot take them."""

import asyncio
import json

from dynamo.base import errors
from dynamo.frontend.batches import journal, lines, runner
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
