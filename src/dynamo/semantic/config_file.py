"""The configuration file: read, checked and decoded, with notes on what has no effect.

What the original has and this router does not is refused by name; a key that neither knows is named in a note, because
the original passes over it. Nothing in a file can run away: its size, depth and number of values have bounds.
"""

import dataclasses
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from dynamo.base import errors
from dynamo.runtime.http import json_body
from dynamo.semantic import (
    config,
    config_v03,
    decisions,
    encoder_labels,
    milvus_config,
    tool_database,
)

MAX_BYTES = 2**20
MAX_VALUES = 50_000  # aliases count as often as they are used
MAX_LEVELS = 100
_TYPE_TABLE = """
AGE CREDIT_CARD DATE_TIME DOMAIN_NAME EMAIL_ADDRESS GPE IBAN_CODE IP_ADDRESS NRP ORGANIZATION
PERSON PHONE_NUMBER STREET_ADDRESS TITLE US_DRIVER_LICENSE US_SSN ZIP_CODE
"""
PII_TYPES = frozenset(_TYPE_TABLE.split())
# Keys of the original that are read and have no effect, by the section that has them.
_NO_EFFECT: dict[type[Any], tuple[str, ...]] = {
    config.SemanticConfig: ("mom_registry", "response_api", "observability"),
    config.Category: ("model_scores",),
    config.ModelSettings: ("loras",),
    config.CategoryModel: ("threshold", "use_cpu"),
    config.PiiModel: ("use_cpu",),
    config.PromptGuard: ("use_cpu",),
    config.BertModel: ("use_cpu",),
    config.EmbeddingModels: ("use_cpu",),
    config.CacheSettings: ("use_hnsw", "hnsw_m", "hnsw_ef_construction", "embedding_model"),
    milvus_config.MilvusSettings: ("performance", "data_management", "logging"),
    milvus_config.MilvusCollection: ("vector_field", "index"),
    milvus_config.MilvusSearch: ("params", "topk"),
    milvus_config.MilvusDevelopment: ("verbose_errors",),
    config.BatchClassification: ("concurrency_threshold", "max_concurrency", "metrics"),
}
_MERGE = "tag:yaml.org,2002:merge"
_UNKNOWN = ": unknown key, it has no effect"
# What names files and secrets of this host: who may change a configuration over HTTP shall not reach them.
_FILE_ONLY = (
    *("encoders", "tools.tools_db_path", "semantic_cache.directory", "semantic_cache.backend_type"),
    *("semantic_cache.milvus", "semantic_cache.backend_config_path"),
)
_SECRETS = ("access_key", "password", "value")  # the last one of a header
HIDDEN_KEY = "(set)"  # stands for a key or password where a configuration is shown


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and what its author should know of it."""

    settings: config.SemanticConfig
    # by decision ("": none applies) and type: the decoded configuration
    plugins: dict[str, dict[str, Any]]
    notes: tuple[str, ...] = field(default=())
    encoders: dict[str, encoder_labels.EncoderModel] = field(default_factory=dict)
    embedder: Path | None = None  # the directory of the embedding model, where one is needed
    tools: list[tool_database.DatabaseTool] = field(default_factory=list)
    name_key: Callable[[str], str] = str  # of v0.1 at the begin of a text: the one in the file

    @property
    def uses_process(self) -> bool:
        """Return whether the encoders' process is asked."""
        has_models = bool(self.encoders) or self.embedder is not None
        return has_models or self.settings.encoders.profile != "fast"

    @property
    def uses_encoders(self) -> bool:
        """Return whether requests wait for encoders, in their process or behind an address."""
        return self.uses_process or self.embeds

    @property
    def embeds(self) -> bool:
        """Return whether texts are compared by embedding."""
        return self.embedder is not None or (
            bool(self.settings.encoders.embeddings_url) and self.settings.compares_by_embedding
        )


