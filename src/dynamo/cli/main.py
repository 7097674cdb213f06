"""The `dynamo` command: the table of its subcommands. What they do, and their options, is in the modules beside this.

`dynamo --help` and shell completion read the same table; the options of a subcommand are a dataclass like those of
`python -m dynamo.x` (`base.config`). The commands down to `cloud` are those of NVIDIA Dynamo 0.3.
"""

import argparse
import contextlib
import dataclasses
import errno
import importlib
import io
import os
import shutil
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.base import config, distribution, errors
from dynamo.cli import completion
from dynamo.sdk import graph as graphs

ABOUT = (
    "The Dynamo CLI is a CLI for serving, containerizing, and deploying Dynamo applications.",
    "You use `serve` to run a model or a graph of services locally, `build` and `containerize` to package a graph, and"
    " `deploy` to bring it to a Kubernetes cluster.",
)
_MOST_CHARS, _LEAST_CHARS = 100, 40


def render(options: Mapping[str, str], commands: Mapping[str, str]) -> str:
    """Return the page for a terminal's width."""
    width = max(_LEAST_CHARS, min(_MOST_CHARS, shutil.get_terminal_size().columns))
    about = "\n\n".join(
        textwrap.fill(text, width - 2, initial_indent=" ", subsequent_indent=" ") for text in ABOUT
    )
    boxes = _box("Options", options, width) + _box("Commands", commands, width)
    return f"\n Usage: dynamo [OPTIONS] COMMAND [ARGS]...\n\n{about}\n\n" + "\n".join(boxes)


def _box(title: str, rows: Mapping[str, str], width: int) -> list[str]:
    column = max(map(len, rows)) + 2
    lines = [f"╭─ {title} {'─' * (width - len(title) - 5)}╮"]
    for name, text in rows.items():
        for number, line in enumerate(textwrap.wrap(text, width - column - 4) or [""]):
            lines.append(f"│ {name if number == 0 else '':<{column}}{line:<{width - column - 4}} │")
    return [*lines, f"╰{'─' * (width - 2)}╯"]


_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its options and the function that gets them and returns the exit code.

    Both are imported from the module of `dynamo.cli` when they are used: the servers' modules take a second to load.
    """

    module: str
    options_name: str
    function_name: str
    summary: str

    @property
    def options(self) -> type:
        options: type = getattr(self._imported, self.options_name)
        return options

    def run(self, options: Any) -> int:
        """Run the command, and return its exit code."""
        code: int = getattr(self._imported, self.function_name)(options)
        return code

    @property
    def _imported(self) -> types.ModuleType:
        return importlib.import_module(f"dynamo.cli.{self.module}")


COMMANDS = {
    "env": Command(
        "environment",
        "EnvironmentConfig",
        "show_environment",
        "Display information about the current environment, for a bug report.",
    ),
    "serve": Command(
        "serve_models",
        "ServeConfig",
        "serve_any",
        "Locally serve a model, or a graph of services (module:Class).",
    ),
    "run": Command("run", "RunConfig", "run", "Talk to a model in the terminal, or by file."),
    "deploy": Command(
        "deployment", "DeployConfig", "deploy", "Deploy a graph (same as deployment create)."
    ),
    "build": Command(
        "package",
        "BuildConfig",
        "build",
        "Package a graph of services for deployment; optionally builds a container image.",
    ),
    "get": Command("package", "GetConfig", "get", "Display the details of a packaged graph."),
    "deployment": Command(
        "deployment",
        "DeploymentConfig",
        "manage",
        "Create, list, show, update and delete deployments of graphs on a Kubernetes cluster.",
    ),
    "containerize": Command(
        "package",
        "ContainerizeConfig",
        "containerize",
        "Build a container image from a packaged graph.",
    ),
    "cloud": Command(
        "deployment", "CloudConfig", "cloud", "Say what replaced the Dynamo Cloud of 0.3."
    ),
    "ps": Command(
        "processes", "ProcessListConfig", "list_processes", "List what `dynamo serve` runs here."
    ),
    "stop": Command(
        "processes", "StopConfig", "stop", "Stop a `dynamo serve`; running requests finish first."
    ),
    "logs": Command(
        "processes", "LogsConfig", "show_logs", "Show what a `dynamo serve` and its processes said."
    ),
    "list": Command("models", "ModelListConfig", "list_models", "List the models on this machine."),
    "pull": Command(
        "models", "PullConfig", "pull", "Download a model from the hub, or what is missing of it."
    ),
    "rm": Command(
        "models", "RemoveConfig", "remove", "Remove a downloaded model from this machine."
    ),
    "top": Command("top", "TopConfig", "run", "Show the load of a frontend's models, live."),
    "bench": Command("bench", "BenchConfig", "run", "Load a frontend and report its times."),
    "kvbm": Command(
        "kvbm",
        "KvbmCommandConfig",
        "run",
        "Look at, verify or empty the file of a disk tier of the KV cache.",
    ),
    "semantic": Command(
        "semantic",
        "SemanticCommandConfig",
        "run",
        "Check a configuration of the semantic router, explain its decision, or replay requests with a new one.",
    ),
    "kube": Command(
        "kube",
        "KubeCommandConfig",
        "run",
        "Run a Kubernetes cluster on this machine, with pods as local processes; convert and apply manifests.",
    ),
}
_PROGRAMS = (  # `python -m dynamo.NAME`
    *("frontend", "native", "mocker", "vllm", "sglang", "trtllm", "llamacpp", "router", "planner"),
    *("profiler", "simulate", "metrics", "operator", "semantic_router", "semantic_encoder"),
)
# `serve`, of a graph
_GRAPH = Command("graph", "GraphConfig", "run", "Start the services of a graph.")
_OPTIONS = {
    "--version -v": "Show the application version and exit.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Show completion for the current shell, to copy it or customize the installation.",
    "--help -h": "Show this message and exit.",
}


def run_main() -> None:
    """Run `dynamo-run`, which is `dynamo run`."""
    sys.argv.insert(1, "run")
    main()


def main() -> None:
    """Run the command and exit. A mistake of the user's is one sentence and exit code 2."""
    exit_code = 2
    if sys.stderr is None:  # closed at the start: `print` would write to the output instead
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (for as long as the process runs)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # what its encoding lacks is shown as "?"
    try:
        exit_code = _run(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, RuntimeError) as error:
        exit_code = _explain(error)
    except errors.DynamoError as error:
        print(f"dynamo: {error}", file=sys.stderr)
        exit_code = 2 if isinstance(error, errors.ConfigError) else 1
    except KeyboardInterrupt:
        exit_code = _INTERRUPTED
    if exit_code == _INTERRUPTED:
        with contextlib.suppress(OSError):
            print(flush=True)
        os._exit(exit_code)  # the interpreter's own end would abort in an engine that still loads
    sys.exit(exit_code)


