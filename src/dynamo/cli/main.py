"""The `dynamo` command: its subcommands and their options. What they do is in the modules beside this one."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from dynamo.base import distribution, errors
from dynamo.cli import environment, run, serve
from dynamo.cli.topology import Topology

app = typer.Typer(
    name="dynamo",
    help="Serve large language models.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_INTERRUPTED = 130
_MODEL = "model directory or hub name; without it, the built-in model"
Port = Annotated[int, typer.Option(min=1, max=65535, envvar="DYN_HTTP_PORT", help="of the API")]
Host = Annotated[str, typer.Option(envvar="DYN_HTTP_HOST", help="0.0.0.0 for all networks")]
Prefill = Annotated[
    int, typer.Option(min=0, help="more workers, that compute long prompts for the others")
]


def main() -> None:
    """The entry point. A mistake of the user's is one sentence and exit code 2."""
    exit_code = 2
    try:
        exit_code = app(standalone_mode=False)
    except errors.DynamoError as error:
        print(f"dynamo: {error}", file=sys.stderr)
        exit_code = 2 if isinstance(error, errors.ConfigError) else 1
    except typer.TyperException as error:
        print(f"dynamo: {error.format_message()} (see dynamo --help)", file=sys.stderr)
    except (typer.Abort, KeyboardInterrupt):
        exit_code = _INTERRUPTED
    if exit_code == _INTERRUPTED:
        print(flush=True)
        os._exit(exit_code)  # the interpreter's own end would abort in an engine that still loads
    sys.exit(exit_code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(distribution.version())
        raise typer.Exit


@app.callback()
def dynamo(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="its version")
    ] = False,
) -> None:
    """Serve large language models."""


@app.command("serve")
def serve_command(  # noqa: PLR0913 - as many as the command has flags
    *,
    model: Annotated[str | None, typer.Argument(help=_MODEL)] = None,
    http_port: Port = 8000,
    http_host: Host = "127.0.0.1",
    workers: Annotated[
        int, typer.Option("--workers", "--decode", min=1, help="worker processes that answer")
    ] = 1,
    prefill: Prefill = 0,
    engine: Annotated[str, typer.Option(help="native or mocker")] = "native",
    model_name: Annotated[str | None, typer.Option(help="what clients call the model")] = None,
    worker_flags: Annotated[
        str, typer.Option(help="more flags for each worker, as one argument")
    ] = "",
    ready_timeout: Annotated[float, typer.Option(help="seconds to wait for the model")] = 300.0,
) -> int:
    """Start a frontend and workers, and watch over them."""
    return serve.serve(
        serve.ServeOptions(
            model=model,
            model_name=model_name,
            engine=engine,
            topology=Topology(num_answering=workers, num_prefill=prefill),
            http_host=http_host,
            http_port=http_port,
            ready_timeout_s=ready_timeout,
            worker_flags=tuple(shlex.split(worker_flags)),
        )
    )


@app.command("run")
def run_command(
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORDS",
            help="in=text|stdin|batch:FILE|http (how to ask), out=native|mocker|dyn://... (who answers), "
            + _MODEL,
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="of each answer")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0: always the same")] = None,
    output: Annotated[Path | None, typer.Option(help="file for the answers of a batch")] = None,
    prefill: Prefill = 0,
    decode: Annotated[int, typer.Option(min=1, help="workers that answer")] = 1,
    http_port: Port = 8000,
    http_host: Host = "127.0.0.1",
) -> int:
    """Talk to a model in the terminal, or by file."""
    fields = {"max_tokens": max_tokens, "temperature": temperature}
    return run.run(
        run.RunOptions(
            **run.read_words(words or []),
            fields={name: value for name, value in fields.items() if value is not None},
            output=output,
            topology=Topology(num_answering=decode, num_prefill=prefill),
            http_host=http_host,
            http_port=http_port,
        )
    )


@app.command("env")
def env_command() -> int:
    """Show what belongs into a bug report."""
    print(environment.report())
    return 0
