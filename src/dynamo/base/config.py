"""The options of every command: one frozen dataclass, filled from a file, the environment and the flags.

An option is declared once, with its name, variable, type, default and help; that of a `setting` is named after it:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class FrontendConfig:
        '''The HTTP frontend.'''
        http_port: int = setting(8000, help="port to listen on")

and `load(FrontendConfig, prog="python -m dynamo.frontend")` reads `--config FILE` (TOML or JSON), then
`DYN_HTTP_PORT`, then `--http-port`; the later wins. Unknown keys, values of the wrong type and numbers out of range
are refused in one sentence (ConfigError). Types: str, int, float, bool (`--flag`, `--no-flag`), Literal choices,
tuple[str, ...] (comma-separated, a JSON list, or the flag several times), PortRange (`7000-7099`), each also `| None`
(ports: `-1`).

`python -m dynamo.x` and the subcommands of `dynamo` declare their options in this way. A shell asks each of them for
completions by argcomplete's protocol, which `load` answers before it does anything else.
"""

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import json
import math
import os
import shlex
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dynamo.base import addresses, errors, foreign_options

C = TypeVar("C")
_Named = Mapping[str, Any]  # by the name of an option, or of its key in a file
_TRUE = frozenset(("1", "true", "yes", "on"))
_LIST_ACTIONS = {"word": "append", "text": "append", "words": "extend"}
_OWN_VARIABLE = "DYN_*"  # of a setting: the field's name stands for the asterisk
_FALSE = frozenset(("0", "false", "no", "off", ""))


def option(  # noqa: PLR0913 (a declaration; all but one have a default)
    default: Any = dataclasses.MISSING,
    *,
    help: str,  # noqa: A002
    env: str | None = None,
    flag: str | None = None,
    aliases: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
    takes: typing.Literal["word", "text", "words"] = "word",
    implied: tuple[str, Any] | None = None,
) -> Any:
    """Declare an option. `flag` replaces the one made from the field's name; "" makes it a positional argument.

    An option without a default has to be given.
    `env` is its environment variable; `aliases` are other flags for it; `least` and `most` bound a number. With "text"
    the value is a line of flags, which may begin with a dash; with "words" the flag takes all words up to the next
    flag. `implied` names another variable and the value that this option has if that one is set and this one is not.
    """
    metadata = {
        "help": help,
        "env": env,
        "flag": flag,
        "aliases": tuple(aliases),
        "range": (least, most),
        "takes": takes,
        "implied": implied,
    }
    return dataclasses.field(default=default, metadata=metadata)


def setting(default: Any, **declared: Any) -> Any:
    """Declare an `option` that the environment variable `DYN_` and its name in capitals sets as well."""
    return option(default, env=_OWN_VARIABLE, **declared)


def rest(*, help: str) -> Any:  # noqa: A002
    """Declare a field (tuple[str, ...]) for all arguments that no option declares, such as an engine's own."""
    metadata = {"help": help, "env": None, "takes_rest": True, "range": (None, None)}
    return dataclasses.field(default=(), metadata=metadata)


