"""Batches: lines in, lines out."""

import asyncio
import json

import pytest

from dynamo.base import errors
from dynamo.cli import batch, run, session


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


@pytest.mark.parametrize(
    "row", ["no json", "[]", "{}", '{"text": 1}', '{"messages": "x"}', "{" + '"a":[' * 3000]
)
def test_invalid_line_is_named(row):
    with pytest.raises(errors.ConfigError, match="f:1: expected"):
        parse(row)


def test_line_ends_where_json_says(tmp_path):
    """These characters may stand in a text as they are, and end a line for `str.splitlines` alone."""
    text = "one\u2028two\u0085three"
    (tmp_path / "batch").write_text(f'{{"text": "{text}"}}\r\n{{"text": "b"}}\n', newline="")
    lines = batch.read(tmp_path / "batch")

    assert [line.messages[0]["content"] for line in lines] == [text, "b"]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"in=batch:.*none.jsonl"):
        batch.read(tmp_path / "none.jsonl")


async def test_failed_request_does_not_stop_later_requests():
    lines = [parse(json.dumps({"text": text})) for text in ("a", "fail", "b")]
    times, rows = iter((10.0, 12.0)), {}
    summary = await batch.run(
        Talk(), lines, rows, defaults={"max_tokens": 7}, now=lambda: next(times)
    )

    assert [rows[place].get("response") for place in range(3)] == ["A7", None, "B7"]
    assert rows[1]["error"] == "no"
    assert rows[0]["tokens_out"] == 2
    assert str(summary) == "3 lines, 1 failed, 4 tokens in 2.0 s: 2.0 tokens/s"


async def test_thoughts_of_an_answer_stand_beside_it():
    class Thinker:
        async def chat(self, messages, **fields):
            return session.Answer("4", "stop", 3, 2, 0.25, "2 + 2")

    rows = {}
    lines = [parse('{"text": "?"}')]
    await batch.run(Thinker(), lines, rows, defaults={})

    assert (rows[0]["response"], rows[0]["reasoning_content"]) == ("4", "2 + 2")


async def test_custom_id_of_a_line_is_one_of_its_answer_and_of_its_error():
    lines = [parse(json.dumps({"text": text, "custom_id": f"id {text}"})) for text in ("a", "fail")]
    rows = {}
    await batch.run(Talk(), lines, rows, defaults={})

    assert [rows[place]["custom_id"] for place in range(2)] == ["id a", "id fail"]


def test_unwritable_output_is_refused(tmp_path):
    path = tmp_path / "batch.jsonl"
    path.touch()
    with pytest.raises(errors.ConfigError, match=r"--output .*: cannot be written: No such file"):
        batch.check_output(tmp_path / "none" / "answers.jsonl", path)


def test_output_whose_name_leaves_no_room_is_refused_before_the_work(tmp_path):
    """Answers are written beside it, under a name longer by a process id, before they take its place."""
    path = tmp_path / "batch.jsonl"
    path.touch()
    with pytest.raises(errors.ConfigError, match=r"--output .*: cannot be written: File name too"):
        batch.check_output(tmp_path / ("a" * 255), path)


@pytest.mark.parametrize("make_alias", ["symlink_to", "hardlink_to", None])
def test_batch_is_not_overwritten_by_its_answers(tmp_path, make_alias):
    path, alias = tmp_path / "batch.jsonl", tmp_path / "alias.jsonl"
    path.write_text("precious")
    if make_alias is not None:
        getattr(alias, make_alias)(path)
    with pytest.raises(errors.ConfigError, match="another file"):
        batch.check_output(alias if make_alias else tmp_path / "." / "batch.jsonl", path)

    assert path.read_text() == "precious"


@pytest.mark.parametrize("end", [KeyboardInterrupt, errors.EngineFailed])
def test_stopped_batch_leaves_its_answers_beside_those_of_an_earlier_run(tmp_path, end):
    is_answered = asyncio.Event()

    class StoppedLoop:
        """Ends, as by Ctrl-C, when the second line is answered and the first one is not."""

        def call(self, work):
            async def stop():
                answering = asyncio.create_task(work)
                await is_answered.wait()
                answering.cancel()
                await asyncio.wait((answering,))

            asyncio.run(stop())
            raise end

    class SlowTalk(Talk):
        async def chat(self, messages, **fields):
            if messages[-1]["content"] == "slow":
                await asyncio.Event().wait()
            is_answered.set()
            return await super().chat(messages, **fields)

    path = tmp_path / "answers.jsonl"
    path.write_text("old")
    lines = [parse(json.dumps({"text": text})) for text in ("slow", "a")]
    with pytest.raises(end):
        run.answer_batch(StoppedLoop(), SlowTalk(), lines, {}, path)

    assert path.read_text() == "old"
    (answer,) = (tmp_path / "answers.jsonl.partial").read_text().splitlines()
    assert json.loads(answer)["response"] == "A"


def test_looking_whether_answers_can_be_written_leaves_no_empty_file(tmp_path):
    path, link = tmp_path / "batch.jsonl", tmp_path / "link.jsonl"
    path.touch()
    link.symlink_to(tmp_path / "absent.jsonl")
    batch.check_output(tmp_path / "answers.jsonl", path)
    batch.check_output(link, path)

    assert sorted(tmp_path.iterdir()) == [path, link]


def test_answers_replace_those_of_an_earlier_run(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("old")
    batch.write(path, {0: {"a": 1}})

    assert path.read_text() == '{"a":1}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_answers_that_cannot_be_written_are_printed(tmp_path, capsys):
    """Hours of work are not lost with the directory or the room on the disk."""
    path = tmp_path / "removed" / "answers.jsonl"
    with pytest.raises(errors.ConfigError, match="No such file or directory; the answers are on"):
        batch.write(path, {1: {"a": 2}, 0: {"a": 1}})

    assert capsys.readouterr().out == '{"a":1}\n{"a":2}\n'
