"""The configuration of a graph: sections by service, from the command line, a YAML file, decorators and constructors.

    Common:                      # values that several services share
      model: Qwen/Qwen3-0.6B
    VllmWorker:
      enforce-eager: true
      common-configs: [model]    # which of them this one gets
      ServiceArgs:               # of the process: workers, resources, dynamo.namespace
        workers: 2

A process gets all of it as JSON in DYNAMO_SERVICE_CONFIG. Keys may be written with - or _.
"""

import contextlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.base import errors
from dynamo.sdk import declaration

VARIABLE = "DYNAMO_SERVICE_CONFIG"
COMMON, _SHARED, _ARGS = "Common", "common-configs", "ServiceArgs"
_ARGS_WITH_KEYS = ("resources", "dynamo", "environment")
DEFAULT_PORT, _LAST_PORT = 8000, 65_535
Section = dict[str, Any]


class ServiceConfig(dict[str, Section]):
    """The sections by service; `get_instance()` reads them from the environment of a service's process."""

    @classmethod
    def get_instance(cls) -> "ServiceConfig":
        """Return the configuration of this process. Raises ConfigError if the variable is not JSON."""
        try:
            return cls(json.loads(os.environ.get(VARIABLE, "{}")))
        except (ValueError, TypeError) as error:
            raise errors.ConfigError(f"{VARIABLE}: expected a JSON object: {error}") from error

    def section(self, service: str) -> Section:
        """Return a service's own values and those that it takes from `Common`, without ServiceArgs."""
        own = self.get(service) or {}
        common = self.get(COMMON) or {}
        shared = {plain(key): value for key, value in common.items()}
        chosen = [plain(key) for key in own.get(_SHARED) or own.get("common_configs") or ()]
        if absent := [key for key in chosen if key not in shared]:
            raise errors.ConfigError(f"{service}, {_SHARED}: {absent[0]!r} is not in {COMMON}")
        values = {key: shared[key] for key in chosen}
        skipped = (_SHARED, "common_configs", _ARGS)
        return values | {plain(key): value for key, value in own.items() if key not in skipped}

    @classmethod
    def get_parsed_config(cls, service: str) -> Section:
        """Return a service's values in the configuration of this process, by the keys as they are written there."""
        config = cls.get_instance()
        own = config.get(service) or {}
        shared = own.get(_SHARED) or own.get("common_configs") or ()
        written = {plain(key): key for key in (*shared, *own)}
        return {written[key]: value for key, value in config.section(service).items()}

    def require(self, service: str, key: str) -> Any:
        """Return a value. Raises ConfigError that names service and key if it is missing."""
        section = self.section(service)
        if plain(key) not in section:
            raise errors.ConfigError(f"{service}.{key}: expected a value, got none")
        return section[plain(key)]

    def as_args(self, service: str, prefix: str = "") -> list[str]:
        """Return the values as flags; with `prefix`, the keys that begin with it, which is cut off."""
        start = plain(prefix)
        chosen = {
            key.removeprefix(start): value
            for key, value in self.section(service).items()
            if key.startswith(start)
        }
        return render_flags(chosen)

    def process_settings(self, service: str) -> Section:
        """Return the section's ServiceArgs. Raises ConfigError for an unknown key."""
        args: Section = (self.get(service) or {}).get(_ARGS) or {}
        if unknown := args.keys() - {"workers", "module", *_ARGS_WITH_KEYS}:
            raise errors.ConfigError(
                f"{service}.{_ARGS}: expected workers, resources, dynamo, environment or module, got {min(unknown)!r}"
            )
        if unknown := (args.get("resources") or {}).keys() - {*declaration.RESOURCES}:
            raise errors.ConfigError(
                f"{service}.{_ARGS}.resources: expected {', '.join(declaration.RESOURCES)}, got {min(unknown)!r}"
            )
        if unknown := (args.get("dynamo") or {}).keys() - {*declaration.DYNAMO_KEYS}:
            raise errors.ConfigError(
                f"{service}.{_ARGS}.dynamo: expected namespace, got {min(unknown)!r}"
            )
        return args

    def with_overrides(self, words: Sequence[str]) -> "ServiceConfig":
        """Return the configuration with `--Service.key=value` or `--Service.key value` laid over it.

        `--Service.ServiceArgs.workers=2` reaches into sections; values are JSON where they can be. Raises ConfigError.
        """
        merged = ServiceConfig(json.loads(json.dumps(self)))
        remaining_words = list(words)
        while remaining_words:
            word = remaining_words.pop(0)
            name, has_value, value = word.partition("=")
            path = name.removeprefix("--").split(".")
            if not word.startswith("--") or len(path) < 2 or not all(path):
                raise errors.ConfigError(
                    f"unrecognized argument: {word} (expected --Service.key=value)"
                )
            if not has_value:
                value = (
                    remaining_words.pop(0)
                    if remaining_words and not remaining_words[0].startswith("--")
                    else "true"
                )
            section: Section = merged
            for depth, part in enumerate(path[:-1], start=1):
                if section.get(part) is None:
                    section[part] = {}
                section = section[part]
                if not isinstance(section, dict):
                    raise errors.ConfigError(
                        f"{name}: {'.'.join(path[:depth])} is a value, expected a section with keys"
                    )
            for spelling in (path[-1].replace("_", "-"), path[-1].replace("-", "_")):
                section.pop(spelling, None)
            section[path[-1]] = value
            with contextlib.suppress(ValueError):
                section[path[-1]] = json.loads(value)
        return merged

    def check_names(self, names: Sequence[str], source: str) -> None:
        """Raise ConfigError for a section that no service of the graph has, or that has not the form of one."""
        for name, section in self.items():
            if name not in (*names, COMMON):
                raise errors.ConfigError(
                    f"{source}: no service is called {name}; there are {', '.join(names)}"
                )
            _check_keys(section, f"{source}, {name}")
            args = (section or {}).get(_ARGS)
            _check_keys(args, f"{source}, {name}.{_ARGS}")
            for key in _ARGS_WITH_KEYS:
                _check_keys((args or {}).get(key), f"{source}, {name}.{_ARGS}.{key}")
            shared = (section or {}).get(_SHARED, (section or {}).get("common_configs"))
            if not isinstance(shared, list | None):
                raise errors.ConfigError(
                    f"{source}, {name}.{_SHARED}: expected a list such as [{shared}], got {shared!r:.60}"
                )
            texts = {f"{_ARGS}.module": (args or {}).get("module")}
            texts |= {f"{_SHARED}[{n}]": key for n, key in enumerate(shared or ())}
            for place, value in texts.items():
                if not isinstance(value, str | None):
                    raise errors.ConfigError(
                        f"{source}, {name}.{place}: expected a text, got {value!r:.60}"
                    )