def load(
    path: Path,
    categories: frozenset[str],
    find_hub_model: encoder_labels.FindHubModel = encoder_labels.find_in_hub_cache,
) -> LoadedConfig:
    """Return the configuration in a file. Raises ConfigError, which names the key.

    `categories` are those that the domain classifier knows; `find_hub_model` finds a model's directory.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise errors.ConfigError(f"{path}: expected a readable file: {error.strerror}") from error
    if not data.strip():  # as some editors leave it for a moment, and a full disk for good
        raise errors.ConfigError(f"{path}: expected a configuration, got an empty file")
    try:
        return parse(data, categories, path.parent, find_hub_model)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{path}: {error}") from error


def parse(
    data: bytes,
    categories: frozenset[str],
    directory: Path | None = None,
    find_hub_model: encoder_labels.FindHubModel = encoder_labels.find_in_hub_cache,
) -> LoadedConfig:
    """Return the configuration in the bytes of a file. Raises ConfigError, which names the key.

    Directories of models that are not absolute may be below `directory`.
    """
    translation = config_v03.translate(_read_yaml(data))
    try:
        loaded = _decode(translation.tree, categories, directory, find_hub_model)
    except errors.ConfigError as error:
        raise errors.ConfigError(translation.name_key(str(error))) from error
    notes = (*translation.notes, *map(translation.name_key, loaded.notes))
    return dataclasses.replace(loaded, notes=notes, name_key=translation.name_key)


def parse_change(
    data: bytes,
    current: config.SemanticConfig,
    categories: frozenset[str],
    directory: Path | None = None,
) -> LoadedConfig:
    """Return the current configuration with a change, a JSON merge patch (RFC 7396) in the keys of v0.1.

    Raises ConfigError, also for an unknown key, which a file may have.
    """
    if len(data) > MAX_BYTES:
        raise errors.ConfigError(f"expected at most {MAX_BYTES} bytes, got more")
    try:
        change = msgspec.json.decode(data, type=dict[str, Any])
        if "version" in change:
            raise errors.ConfigError("version: expected none; a change has the keys of v0.1")
        tree = _merge(msgspec.to_builtins(current), change)
        _refuse_other_backend(tree, current.semantic_cache)
        num_values = _count_values(tree, 0)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"expected an object of JSON: {error}") from error
    if num_values > MAX_VALUES:
        raise errors.ConfigError(f"expected at most {MAX_VALUES} values, got more")
    loaded = _decode(tree, categories, directory, encoder_labels.find_in_hub_cache)
    _refuse_in_change(loaded, current)
    return loaded


def _refuse_in_change(loaded: LoadedConfig, current: config.SemanticConfig) -> None:
    """Raise ConfigError for what a file may say and a change over HTTP may not."""
    unknown = [note.removesuffix(_UNKNOWN) for note in loaded.notes if note.endswith(_UNKNOWN)]
    if unknown:
        raise errors.ConfigError(f"no such key: {', '.join(unknown)}")
    for path in _FILE_ONLY:
        section = operator.attrgetter(path)
        if section(loaded.settings) != section(current):
            raise errors.ConfigError(f"{path}: expected no change; only the file can change it")


def _refuse_other_backend(tree: dict[str, Any], current: config.CacheSettings) -> None:
    """Raise ConfigError before a file is read that a change over HTTP names."""
    section = tree.get("semantic_cache")
    path = section.get("backend_config_path", "") if isinstance(section, dict) else ""
    if path != current.backend_config_path:
        raise errors.ConfigError(
            "semantic_cache.backend_config_path: expected no change; only the file can change it"
        )


def _merge(value: Any, change: Any) -> Any:
    """Return a value with a merge patch applied: objects are merged, null removes a key, all else replaces.

    A key or password that is hidden stays as it is.
    """
    if not isinstance(change, dict):
        return change
    merged = dict(value) if isinstance(value, dict) else {}
    for key, item in change.items():
        if item is None:
            merged.pop(key, None)
        elif item != HIDDEN_KEY:
            merged[key] = _merge(merged.get(key), item)
    return merged


def _decode(
    tree: dict[str, Any],
    categories: frozenset[str],
    directory: Path | None,
    find_hub_model: encoder_labels.FindHubModel,
) -> LoadedConfig:
    notes = _read_backend_file(tree, directory)
    tree = config.fill_blanks(tree)
    notes += [f"{key}{_UNKNOWN}" for key in _unknown_keys(tree)]
    try:
        settings = msgspec.convert(tree, config.SemanticConfig)
    except msgspec.ValidationError as error:
        text = json_body.explain(config.SemanticConfig, tree, error, secrets=_SECRETS)
        raise errors.ConfigError(text) from error
    plugins = {"": _decode_plugins(settings.default_plugins, notes, "default_plugins")}
    for number, decision in enumerate(settings.decisions):
        if not decision.name:  # its plugins would take the place of `default_plugins`
            raise errors.ConfigError(f"decisions[{number}].name: expected a name, got ''")
        path = f"decisions[{number}].plugins"
        plugins[decision.name] = _decode_plugins(decision.plugins, notes, path)
    _refuse_unsupported(settings)
    encoders, absent = encoder_labels.find_models(settings, directory, find_hub_model)
    embedder, without = encoder_labels.find_embedder(settings, directory, find_hub_model)
    notes += [*absent, *without]
    tools = tool_database.read_database(settings.tools, directory)
    if encoder_labels.DOMAIN in encoders:
        categories = frozenset(encoders[encoder_labels.DOMAIN].labels)
        fallback = settings.classifier.category_model.fallback_category
        decisions.check_label("classifier.category_model.fallback_category", fallback, categories)
    pii_types = PII_TYPES
    if encoder_labels.PII in encoders:
        bare = map(encoder_labels.bare_label, encoders[encoder_labels.PII].labels)
        pii_types |= {label for label in bare if label}
    _check_references(settings, plugins, categories, pii_types)
    notes += [f"{key}: accepted, it has no effect here" for key in _keys_without_effect(settings)]
    notes += config.list_doubts(settings)
    return LoadedConfig(settings, plugins, tuple(notes), encoders, embedder, tools)


def _read_backend_file(tree: dict[str, Any], directory: Path | None) -> list[str]:
    """Put the file of `backend_config_path` in its place, and return notes. Raises ConfigError.

    As with the original, a section `milvus` in the configuration itself goes before the file.
    """
    section = tree.get("semantic_cache")
    if not isinstance(section, dict) or not section.get("backend_config_path"):
        return []
    if section.get("backend_type") != "milvus":
        return ["semantic_cache.backend_config_path: accepted, it has no effect here"]
    if section.get("milvus"):
        return []
    key = "semantic_cache.backend_config_path"
    path = config.find_file(key, str(section["backend_config_path"]), directory)
    try:
        with path.open("rb") as file:
            section["milvus"] = _read_yaml(file.read(MAX_BYTES + 1))
    except OSError as error:
        text = f"{key}: {path}: expected a readable file: {error.strerror}"
        raise errors.ConfigError(text) from error
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{key}: {path}: {error}") from error
    return []


class _BoundedLoader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """Loads YAML whose merge keys (`<<`) do not multiply what stands in a file, and where no key stands twice."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Return the next mapping. Raises ValueError for a key that it has twice: the first would be forgotten."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                name, line = key.value, key.start_mark.line + 1
                if name in lines:
                    raise ValueError(f"{name!r} stands twice, in lines {lines[name]} and {line}")
                lines[name] = line
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put merged members into a mapping. Raises ValueError for far too many of them."""
        merged = [value for key, value in node.value if key.tag == _MERGE]
        num_values = 0
        for value in merged:
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(source, yaml.MappingNode) and source is not node:
                    self.flatten_mapping(source)
                    num_values += len(source.value)
                if num_values > MAX_VALUES:
                    raise ValueError(f"expected at most {MAX_VALUES} merged values, got more")
        super().flatten_mapping(node)


def _keys_without_effect(section: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of keys that have another value than usual, and no effect."""
    if isinstance(section, msgspec.Struct):
        for key in msgspec.structs.fields(section):
            value, make_default = getattr(section, key.name), key.default_factory
            default = make_default() if callable(make_default) else key.default
            if key.name in _NO_EFFECT.get(type(section), ()) and value != default:
                yield f"{path}{key.name}"
            yield from _keys_without_effect(value, f"{path}{key.name}.")
    elif isinstance(section, list):
        for number, item in enumerate(section):
            yield from _keys_without_effect(item, f"{path[:-1]}[{number}].")
    elif isinstance(section, dict):
        for name, item in section.items():
            yield from _keys_without_effect(item, f"{path}{name}.")


