"""`dynamo run in=... out=... MODEL`: a model and a way to talk to it, in one process.

in=text          a conversation in the terminal (the default)
in=stdin         standard input is one prompt
in=batch:FILE    a JSON object per line
in=http          the OpenAI API
in=dyn://...     a worker at this endpoint, for frontends elsewhere: becomes `python -m dynamo.ENGINE`
out=native       the built-in engine, in this process (the default)
out=mocker       the simulated engine, in this process
out=llamacpp     llama.cpp, in this process, for a GGUF file (its default)
out=echo_core    the prompt's own tokens, one every DYN_TOKEN_ECHO_DELAY_MS
out=echo_full    the last message, likewise
out=dyn://...    workers that run elsewhere, found through discovery
out=auto         likewise, of any endpoint: those of MODEL, if it is given

With `--prefill N` and `--decode M`, several engines of this process divide the work as processes would.
"""

import asyncio
import contextlib
import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dynamo.base import clock as clocks
from dynamo.base import config, errors, process_setup
from dynamo.cli import batch, serve, serve_options, session, terminal, waiting, workers
from dynamo.frontend import config as frontend_config
from dynamo.frontend import service
from dynamo.observability import logs
from dynamo.protocols import instances
from dynamo.runtime import component
from dynamo.worker import engines, settings

