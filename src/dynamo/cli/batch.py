"""`dynamo run in=batch:FILE`: a JSON object per line in, an answer per line out, in the same order.

A line is {"text": "..."} or {"messages": [...]}; its other fields are those of OpenAI's request. A line that fails gets
an `error` instead of a `response`, and the others go on. A `custom_id` of a line is one of its answer, too. Of a batch
that is stopped, the answers are in FILE.partial, and an earlier file of answers stays as it is.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.cli import session, waiting

CONCURRENCY = 32


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The question of one line."""

    messages: list[dict[str, Any]]
    fields: dict[str, Any]
    head: dict[str, Any] = {}  # of its answer: the custom_id, if it has one


class Summary(msgspec.Struct, kw_only=True):
    """The counts of a batch, and the seconds that it took."""

    num_lines: int
    num_failed: int = 0
    completion_tokens: int = 0
    duration_s: float = 0.0

    def __str__(self) -> str:
        rate = self.completion_tokens / max(self.duration_s, 1e-9)
        return (
            f"{self.num_lines} lines, {self.num_failed} failed, {self.completion_tokens} tokens "
            f"in {self.duration_s:.1f} s: {rate:.1f} tokens/s"
        )


def read(path: Path) -> list[Line]:
    """Read the lines of a file. Raises ConfigError that names the line."""
    try:
        rows = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"in=batch:{path}: cannot be read: {error}") from error
    return [parse(row, f"{path}:{n}") for n, row in enumerate(rows, 1) if row.strip()]


def parse(row: str, source: str) -> Line:
    """Parse one line; `source` names it in the ConfigError of a wrong one."""
    expected = f'{source}: expected {{"text": "..."}} or {{"messages": [...]}}'
    try:
        fields = msgspec.json.decode(row, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise errors.ConfigError(f"{expected}: {error}") from error
    text, messages = fields.pop("text", None), fields.pop("messages", None)
    if isinstance(text, str) and messages is None:
        messages = [{"role": "user", "content": text}]
    if not isinstance(messages, list):
        raise errors.ConfigError(expected)
    head = {"custom_id": fields.pop("custom_id")} if "custom_id" in fields else {}
    return Line(messages=messages, fields=fields, head=head)


async def run(
    talk: session.Session,
    lines: list[Line],
    rows: dict[int, dict[str, Any]],
    *,
    defaults: dict[str, Any],
    now: Callable[[], float] = time.monotonic,
) -> Summary:
    """Answer all lines, at most CONCURRENCY at once, each into `rows` by its place as it ends; return the summary."""
    summary = Summary(num_lines=len(lines))
    began_at, slots = now(), asyncio.Semaphore(CONCURRENCY)

    async def answer_line(place: int, line: Line) -> None:
        async with slots:
            rows[place] = await _answer(talk, line, defaults, summary)
        show_progress(len(rows), len(lines))

    async with asyncio.TaskGroup() as group:
        for place, line in enumerate(lines):
            group.create_task(answer_line(place, line))
    summary.duration_s = now() - began_at
    return summary


def check_output(path: Path, batch_path: Path) -> None:
    """Check, before hours of work, that answers can be written there, beside the batch. Raises ConfigError."""
    try:
        is_new = not path.exists()
        path.open("ab").close()
        is_batch = path.samefile(batch_path)
        if path.is_file():
            partial = _partial(path)
            partial.touch()
            partial.unlink()
        if is_new:
            path.resolve().unlink()
    except OSError as error:
        raise errors.ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
    if is_batch:
        raise errors.ConfigError(
            f"--output {path}: expected another file than that of the batch, which the answers would overwrite"
        )


def write(path: Path, rows: Mapping[int, dict[str, Any]]) -> None:
    """Write one line of JSON for each answer, all of them or none; raises ConfigError after printing them instead."""
    partial = _partial(path)
    lines = b"".join(msgspec.json.encode(rows[place]) + b"\n" for place in sorted(rows))
    try:
        partial.write_bytes(lines)
        if path.is_file() or not path.exists():
            partial.replace(path.resolve())
        else:  # a pipe or a device
            path.write_bytes(lines)
            partial.unlink()
    except OSError as error:  # such as a full disk, after hours of work
        partial.unlink(missing_ok=True)
        print(lines.decode(), end="", flush=True)
        raise errors.ConfigError(
            f"--output {path}: cannot be written: {error.strerror}; the answers are on standard output"
        ) from error


def _partial(path: Path) -> Path:
    """Return the file that becomes the one of the answers when it is whole."""
    return path.resolve().with_name(f".{path.name}.{os.getpid()}")


async def _answer(
    talk: session.Session, line: Line, defaults: dict[str, Any], summary: Summary
) -> dict[str, Any]:
    try:
        answer = await talk.chat(line.messages, **{**defaults, **line.fields})
    except errors.DynamoError as error:
        summary.num_failed += 1
        return {**line.head, "messages": line.messages, "error": str(error)}
    summary.completion_tokens += answer.completion_tokens
    return {
        **line.head,
        "messages": line.messages,
        "response": answer.text,
        **({"reasoning_content": answer.thoughts} if answer.thoughts else {}),
        "tokens_in": answer.prompt_tokens,
        "tokens_out": answer.completion_tokens,
        "elapsed_ms": round(answer.duration_s * 1000),
        "finish_reason": answer.finish_reason,
    }


def show_progress(num_done: int, num_all: int) -> None:
    """Redraw the progress bar, if the output is a terminal."""
    if not waiting.can_redraw():
        return
    filled = "#" * (30 * num_done // num_all)
    end = "\n" if num_done == num_all else ""
    waiting.redraw(f"[{filled:<30}] {num_done}/{num_all}", end)