def load(
    cls: type[C],
    *,
    prog: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> C:
    """Return the configuration of this process. Prints help and exits for `--help`. Raises ConfigError."""
    return typing.cast(C, load_parts((cls,), prog=prog, argv=argv, environ=environ)[0])


def load_parts(
    parts: Sequence[type],
    *,
    prog: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    note: str = "",
    translate: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> tuple[Any, ...]:
    """Return several configurations, read as `load` does; the docstring of the first and `note` head the help.

    `translate` gives the names and values in the file of `--config` those of our options.
    """
    argv = sys.argv[1:] if argv is None else argv
    _check_blanks(argv)
    fields = {field.name: field for part in parts for field in dataclasses.fields(part)}
    hints = _hints(parts)
    rest_of = next((name for name, field in fields.items() if _takes_rest(field)), None)
    parser = _make_parser(parts, prog, note)
    complete(lambda: parser)
    texts = [_flag_of(f) for f in fields.values() if f.metadata.get("takes") == "text"]
    flags, further_arguments = parser.parse(
        _join_texts(argv, texts), takes_rest=rest_of is not None, passed_on=texts, parts=parts
    )
    path = flags.pop("config", None)
    environ = os.environ if environ is None else environ
    values = {  # in the order of rising force
        name: implied[1]
        for name, field in fields.items()
        if (implied := field.metadata.get("implied")) and environ.get(implied[0])
    }
    if path:
        source, content = read_file(path)
        values |= _from_file(source, translate(content), fields, hints)
    values |= _from_environment(environ, fields, hints)
    values |= _from_flags(flags, fields, hints)
    if rest_of is not None and further_arguments:
        values[rest_of] = tuple(further_arguments)
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and values.get(name, "") == "":
            raise errors.ConfigError(
                f"expected {_positional_name(name, _plain(hints[name]))} ({field.metadata['help']});"
                f" usage: {parser.usage}"
            )
    return tuple(
        part(**{f.name: values[f.name] for f in dataclasses.fields(part) if f.name in values})
        for part in parts
    )


def _from_environment(environ: Mapping[str, str], fields: _Named, hints: _Named) -> dict[str, Any]:
    """Return the options that variables set. An empty variable sets no option that may be None."""
    return {
        name: _read(field, hints[name], environ[variable], variable)
        for name, field in fields.items()
        if (variable := variable_of(field)) in environ
        and (environ[variable] or _plain(hints[name]) is hints[name])
    }


def _from_flags(flags: _Named, fields: _Named, hints: _Named) -> dict[str, Any]:
    values = {}
    for name, text in flags.items():
        if text not in (None, []):
            flag = _flag_of(fields[name])
            joined = ",".join(text) if flag and isinstance(text, list) else text
            values[name] = _read(fields[name], hints[name], joined, flag or name)
    return values


def _check_blanks(argv: Sequence[str]) -> None:
    """Raise ConfigError for an argument of blanks that is not the value of a flag: a shell passed it by mistake."""
    for number, (before, word) in enumerate(zip(("", *argv), argv, strict=False), 1):
        if word and not word.strip() and (not before.startswith("-") or "=" in before):
            raise errors.ConfigError(
                f"argument {number}, after {before or 'the command'!r}, is only blanks: a comment or a blank after a"
                " backslash? A backslash continues a line only as its last character"
            )


def _join_texts(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Write `--flag TEXT` as `--flag=TEXT` for these flags: argparse would take a text with a dash for a flag."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] in flags:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _takes_rest(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("takes_rest"))


def _flag_of(field: dataclasses.Field[Any]) -> str:
    flag = field.metadata.get("flag")
    return flag if flag is not None else "--" + field.name.replace("_", "-")


def _key_of(field: dataclasses.Field[Any]) -> str:
    """Return the key of an option in a file: its flag with _ for -, or the field's name without one."""
    return _flag_of(field).removeprefix("--").replace("-", "_") or field.name


def variable_of(field: dataclasses.Field[Any]) -> str:
    """Return the environment variable that sets an option; "" if there is none."""
    return (field.metadata["env"] or "").replace("*", field.name.upper())


def default_text(field: dataclasses.Field[Any]) -> str:
    """Return an option's default as a flag or variable would say it; "" if there is none."""
    value = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    return "" if value in (None, dataclasses.MISSING) else str(value)


def complete(make_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Answer a shell that asks for completions, and exit; does nothing otherwise."""
    if "_ARGCOMPLETE" in os.environ:  # loaded late: commands start without it
        importlib.import_module("argcomplete").autocomplete(make_parser())


def suggest(name: str, known_names: Iterable[str]) -> str:
    """Return a hint for a mistyped name: the most similar known one, or where to find them."""
    similar = difflib.get_close_matches(name, list(known_names), n=1, cutoff=0.7)
    return f"did you mean {similar[0]}?" if similar else "see --help"


class _HelpFormatter(argparse.HelpFormatter):
    """Breaks lines at blanks only, so that flags and variables stay whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError for every mistake."""

    def error(self, message: str) -> typing.NoReturn:
        raise errors.ConfigError(f"{message} (see --help)")

    def print_help(self, file: typing.Any = None) -> None:
        """Print the help, and exit if there is no place for it; argparse would say nothing."""
        try:
            print(self.format_help(), end="", file=file, flush=True)
        except OSError as error:
            sys.exit(f"{self.prog}: {error.strerror}")

    def parse(
        self,
        args: Sequence[str],
        *,
        takes_rest: bool,
        passed_on: Sequence[str] = (),
        parts: Sequence[type] = (),
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the declared arguments by name, and the others. Raises ConfigError for others unless `takes_rest`.

        `passed_on` are the flags that hold flags for other processes, as the error says. Of the others those are taken
        that NVIDIA Dynamo's processes with the options of `parts` have.
        """
        parse = self.parse_known_args if self._subparsers else self.parse_known_intermixed_args
        flags, others = parse(args)  # the latter takes words on both sides of a flag
        unknown = foreign_options.take(others, parts)
        if unknown and not takes_rest:
            hint = suggest(unknown[0].partition("=")[0], self._option_string_actions)
            if passed_on:
                hint += "" if hint.endswith("?") else "."
                hint += f" Flags of the processes that this starts go into {' or '.join(passed_on)}"
            raise errors.ConfigError(f"unrecognized argument: {unknown[0]} ({hint})")
        return vars(flags), unknown


def _make_parser(parts: Sequence[type], prog: str, note: str) -> Parser:
    fields = [field for _, own in _groups(parts) for field in own]
    hints = _hints(parts)
    positional = [
        name if field.default is dataclasses.MISSING else f"[{name}]"
        for field in fields
        if not _flag_of(field)
        for name in [_positional_name(field.name, _plain(hints[field.name]))]
    ]
    parser = Parser(
        prog=prog,
        usage=" ".join((prog, *positional, "[flags]")),
        description=f"{parts[0].__doc__} {note}",
        epilog=" ".join(field.metadata["help"] for field in fields if _takes_rest(field)),
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    add_options(parser, parts)
    return parser


def add_options(parser: argparse.ArgumentParser, parts: Sequence[type]) -> None:
    """Add the options of these dataclasses, in groups: one for each class that declares some, the first one's first.

    A command that has a --config of its own takes no file of options.
    """
    hints = _hints(parts)
    flags = {_flag_of(field) for part in parts for field in dataclasses.fields(part)}
    if "--config" not in flags:
        help_text = (
            "TOML or JSON file with any of these options, by name with _ for -; or such JSON itself"
        )
        parser.add_argument("--config", metavar="FILE", help=help_text)
    for title, own in _groups(parts):
        group = parser.add_argument_group(title)
        for field in own:
            if not _takes_rest(field):
                _add_flag(group, field.name, field, _plain(hints[field.name]))


def _hints(parts: Sequence[type]) -> dict[str, Any]:
    return {name: hint for part in parts for name, hint in typing.get_type_hints(part).items()}


def _groups(parts: Sequence[type]) -> Iterator[tuple[str, list[dataclasses.Field[Any]]]]:
    """Yield the fields that each class declares itself, under the first line of its docstring."""
    declared_names: set[str] = set()
    for cls in dict.fromkeys(cls for part in parts for cls in part.__mro__):
        fields = getattr(cls, "__dataclass_fields__", {})
        own = [
            fields[name]
            for name in inspect.get_annotations(cls)
            if name in fields and name not in declared_names
        ]
        declared_names.update(field.name for field in own)
        if own:
            head = (cls.__doc__ or cls.__name__).partition("\n")[0].rstrip(".")
            yield "this command" if cls is parts[0] else head, own


def _add_flag(
    parser: argparse._ActionsContainer, name: str, field: dataclasses.Field[Any], kind: Any
) -> None:
    text = field.metadata["help"]
    if default := default_text(field):
        text += f" (default: {default})"
    if variable := variable_of(field):
        text += f" [{variable}]"
    text = text.replace("%", "%%")  # argparse formats it
    flag = _flag_of(field)
    if not flag:  # one that has to be given as well: `load_parts` says what is missing
        many = typing.get_origin(kind) is tuple
        action = parser.add_argument(
            name, nargs="*" if many else "?", metavar=_positional_name(name, kind), help=text
        )
        _offer_choices(action, kind)
    elif kind is bool:
        parser.add_argument(
            flag,
            *field.metadata["aliases"],
            dest=name,
            action=argparse.BooleanOptionalAction,
            default=None,
            help=text,
        )
    else:
        action = parser.add_argument(
            flag,
            *field.metadata["aliases"],
            dest=name,
            metavar=_metavar(kind),
            help=text,
            action=_LIST_ACTIONS[field.metadata["takes"]]
            if typing.get_origin(kind) is tuple
            else "store",
            nargs="+" if field.metadata["takes"] == "words" else None,
        )
        _offer_choices(action, kind)


def _offer_choices(action: argparse.Action, kind: Any) -> None:
    """Let shell completion offer the words of a choice, and nothing for a number; elsewhere it offers files."""
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if choices or kind in (int, float):
        action.completer = lambda **_: choices  # type: ignore[attr-defined]


def _positional_name(name: str, kind: Any) -> str:
    """Return how help shows a positional argument: its choices, or its name."""
    if typing.get_origin(kind) is typing.Literal:
        return _metavar(kind)
    return name.upper() + ("..." if typing.get_origin(kind) is tuple else "")


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(typing.get_args(kind))
    return {int: "N", float: "X", addresses.PortRange: "PORTS"}.get(kind, "TEXT")


def _plain(hint: Any) -> Any:
    """Return the type without `| None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def read_file(argument: str, directory: Path = Path()) -> tuple[str, dict[str, Any]]:
    """Return what errors call a file of options, and its content; `argument` may be JSON itself. Raises ConfigError."""
    try:
        is_inline = argument.lstrip().startswith("{")
        text = argument if is_inline else (directory / argument).read_text("utf-8")
        is_json = text.lstrip().startswith("{")  # no TOML begins so
        content = json.loads(text) if is_json else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise errors.ConfigError(
            f"--config {argument}: expected a readable file of TOML or JSON, or JSON itself: {error}"
        ) from error
    return "--config" if is_inline else argument, content


def _from_file(source: str, content: _Named, fields: _Named, hints: _Named) -> dict[str, Any]:
    keys = {_key_of(field): name for name, field in fields.items()}
    names = {name: name for name in fields} | keys
    if unknown := sorted(content.keys() - names.keys()):
        raise errors.ConfigError(
            f"{source}: unknown key {unknown[0]!r}; expected one of {', '.join(sorted(keys))}"
        )
    return {
        names[key]: _read(fields[names[key]], hints[names[key]], value, f"{key} in {source}")
        for key, value in content.items()
        if value is not None or _plain(hints[names[key]]) is hints[names[key]]
    }


def _read(field: dataclasses.Field[Any], hint: Any, value: Any, source: str) -> Any:
    """Return `value` with the field's type. Raises ConfigError that names the source."""
    parsed = _parse(hint, value, source)
    if field.metadata.get("takes") == "text":
        try:
            shlex.split(parsed)
        except ValueError as error:
            raise errors.ConfigError(
                f"{source}: expected flags as in a shell, got {parsed!r} ({error})"
            ) from error
    check_range(field, parsed, source)
    return parsed


def check_range(field: dataclasses.Field[Any], value: Any, source: str) -> None:
    """Raise ConfigError that names the source for a number outside of the field's range."""
    least, most = field.metadata["range"]
    is_inside = (least is None or value >= least) and (most is None or value <= most)
    if not is_inside:  # NaN never is
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise errors.ConfigError(f"{source}: expected {expected}, got {value}")


def _parse(hint: Any, value: Any, source: str) -> Any:
    """Return `value` (text, or what TOML or argparse made of it) as the field's type. Raises ConfigError."""
    kind = _plain(hint)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
        raise errors.ConfigError(f"{source}: expected true or false, got {value!r}")
    if typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            raise errors.ConfigError(
                f"{source}: expected one of {', '.join(typing.get_args(kind))}, got {value!r}"
            )
        return value
    if typing.get_origin(kind) is tuple:
        parts = value
        if isinstance(value, str) and value.lstrip().startswith("["):
            with contextlib.suppress(ValueError, RecursionError):
                parts = json.loads(value)
        elif isinstance(value, str):
            parts = value.split(",")
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise errors.ConfigError(f"{source}: expected a list of texts, got {value!r}")
        return tuple(part.strip() for part in parts if part.strip())
    return _parse_plain(hint, value, source)


def _parse_plain(hint: Any, value: Any, source: str) -> Any:
    kind = _plain(hint)
    with contextlib.suppress(ValueError, OverflowError):  # the latter: more than a float can hold
        if kind is addresses.PortRange:
            is_none = kind is not hint and str(value) == "-1"
            return None if is_none else addresses.PortRange.parse(str(value))
        if isinstance(value, str) or (kind is float and type(value) is int):
            value = kind(value)
        if kind is float and type(value) is float and math.isinf(value):
            raise errors.ConfigError(f"{source}: expected a finite number, got {value}")
    if type(value) is kind:  # from TOML: true is no number, and 1.5 no whole number
        return value
    expected = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        addresses.PortRange: "a whole number up to 65535, or a range of ports like 7000-7099",
    }.get(kind, kind.__name__)
    raise errors.ConfigError(f"{source}: expected {expected}, got {value!r}")