SOURCES = ("text", "stdin", "batch:FILE", "http", "dyn://namespace.component.endpoint")
_BATCH = "batch:"
_LENGTH_FLAGS = {"sglang": "--context-length", "trtllm": "--max-seq-len"}
# Flags of 0.3's `dynamo-run` that a single process has no use for, and what to use instead.
_FRONTEND = "`python -m dynamo.frontend {flag} ...` beside workers (in=dyn://...)"
_ENGINE = "`python -m dynamo.ENGINE`, which takes the engine's own flags"
_REPLACEMENTS = {
    **dict.fromkeys(
        ("--router-mode", "--kv-overlap-score-weight", "--router-temperature", "--migration-limit"),
        _FRONTEND,
    ),
    "--use-kv-events": "`python -m dynamo.frontend --router-mode kv`, or there --no-kv-events",
    "--static-worker": "out=dyn://namespace.component.endpoint, which discovery finds",
    "--extra-engine-args": "`python -m dynamo.mocker {flag} FILE`",
    "--model-config": "a model directory, whose config.json is read",
    "--request-template": "--max-tokens and --temperature, or these fields in the requests",
    "--kv-cache-block-size": "`python -m dynamo.ENGINE --block-size ...`",
    "-v": "DYN_LOG=debug",
    "-vv": "DYN_LOG=trace",
    **dict.fromkeys(
        ("--tensor-parallel-size", "--base-gpu-id", "--num-nodes", "--node-rank", "--leader-addr"),
        _ENGINE,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(serve_options.HttpConfig):
    """Talk to a model in the terminal, or by file."""

    words: tuple[str, ...] = config.option(
        (),
        flag="",
        help="in=text|stdin|batch:FILE|http|dyn://... (how to ask; dyn://: serve this endpoint),"
        " out=native|mocker|vllm|llamacpp|echo_core|echo_full|dyn://...|auto (which workers answer; auto: those that"
        " discovery shows), and the model: a directory, a GGUF file, or a name on the Hugging Face hub; without it,"
        " the built-in model",
    )
    max_tokens: int | None = config.option(
        None, help="tokens of each answer at most (default: until the model ends it)", least=1
    )
    temperature: float | None = config.option(
        None, help="randomness of the answers; 0: always the same one", least=0
    )
    output: str | None = config.option(
        None, help="file for the answers of a batch (default: NAME-answers.jsonl beside it)"
    )
    prefill: int = config.option(
        0, help="further engines of this process that compute long prompts for the others", least=0
    )
    decode: int = config.option(1, help="engines of this process that answer", least=1)
    model_path: str | None = config.option(None, help="the model, as the argument MODEL names it")
    model_name: str | None = config.option(
        None,
        help="name under which clients ask for the model (default: the directory's or hub name)",
    )
    context_length: int | None = config.option(
        None,
        help="tokens of a prompt and its answer at most, where the model's own length takes too much memory",
        least=16,
    )
    further_words: tuple[str, ...] = config.rest(
        help="Other flags of 0.3's dynamo-run are refused with what to use instead."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What the options of a run mean."""

    source: str = "text"
    target: str
    model: str | None = None
    model_name: str | None = None
    context_length: int | None = None
    fields: dict[str, Any]  # of OpenAI's request: max_tokens ...
    output: Path | None = None
    topology: workers.Topology  # of the engines in this process
    http_host: str
    http_port: int

    @property
    def batch_path(self) -> Path | None:
        """The file of in=batch:FILE."""
        is_batch = self.source.startswith(_BATCH)
        return Path(self.source.removeprefix(_BATCH)) if is_batch else None

    @property
    def answers_path(self) -> Path | None:
        """The file for the answers to a batch: `--output`, or one beside the batch."""
        path = self.batch_path
        return path and (self.output or path.with_name(f"{path.stem}-answers.jsonl"))


def plan(options: RunConfig) -> RunPlan:
    """Interpret the options. Raises ConfigError."""
    if flags := [word for word in options.further_words if word.startswith("-")]:
        refuse_flag(flags[0])
    fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    path = (options.model_path,) if options.model_path else ()
    words = read_words((*options.words, *options.further_words, *path))
    _check_effect(words.get("source", "text"), options)
    target = words.get("target", "")
    is_named = "model" in words or options.model_name is not None
    if words.get("source") == "http" and workers.is_remote(target) and is_named:
        raise errors.ConfigError(
            f"{words.get('model') or '--model-name'}: has no effect with in=http and out={target}, where each"
            " request names its model"
        )
    return RunPlan(
        **{"target": engines.default_for(words.get("model")), **words},
        model_name=options.model_name,
        context_length=options.context_length,
        fields={name: value for name, value in fields.items() if value is not None},
        output=Path(options.output) if options.output is not None else None,
        topology=workers.Topology(num_answering=options.decode, num_prefill=options.prefill),
        http_host=options.http_host,
        http_port=options.http_port,
    )


def _check_effect(source: str, options: RunConfig) -> None:
    """Raise ConfigError for a flag that has no effect with this source."""
    if options.output is not None and not source.startswith(_BATCH):
        raise errors.ConfigError(
            f"--output: has no effect with in={source}, only with in=batch:FILE"
        )
    is_asked_elsewhere = source == "http" or source.startswith(workers.REMOTE_PREFIX)
    for name in ("max_tokens", "temperature"):
        if is_asked_elsewhere and getattr(options, name) is not None:
            raise errors.ConfigError(
                f"--{name.replace('_', '-')}: has no effect with in={source}, where each request has its {name}"
            )


def refuse_flag(word: str) -> NoReturn:
    """Raise ConfigError for an argument that no option declares, with what replaced it where it is one of 0.3's."""
    flag = word.partition("=")[0]
    if flag in _REPLACEMENTS:
        raise errors.ConfigError(f"{flag}: use {_REPLACEMENTS[flag].format(flag=flag)}")
    known = (f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(RunConfig))
    raise errors.ConfigError(f"unrecognized argument: {word} ({config.suggest(flag, known)})")


def read_words(words: Sequence[str]) -> dict[str, str]:
    """Read `in=text out=native MODEL`, in any order, into fields of `RunPlan`. Raises ConfigError."""
    fields: dict[str, str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        name = {"in": "source", "out": "target"}.get(key, "model") if sign else "model"
        if name in fields:
            raise errors.ConfigError(f"{word!r} is one too many: expected in=..., out=..., MODEL")
        fields[name] = word if name == "model" else value
    source = fields.get("source", "text")
    is_batch = source.startswith(_BATCH) and source != _BATCH
    if source.startswith(workers.REMOTE_PREFIX):
        instances.EndpointName.parse(source)
    elif source not in SOURCES and not is_batch:
        raise errors.ConfigError(f"in={source}: expected one of {', '.join(SOURCES)}")
    workers.endpoint_of(fields.get("target", "native"))
    return fields


def worker_command(planned: RunPlan) -> list[str]:
    """Return the command of the worker that in=dyn://... asks for. Raises ConfigError for a target without one."""
    target = planned.target
    if workers.is_remote(target) or target == workers.ECHO_FULL:
        raise errors.ConfigError(
            f"in={planned.source} starts a worker, which out={target} is not: expected an engine, or echo_core"
        )
    if planned.topology != workers.Topology():
        raise errors.ConfigError("--prefill and --decode: expected one worker for in=dyn://...")
    engine = workers.engine_of(target)
    command = [sys.executable, "-m", f"dynamo.{engine}"]
    command += ["--endpoint", planned.source]
    if planned.model is not None:
        command += ["--model", planned.model]
    if planned.model_name is not None:
        command += ["--model-name", planned.model_name]
    if planned.context_length is not None:
        flag = _LENGTH_FLAGS.get(engine, "--max-model-len")
        command += [flag, str(planned.context_length)]
    if target == workers.ECHO_CORE:
        command += ["--echo", "--tick-ms", os.environ.get("DYN_TOKEN_ECHO_DELAY_MS", "10")]
    return command


def run(options: RunConfig) -> int:
    """Run to the end and return the exit code. Raises DynamoError."""
    planned = plan(options)
    if planned.source.startswith(workers.REMOTE_PREFIX):
        command = worker_command(planned)
        print(shlex.join(command), flush=True)
        os.execv(command[0], command)
    logs.configure({"DYN_LOG": "warn", **os.environ})
    if planned.source == "http":
        serve.check_port(planned.http_host, planned.http_port, other="--http-port")
    lines = batch.read(planned.batch_path) if planned.batch_path else []
    if planned.batch_path and planned.answers_path:
        batch.check_output(planned.answers_path, planned.batch_path)
    is_remote = workers.is_remote(planned.target)
    if not is_remote:  # a download ends by Ctrl-C in this thread alone
        workers.find_model(planned.target, planned.model, planned.context_length)
    if planned.source == "http":
        asyncio.run(_serve_http(planned))
        return 0
    num_failed = 0
    with session.BackgroundLoop() as loop:
        contexts = [_open_session(planned)]
        talk = loop.call(contexts[0].__aenter__())

        def open_model(name: str) -> session.Session:
            """Return a session with another model, and end the one before."""
            other = with_model(planned, name)
            workers.find_model(other.target, name)  # in this thread, as above
            context = _open_session(other)
            replacement = loop.call(context.__aenter__())
            contexts.append(context)
            loop.call(contexts.pop(0).__aexit__(None, None, None))
            return replacement

        try:
            if planned.answers_path:
                signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
                num_failed = answer_batch(loop, talk, lines, planned.fields, planned.answers_path)
            elif planned.source == "stdin":
                session.answer_standard_input(loop, talk, planned.fields)
            else:
                terminal.TerminalConversation(
                    loop, talk, planned.fields, None if is_remote else open_model
                ).run()
        finally:
            loop.call(contexts.pop().__aexit__(None, None, None))
    return 1 if num_failed else 0


def with_model(planned: RunPlan, name: str) -> RunPlan:
    """Return the plan with another model, which its own engine serves unless `out=` names one that is not the usual."""
    is_usual = planned.target == engines.default_for(planned.model)
    target = engines.default_for(name) if is_usual else planned.target
    return dataclasses.replace(planned, target=target, model=name, model_name=None)


def answer_batch(
    loop: session.BackgroundLoop,
    talk: session.Session,
    lines: list[batch.Line],
    defaults: dict[str, Any],
    path: Path,
) -> int:
    """Write the answers to a batch, those that there are if it is stopped; return the number of lines that failed."""
    rows: dict[int, dict[str, Any]] = {}
    try:
        summary = loop.call(batch.run(talk, lines, rows, defaults=defaults))
    finally:
        if 0 < len(rows) < len(lines):
            partial_path = path.with_name(f"{path.name}.partial")
            batch.write(partial_path, rows)
            waiting.say(f"{len(rows)} answers to {len(lines)} lines in {partial_path}")
    batch.write(path, rows)
    print(f"{summary}; answers in {path}")
    return summary.num_failed


@contextlib.asynccontextmanager
async def _open_session(planned: RunPlan) -> AsyncIterator[session.Session]:
    async with _join(planned) as runtime:
        is_remote = workers.is_remote(planned.target)  # else there is no other model than that one
        asked = (planned.model_name or planned.model) if is_remote else None
        endpoint = await workers.find_endpoint(runtime, planned.target, asked)
        yield await session.connect(runtime, endpoint, clocks.SystemClock(), asked)


def _join(planned: RunPlan) -> contextlib.AbstractAsyncContextManager[component.DistributedRuntime]:
    """Open the runtime of the plan's workers."""
    model = settings.WorkerConfig(model=planned.model, model_name=planned.model_name)
    return workers.join(planned.target, model, planned.topology, planned.context_length)


async def _serve_http(planned: RunPlan) -> None:
    """Serve the API from this process, with the workers of the plan, until a signal comes. Raises ConfigError."""
    is_remote = workers.is_remote(planned.target)
    endpoint = workers.endpoint_of(planned.target) if is_remote else None
    options = dataclasses.replace(
        # which has the keys, limits and certificates of the environment
        config.load(frontend_config.FrontendConfig, prog="dynamo run", argv=()),
        http_host=planned.http_host,
        http_port=planned.http_port,
        namespace="" if endpoint is None else endpoint.namespace,
    )
    description = "" if is_remote else f"{planned.topology.describe()}; "
    async with (
        _join(planned) as runtime,
        service.Frontend(options, runtime) as frontend,
    ):
        print(f"listening on {frontend.url}; {description}stop: Ctrl-C", flush=True)
        await frontend.run(process_setup.stop_on_signals())
