"""The `dynamo` command: the table of its subcommands. What they do, and their options, is in the modules beside this.

`dynamo --help` and shell completion read the same table; the options of a subcommand are a dataclass like those of
`python -m dynamo.x` (`base.config`). The commands down to `cloud` are those of NVIDIA Dynamo 0.3.
"""

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.base import config, distribution, errors, membership
from dynamo.cli import (
    bench,
    completion,
    deployment,
    graph,
    kube,
    kvbm,
    models,
    overview,
    package,
    processes,
    run,
    semantic,
    serve,
    top,
)
from dynamo.runtime import component
from dynamo.sdk import graph as graphs
from dynamo.worker import engines

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """Display information about the current environment, for a bug report."""


def show_environment(_: EnvironmentConfig) -> int:
    """Print the report and return 0."""
    print(report())
    return 0


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its options and the function that gets them and returns the exit code."""

    options: type
    run: Callable[[Any], int]


COMMANDS = {
    "env": Command(EnvironmentConfig, show_environment),
    "serve": Command(serve.ServeConfig, lambda options: serve.serve(options)),
    "run": Command(run.RunConfig, lambda options: run.run(options)),
    "deploy": Command(deployment.DeployConfig, deployment.deploy),
    "build": Command(package.BuildConfig, package.build),
    "get": Command(package.GetConfig, package.get),
    "deployment": Command(deployment.DeploymentConfig, deployment.manage),
    "containerize": Command(package.ContainerizeConfig, package.containerize),
    "cloud": Command(deployment.CloudConfig, deployment.cloud),
    "ps": Command(processes.ProcessListConfig, processes.list_processes),
    "stop": Command(processes.StopConfig, processes.stop),
    "logs": Command(processes.LogsConfig, processes.show_logs),
    "list": Command(models.ModelListConfig, models.list_models),
    "pull": Command(models.PullConfig, models.pull),
    "rm": Command(models.RemoveConfig, models.remove),
    "top": Command(top.TopConfig, top.run),
    "bench": Command(bench.BenchConfig, bench.run),
    "kvbm": Command(kvbm.KvbmCommandConfig, kvbm.run),
    "semantic": Command(semantic.SemanticCommandConfig, semantic.run),
    "kube": Command(kube.KubeCommandConfig, kube.run),
}
_GRAPH = Command(graph.GraphConfig, lambda options: graph.run(options))  # `serve`, of a graph
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
    try:
        exit_code = _run(sys.argv[1:])
    except errors.DynamoError as error:
        print(f"dynamo: {error}", file=sys.stderr)
        exit_code = 2 if isinstance(error, errors.ConfigError) else 1
    except KeyboardInterrupt:
        exit_code = _INTERRUPTED
    if exit_code == _INTERRUPTED:
        print(flush=True)
        os._exit(exit_code)  # the interpreter's own end would abort in an engine that still loads
    sys.exit(exit_code)


def _run(argv: Sequence[str]) -> int:
    parser = make_parser()
    config.complete(parser)
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(overview.render(_OPTIONS, {key: _summary(COMMANDS[key]) for key in COMMANDS}))
        return 0
    if name in COMMANDS:
        is_graph = name == "serve" and any(map(graphs.is_target, argv[1:]))
        command = _GRAPH if is_graph else COMMANDS[name]
        options: Any = config.load(command.options, prog=f"dynamo {name}", argv=argv[1:])
        return command.run(options)
    if not name.startswith("-"):
        raise errors.ConfigError(f"no such command: {name} ({config.suggest(name, COMMANDS)})")
    flags, _ = parser.parse(argv[:2] or ("--help",), takes_rest=False)
    _obey_flags(flags)
    return 0


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


def make_parser() -> config.Parser:
    """Return the parser of the whole command, for its help and for shell completion."""
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
    commands = parser.add_subparsers(
        title="commands", metavar="", parser_class=argparse.ArgumentParser
    )
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=_summary(command), allow_abbrev=False)
        config.add_options(subparser, (command.options,))
    return parser


def _summary(command: Command) -> str:
    return (command.options.__doc__ or "").partition("\n")[0]


_PACKAGES = (
    distribution.NAME,
    "torch",
    "tokenizers",
    "msgspec",
    "httptools",
    "pyzmq",
    "huggingface-hub",
)
_PREFIXES = ("DYN_", "DYNAMO_", "ETCD_", "NATS_", "HF_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_SECRETS = ("TOKEN", "KEY", "PASSWORD", "SECRET")


def report() -> str:
    """Return versions, machine, engines, planes and the variables that matter, one per line; secrets are hidden."""
    planes = config.load(component.RuntimeConfig, prog="dynamo env", argv=())
    discovery: str = planes.discovery_backend
    if discovery == "file":
        discovery += f", {membership.discovery_directory(None, os.environ)}"
    variables = {
        name: "(set)" if any(word in name for word in _SECRETS) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) and name != "DYN_FILE_KV"
    }
    rows = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": f"{platform.platform()}, {os.cpu_count()} CPUs",
        **{package: _version(package) for package in _PACKAGES},
        "engines": ", ".join(
            name if engines.is_installed(name) else f"{name} (not installed)"
            for name in engines.KIND_BY_NAME
        ),
        "discovery": discovery,
        "planes": f"requests {planes.request_plane}, events {planes.event_plane}",
        **variables,
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