def _read_yaml(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise errors.ConfigError(f"expected at most {MAX_BYTES} bytes, got more")
    try:
        tree = yaml.load(data, _BoundedLoader)  # a SafeLoader
        num_values = _count_values(tree, 0)
    except RecursionError as error:
        raise errors.ConfigError("expected nested keys, got far too many levels of them") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: text that is not UTF-8, odd dates
        raise errors.ConfigError(f"expected YAML: {' '.join(str(error).split())}") from error
    except (LookupError, AttributeError) as error:  # as for `!!bool x`
        raise errors.ConfigError("expected YAML: a value does not fit the tag before it") from error
    if num_values > MAX_VALUES:
        raise errors.ConfigError(f"expected at most {MAX_VALUES} values, got more")
    tree = {} if tree is None else tree
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise errors.ConfigError("expected keys and values, got something else")
    return tree


def _count_values(tree: Any, num_values: int, level: int = 0) -> int:
    """Return `num_values` and the number of values in the tree, or a little more than the most allowed."""
    if level > MAX_LEVELS:
        raise RecursionError("far too many levels")
    if isinstance(tree, set | tuple):  # which only a tag makes
        raise yaml.YAMLError("expected keys, lists and single values, got a set or pairs")
    num_values += 1
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    for child in children:
        if num_values > MAX_VALUES:
            break
        num_values = _count_values(child, num_values, level + 1)
    return num_values


def _unknown_keys(tree: dict[str, Any]) -> list[str]:
    known = {"version", *config.SemanticConfig.__struct_fields__}
    info = msgspec.inspect.type_info(config.SemanticConfig)
    keys = [*(key for key in tree if key not in known), *_unknown_below(tree, info, "")]
    return list(dict.fromkeys(keys))


def _unknown_below(tree: Any, info: Any, path: str) -> Iterator[str]:
    """Yield the paths of keys that the type has no field for."""
    children: list[tuple[str, Any, Any]] = []  # path, type and value
    match info, tree:
        case msgspec.inspect.StructType(), dict():
            types = {item.encode_name: item.type for item in info.fields}
            yield from (f"{path}{key}" for key in tree if key not in types and path)
            known = types.keys() & tree.keys()
            children = [(f"{path}{key}.", types[key], tree[key]) for key in known]
        case msgspec.inspect.ListType(), list():
            children = [(f"{path[:-1]}[{n}].", info.item_type, item) for n, item in enumerate(tree)]
        case msgspec.inspect.DictType(), dict():
            children = [(f"{path}{key}.", info.value_type, item) for key, item in tree.items()]
        case msgspec.inspect.UnionType(), _:
            children = [(path, kind, tree) for kind in info.types]
    for child_path, kind, child in children:
        yield from _unknown_below(child, kind, child_path)


def _decode_plugins(listed: list[config.Plugin], notes: list[str], place: str) -> dict[str, Any]:
    """Return the configurations of plugins by type. Raises ConfigError."""
    plugins: dict[str, Any] = {}
    for position, plugin in enumerate(listed):
        path = f"{place}[{position}]"
        if plugin.type == "hallucination" and plugin.configuration.get("enabled") is False:
            continue
        kind = config.PLUGIN_TYPES.get(plugin.type)
        if kind is None:
            raise errors.ConfigError(
                f"{path}.type: {plugin.type!r} is not supported; expected one of {', '.join(config.PLUGIN_TYPES)}"
            )
        if plugin.type in plugins:  # the first would be forgotten
            raise errors.ConfigError(f"{path}: the plugin {plugin.type} stands twice")
        try:
            plugins[plugin.type] = msgspec.convert(plugin.configuration, kind)
        except msgspec.ValidationError as error:
            place = f"{path}.configuration"
            text = json_body.explain(kind, plugin.configuration, error, place, secrets=_SECRETS)
            raise errors.ConfigError(text) from error
        info = msgspec.inspect.type_info(kind)
        unknown = _unknown_below(plugin.configuration, info, f"{path}.configuration.")
        notes.extend(f"{key}{_UNKNOWN}" for key in unknown)
    return plugins


def _refuse_unsupported(settings: config.SemanticConfig) -> None:
    """Raise ConfigError for what the original has and this router has not."""
    cache, encoders = settings.semantic_cache, settings.encoders
    if encoders.profile != "fast" and not encoders.base_model:
        raise errors.ConfigError(
            f"encoders.profile: {encoders.profile} needs base_model, the directory or hub name of all-MiniLM-L6-v2"
        )
    if encoders.embeddings_url and not (
        re.match(r"https?://[^/\s]+", encoders.embeddings_url) and encoders.embeddings_model
    ):
        raise errors.ConfigError(
            f"encoders.embeddings_url: expected http://HOST:PORT/v1 and embeddings_model, "
            f"got {encoders.embeddings_url} and {encoders.embeddings_model or 'no model'}"
        )
    refusals = {
        "config_source: kubernetes": settings.config_source != "file",
        "fact_check_rules": bool(settings.fact_check_rules),
        "user_feedback_rules": bool(settings.user_feedback_rules),
        "preference_rules": bool(settings.preference_rules),
        "classifier.mcp_category_model": bool(
            settings.classifier.mcp_category_model.get("enabled")
        ),
        "prompt_guard.use_vllm": settings.prompt_guard.enabled and settings.prompt_guard.use_vllm,
        "feedback_detector": bool(settings.feedback_detector.get("enabled")),
        "hallucination_mitigation": bool(settings.hallucination_mitigation.get("enabled")),
    }
    for key, is_refused in refusals.items():
        if is_refused:
            raise errors.ConfigError(f"{key}: not supported here; leave it out or disable it")
    if cache.enabled and cache.backend_type not in ("memory", "milvus"):
        raise errors.ConfigError(
            f"semantic_cache.backend_type: {cache.backend_type or 'nothing'} is not supported;"
            " expected memory or milvus"
        )
    if cache.enabled and cache.backend_type == "milvus":
        milvus_config.check(cache.milvus, cache.max_entries, cache.directory)


def _check_references(
    settings: config.SemanticConfig,
    plugins: dict[str, dict[str, Any]],
    categories: frozenset[str],
    pii_types: frozenset[str],
) -> None:
    """Raise ConfigError for a name that nothing in the configuration defines."""
    for key in ("decisions", "vllm_endpoints"):
        if len({entry.name for entry in getattr(settings, key)}) < len(getattr(settings, key)):
            raise errors.ConfigError(f"{key}: expected names that differ, got one of them twice")
    labels = {*map(decisions.spaced, categories)}
    for category in settings.categories:
        for label in map(decisions.spaced, category.mmlu_categories):
            decisions.check_label(f"categories.{category.name}.mmlu_categories", label, labels)
    for rule in settings.embedding_rules:
        if not rule.candidates:
            raise errors.ConfigError(f"embedding_rules.{rule.name}: expected candidates, got none")
    signals = {
        "keyword": {rule.name for rule in settings.keyword_rules},
        "embedding": {rule.name for rule in settings.embedding_rules},
        "domain": {*categories, *(category.name for category in settings.categories)},
    }
    for decision in settings.decisions:
        path = f"decisions.{decision.name}.rules"
        decisions.check_conditions(path, decision.rules.conditions, signals)
    _check_guards(settings, plugins, pii_types)
    _check_models(settings)


def _check_guards(
    settings: config.SemanticConfig,
    plugins: dict[str, dict[str, Any]],
    pii_types: frozenset[str],
) -> None:
    """Raise ConfigError for a guard that allows an unknown type, or sends requests to a model and names none."""
    general = settings.prompt_guard
    if general.mode == "route" and not general.route_to:
        raise errors.ConfigError("prompt_guard: mode: route needs route_to, the name of a model")
    if others := plugins[""].keys() - {"jailbreak", "pii"}:
        raise errors.ConfigError(f"default_plugins: expected jailbreak and pii, got {min(others)}")
    for name, by_type in plugins.items():
        path = f"decisions.{name}" if name else "default_plugins"
        for label in getattr(by_type.get("pii"), "pii_types_allowed", ()):
            decisions.check_label(f"{path}: pii_types_allowed", label, pii_types)
        for kind, usual in (("jailbreak", general.route_to), ("pii", None)):
            plugin = by_type.get(kind)
            if plugin is not None and plugin.mode == "route" and not (plugin.route_to or usual):
                raise errors.ConfigError(
                    f"{path}: {kind}: mode: route needs route_to, the name of a model"
                )


def _check_models(settings: config.SemanticConfig) -> None:
    """Raise ConfigError for a family or an endpoint of a model that is not defined."""
    for name, model in settings.model_config.items():
        if model.reasoning_family is not None:
            families = settings.reasoning_families.keys()
            decisions.check_label(
                f"model_config.{name}.reasoning_family", model.reasoning_family, families
            )
        endpoints = {endpoint.name for endpoint in settings.vllm_endpoints}
        for endpoint in model.preferred_endpoints:
            decisions.check_label(f"model_config.{name}.preferred_endpoints", endpoint, endpoints)
