"""Batches: lines in, lines out."""

import json

import pytest

from dynamo.base import errors
from dynamo.cli import batch, session


class Talk:
    """Answers with the last message in capitals; fails on `fail`."""

    async def chat(self, messages, on_text=None, **fields):
        text = messages[-1]["content"]
        if text == "fail":
            raise errors.InvalidRequest("no")
        return session.Answer(text.upper() + str(fields.get("max_tokens", "")), "stop", 3, 2, 0.25)


def parse(row):
    return batch.parse(row, "f:1")


def test_text_line_is_a_user_message():
    assert parse('{"text": "hi", "max_tokens": 4}') == batch.Line(
        messages=[{"role": "user", "content": "hi"}], fields={"max_tokens": 4}
    )


@pytest.mark.parametrize("row", ["no json", "[]", "{}", '{"text": 1}', '{"messages": "x"}'])
def test_invalid_line_is_named(row):
    with pytest.raises(errors.ConfigError, match="f:1: expected"):
        parse(row)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"in=batch:.*none.jsonl"):
        batch.read(tmp_path / "none.jsonl")


async def test_failed_request_does_not_stop_later_requests():
    lines = [parse(json.dumps({"text": text})) for text in ("a", "fail", "b")]
    times = iter((10.0, 12.0))
    rows, summary = await batch.run(
        Talk(), lines, defaults={"max_tokens": 7}, now=lambda: next(times)
    )

    assert [row.get("response") for row in rows] == ["A7", None, "B7"]
    assert rows[1]["error"] == "no"
    assert rows[0]["tokens_out"] == 2
    assert str(summary) == "3 lines, 1 failed, 4 tokens in 2.0 s: 2.0 tokens/s"


def test_unwritable_output_is_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"--output .*: cannot be written: No such file"):
        batch.check_output(tmp_path / "none" / "answers.jsonl")