def read_port(service: str, section: Mapping[str, Any]) -> int:
    """Return the port of a service's HTTP API. Raises ConfigError for a value that is none."""
    text = str(section.get("port", DEFAULT_PORT))
    if not text.isdecimal() or not 0 < int(text) <= _LAST_PORT:
        raise errors.ConfigError(f"{service}.port: expected 1 to {_LAST_PORT}, got {text!r}")
    return int(text)


def _check_keys(section: object, place: str) -> None:
    """Raise ConfigError if a part of the configuration is not a section with words as keys."""
    if not isinstance(section, Mapping | None):
        raise errors.ConfigError(f"{place}: expected keys with values, got {section!r:.60}")
    for key in section or ():
        if not isinstance(key, str):
            raise errors.ConfigError(
                f"{place}: expected a word as key, got {key!r}: write it in quotes"
            )


def plain(key: str) -> str:
    """Return a key with dashes, as flags have it."""
    return key.replace("_", "-")


def with_defaults(
    config: ServiceConfig, specs: Sequence[declaration.DeclaredService]
) -> ServiceConfig:
    """Return the configuration over the values of decorators."""
    merged = ServiceConfig(config)
    for spec in specs:
        own = merged.get(spec.name) or {}
        present_keys = {plain(key) for key in own} | {*config.section(spec.name)}
        defaults = {
            key: value for key, value in spec.defaults.items() if plain(key) not in present_keys
        }
        if defaults:
            merged[spec.name] = {**defaults, **own}
    return merged


def constructor_values(cls: type, section: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters
    return {key: value for key in parameters if (value := section.get(plain(key))) is not None}


def render_flags(values: Mapping[str, Any]) -> list[str]:
    """Return flags: true is `--flag`, false nothing (`--no-flag` for what begins with enable), lists are JSON."""
    words: list[str] = []
    for key, value in values.items():
        flag = f"--{plain(key)}"
        if value is True:
            words.append(flag)
        elif value is False:
            words += [f"--no-{plain(key)}"] if key.startswith("enable") else []
        elif value is not None:
            words += [flag, value if isinstance(value, str) else json.dumps(value)]
    return words
