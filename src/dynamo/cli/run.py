"""`dynamo run in=... out=... MODEL`: a model and a way to talk to it, in one process.

in=text          a conversation in the terminal (the default)
in=stdin         standard input is one prompt
in=batch:FILE    a JSON object per line
in=http          the OpenAI API
out=native       the built-in engine, in this process (the default)
out=mocker       the simulated engine, in this process
out=dyn://...    workers that run elsewhere, found through discovery

With `--prefill N` and `--decode M`, several engines of this process divide the work as processes would.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import errors, process_setup
from dynamo.cli import answerers, background, batch, chat, session
from dynamo.cli.topology import Topology
from dynamo.frontend import config, service
from dynamo.observability import logs

SOURCES = ("text", "stdin", "batch:FILE", "http")
_BATCH = "batch:"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the user asked for."""

    source: str = "text"
    target: str = "native"
    model: str | None = None
    fields: dict[str, Any]  # of OpenAI's request: max_tokens ...
    output: Path | None = None
    topology: Topology  # of workers in this process
    http_host: str
    http_port: int

    @property
    def batch_path(self) -> Path | None:
        """The file of in=batch:FILE."""
        is_batch = self.source.startswith(_BATCH)
        return Path(self.source.removeprefix(_BATCH)) if is_batch else None

    @property
    def answers_path(self) -> Path | None:
        """Where the answers to a batch go: `--output`, or beside the batch."""
        path = self.batch_path
        return path and (self.output or path.with_name(f"{path.stem}-answers.jsonl"))


def read_words(words: Sequence[str]) -> dict[str, str]:
    """`in=text out=native MODEL`, in any order. Raises ConfigError."""
    read: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        name = {"in": "source", "out": "target"}.get(key, "model") if value else "model"
        if name in read:
            raise errors.ConfigError(f"{word!r} is one too many: expected in=..., out=..., MODEL")
        read[name] = word if name == "model" else value
    source = read.get("source", "text")
    if source not in SOURCES and not source.startswith(_BATCH):
        raise errors.ConfigError(f"in={source}: expected one of {', '.join(SOURCES)}")
    answerers.check(read.get("target", "native"))
    return read


def run(options: RunOptions) -> int:
    """Do it; gives the exit code. Raises DynamoError."""
    logs.configure({"DYN_LOG": "warn", **os.environ})
    if options.source == "http":
        asyncio.run(_serve_http(options))
        return 0
    lines = batch.read(options.batch_path) if options.batch_path else []
    if options.answers_path:
        batch.check_output(options.answers_path)
    clock = clocks.SystemClock()
    with background.Background() as loop:
        opened = _open_session(options, clock)
        talk = loop.call(opened.__aenter__())
        try:
            if options.answers_path:
                _run_batch(options, options.answers_path, loop, talk, lines)
            elif options.source == "stdin":
                chat.answer_standard_input(loop, talk, options.fields)
            else:
                chat.converse(loop, talk, options.fields)
        finally:
            loop.call(opened.__aexit__(None, None, None))
    return 0


def _run_batch(
    options: RunOptions,
    output: Path,
    loop: background.Background,
    talk: session.Session,
    lines: list[batch.Line],
) -> None:
    clock = clocks.SystemClock()
    rows, summary = loop.call(batch.run(talk, lines, defaults=options.fields, now=clock.now))
    batch.write(output, rows)
    print(f"{summary}; answers in {output}")


@contextlib.asynccontextmanager
async def _open_session(options: RunOptions, clock: clocks.Clock) -> AsyncIterator[session.Session]:
    async with answerers.join(options.target, options.model, options.topology) as runtime:
        endpoint = answerers.endpoint_of(options.target)
        yield await session.connect(runtime, endpoint, clock)


def _told(options: RunOptions) -> str:
    """The workers, where they are ours."""
    return "" if answerers.is_remote(options.target) else f"{options.topology.describe()}; "


async def _serve_http(options: RunOptions) -> None:
    """The frontend beside whoever answers, until told to stop."""
    door = config.FrontendConfig(http_host=options.http_host, http_port=options.http_port)
    async with (
        answerers.join(options.target, options.model, options.topology) as runtime,
        service.Frontend(door, runtime) as frontend,
    ):
        print(f"listening on {frontend.url}; {_told(options)}stop: Ctrl-C", flush=True)
        await frontend.run(process_setup.stop_on_signals())
