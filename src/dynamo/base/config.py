"""One frozen dataclass per process, filled from a file, the environment and the flags, in that order of rising force.

A configuration is declared once:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class FrontendConfig:
        '''The HTTP door.'''
        http_port: int = option(8000, env="DYN_HTTP_PORT", help="port to listen on")

and `load(FrontendConfig, prog="python -m dynamo.frontend")` reads `--config FILE` (TOML), then `DYN_HTTP_PORT`, then
`--http-port`. Keys that nobody knows, values of the wrong kind and numbers out of range are refused in one sentence
(ConfigError).
Types: str, int, float, bool (`--flag`, `--no-flag`), Literal choices, tuple[str, ...]
(comma-separated, or the flag again);
each also `| None`.
"""

import argparse
import dataclasses
import difflib
import inspect
import os
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dynamo.base import errors

C = TypeVar("C")
_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("0", "false", "no", "off", ""))


def option(
    default: Any,
    *,
    help: str,  # noqa: A002
    env: str | None = None,
    flag: str | None = None,
    aliases: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A field of a configuration. `flag` replaces the one made from the field's name; "" takes a bare argument.

    `aliases` are other flags that mean the same; `least` and `most` bound a number.
    """
    metadata = {
        "help": help,
        "env": env,
        "flag": flag,
        "aliases": tuple(aliases),
        "range": (least, most),
    }
    return dataclasses.field(default=default, metadata=metadata)


def rest(*, help: str) -> Any:  # noqa: A002
    """A field (tuple[str, ...]) for the arguments that nobody declares: who reads them judges them."""
    metadata = {"help": help, "env": None, "takes_rest": True, "range": (None, None)}
    return dataclasses.field(default=(), metadata=metadata)


def load(
    cls: type[C],
    *,
    prog: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> C:
    """The configuration of this process. Prints help and exits for `--help`. Raises ConfigError."""
    return typing.cast(C, load_parts((cls,), prog=prog, argv=argv, environ=environ)[0])


def load_parts(
    parts: Sequence[type],
    *,
    prog: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Any, ...]:
    """As `load`, where each package brings its own dataclass; the first docstring heads the help."""
    fields = {field.name: field for part in parts for field in dataclasses.fields(part)}
    hints = {name: hint for part in parts for name, hint in typing.get_type_hints(part).items()}
    rest_of = next((name for name, field in fields.items() if _takes_rest(field)), None)
    flags, rest_given = _parser(parts, hints, prog).parse(
        sys.argv[1:] if argv is None else argv, takes_rest=rest_of is not None
    )
    path = flags.pop("config")
    values = _from_file(path, fields, hints) if path else {}
    values |= _from_environment(os.environ if environ is None else environ, fields, hints)
    given = {
        name: ",".join(flag) if isinstance(flag, list) else flag
        for name, flag in flags.items()
        if flag is not None
    }
    values |= {
        name: _read(fields[name], hints[name], flag, _flag_of(fields[name]))
        for name, flag in given.items()
    }
    if rest_of is not None and rest_given:
        values[rest_of] = tuple(rest_given)
    return tuple(
        part(**{f.name: values[f.name] for f in dataclasses.fields(part) if f.name in values})
        for part in parts
    )


def _takes_rest(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("takes_rest"))


def _flag_of(field: dataclasses.Field[Any]) -> str:
    flag = field.metadata.get("flag")
    return flag if flag is not None else "--" + field.name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise errors.ConfigError(f"{message} (see --help)")

    def parse(self, args: Sequence[str], *, takes_rest: bool) -> tuple[dict[str, Any], list[str]]:
        """What is known, and the rest; if nobody takes that, says which flag might have been meant."""
        found, unknown = self.parse_known_args(args)
        if unknown and not takes_rest:
            name = unknown[0].partition("=")[0]
            similar = difflib.get_close_matches(name, self._option_string_actions, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "see --help"
            raise errors.ConfigError(f"unrecognized argument: {unknown[0]} ({hint})")
        return vars(found), unknown


def _parser(parts: Sequence[type], hints: Mapping[str, Any], prog: str) -> _Parser:
    """The flags stand in groups: what each class declares itself, the process's own first."""
    fields = [field for part in parts for field in dataclasses.fields(part)]
    bare = [f"[{field.name}]" for field in fields if not _flag_of(field)]
    usage = " ".join((prog, *bare, "[flags]"))
    parser = _Parser(
        prog=prog,
        usage=usage,
        description=parts[0].__doc__,
        epilog=" ".join(field.metadata["help"] for field in fields if _takes_rest(field)),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with any of these settings, by field name"
    )
    for title, own in _groups(parts):
        group = parser.add_argument_group(title)
        for field in own:
            if not _takes_rest(field):
                _add_flag(group, field.name, field, _plain(hints[field.name]))
    return parser


def _groups(parts: Sequence[type]) -> Iterator[tuple[str, list[dataclasses.Field[Any]]]]:
    """The fields of each class that declares some, under the first line of its docstring."""
    seen: set[str] = set()
    for cls in dict.fromkeys(cls for part in parts for cls in part.__mro__):
        own = [
            field
            for field in getattr(cls, "__dataclass_fields__", {}).values()
            if field.name in inspect.get_annotations(cls) and field.name not in seen
        ]
        seen.update(field.name for field in own)
        if own:
            head = (cls.__doc__ or cls.__name__).partition("\n")[0].rstrip(".")
            yield "this process" if cls is parts[0] else head, own


def _add_flag(
    parser: argparse._ActionsContainer, name: str, field: dataclasses.Field[Any], kind: Any
) -> None:
    text = field.metadata["help"]
    if field.default not in (None, "", ()):
        text += f" (default: {field.default})"
    if field.metadata["env"]:
        text += f" [{field.metadata['env']}]"
    text = text.replace("%", "%%")  # argparse formats it
    flag = _flag_of(field)
    if not flag:
        parser.add_argument(name, nargs="?", help=text)
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
        parser.add_argument(
            flag,
            *field.metadata["aliases"],
            dest=name,
            metavar=_metavar(kind),
            help=text,
            action="append" if typing.get_origin(kind) is tuple else "store",
        )


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(typing.get_args(kind))
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _plain(hint: Any) -> Any:
    """The type without `| None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _from_file(path: str, fields: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    try:
        content = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:  # no such file, no text, no TOML
        raise errors.ConfigError(
            f"--config {path}: expected a readable TOML file: {error}"
        ) from error
    unknown = sorted(content.keys() - fields.keys())
    if unknown:
        raise errors.ConfigError(
            f"--config {path}: unknown key {unknown[0]!r}; known are {', '.join(sorted(fields))}"
        )
    return {
        name: _read(fields[name], hints[name], value, f"{name} in {path}")
        for name, value in content.items()
    }


def _from_environment(
    environ: Mapping[str, str],
    fields: Mapping[str, dataclasses.Field[Any]],
    hints: Mapping[str, Any],
) -> dict[str, Any]:
    named = {name: field.metadata["env"] for name, field in fields.items() if field.metadata["env"]}
    return {
        name: _read(fields[name], hints[name], environ[env], env)
        for name, env in named.items()
        if env in environ
    }


def _read(field: dataclasses.Field[Any], hint: Any, value: Any, source: str) -> Any:
    """`value` as the field wants it. Raises ConfigError, naming the source."""
    parsed = _parse(hint, value, source)
    least, most = field.metadata["range"]
    is_inside = (least is None or parsed >= least) and (most is None or parsed <= most)
    if is_inside:  # not a number is never inside
        return parsed
    expected = f"at least {least}" if most is None else f"{least} to {most}"
    raise errors.ConfigError(f"{source}: expected {expected}, got {parsed}")


def _parse(hint: Any, value: Any, source: str) -> Any:
    """`value` (text, or what TOML or argparse made of it) as the field's type. Raises ConfigError."""
    kind = _plain(hint)
    if kind is bool:
        return _parse_bool(value, source)
    if typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            raise errors.ConfigError(
                f"{source}: expected one of {', '.join(typing.get_args(kind))}, got {value!r}"
            )
        return value
    if typing.get_origin(kind) is tuple:
        return _parse_list(value, source)
    return _parse_plain(kind, value, source)


def _parse_plain(kind: type, value: Any, source: str) -> Any:
    try:
        if isinstance(value, str) or (kind is float and type(value) is int):
            return kind(value)
    except ValueError:
        pass
    if type(value) is kind:  # TOML's own; true is no number here, and 1.5 no whole one
        return value
    expected = {int: "a whole number", float: "a number", str: "a text"}.get(kind, kind.__name__)
    raise errors.ConfigError(f"{source}: expected {expected}, got {value!r}")


def _parse_list(value: Any, source: str) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise errors.ConfigError(f"{source}: expected a list of texts, got {value!r}")
    return tuple(part.strip() for part in parts if part.strip())


def _parse_bool(value: Any, source: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise errors.ConfigError(f"{source}: expected true or false, got {value!r}")