def _explain(error: OSError | RuntimeError) -> int:
    """Say why there is no place for files or output, or no home; return the exit code. Raises other errors again."""
    if isinstance(error, RuntimeError):
        if "home directory" not in str(error):  # so pathlib says it
            raise error
        print(f"dynamo: {error} Set HOME to one", file=sys.stderr)
        return 2
    if error.errno in (errno.EACCES, errno.EROFS) or "temporary directory" in str(error):
        print(f"dynamo: {error}; expected files that we can use, and TMPDIR to name a directory for"
              " temporary ones", file=sys.stderr)  # fmt: skip
        return 2
    if error.errno not in (errno.EPIPE, errno.ENOSPC):
        raise error
    if error.errno == errno.ENOSPC:  # EPIPE: the reader of the output has gone, such as `head`
        print(f"dynamo: {error.strerror}", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
    return 1


def _run(argv: Sequence[str]) -> int:
    config.complete(make_parser)
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        print(render(_OPTIONS, {key: COMMANDS[key].summary for key in COMMANDS}))
        return 0
    if name in COMMANDS:
        command = _GRAPH if name == "serve" and _names_graph(argv[1:]) else COMMANDS[name]
        options: Any = config.load(command.options, prog=f"dynamo {name}", argv=argv[1:])
        return command.run(options)
    if not name.startswith("-"):
        is_program = name in _PROGRAMS
        hint = f"see python -m dynamo.{name}" if is_program else config.suggest(name, COMMANDS)
        raise errors.ConfigError(f"no such command: {name} ({hint})")
    flags, _ = make_parser(has_commands=False).parse(argv[:2], takes_rest=False)
    _obey_flags(flags)
    return 0


def _names_graph(argv: Sequence[str]) -> bool:
    """Return whether `dynamo serve` is called with a graph; a model's name in a flag may look like one."""
    names = [
        field.name
        for field in dataclasses.fields(COMMANDS["serve"].options)
        if field.type is not bool
    ]
    flags = {f"--{name.replace('_', '-')}" for name in names}
    words = zip(("", *argv), argv, strict=False)
    return any(graphs.is_target(word) for before, word in words if before not in flags)


def _obey_flags(flags: dict[str, Any]) -> None:
    """Do what the flags of `dynamo` itself ask for."""
    if flags["version"]:
        print(distribution.version())
    elif flags["show_completion"] is not None:
        print(completion.script(_shell(flags["show_completion"])))
    elif flags["install_completion"] is not None:
        shell = _shell(flags["install_completion"])
        path = completion.install(shell, Path.home())
        print(f"{shell} completion installed in {path}; it takes effect in a new terminal")


def _shell(name: str) -> str:
    return completion.check_shell(name) if name else completion.detect_shell(dict(os.environ))


def make_parser(*, has_commands: bool = True) -> config.Parser:
    """Return the parser of the command; shell completion needs that of each subcommand, which take a second to load."""
    parser = config.Parser(
        prog="dynamo",
        usage="dynamo COMMAND [flags]",
        description="Serve large language models.",
        epilog="dynamo COMMAND --help shows the flags of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", "-v", action="store_true", help="show the version")
    for flag, text in (
        ("--install-completion", "install completion for this shell, or for the one named"),
        ("--show-completion", "show the completion script, to copy it or to adapt it"),
    ):
        parser.add_argument(
            flag, nargs="?", const="", choices=("", *completion.SHELLS), metavar="SHELL", help=text
        )
    if not has_commands:
        return parser
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.summary, allow_abbrev=False)
        config.add_options(subparser, (command.options,))
    return parser
