"""The form v0.3 of the configuration, translated into that of v0.1 before anything reads it.

Signals that block, `jailbreak` and `pii` with a `fast_response`, become the guards of v0.1. What has no counterpart is
refused by the name that it has in the file; keys without a consequence are named in notes. What is said later of a key
of v0.1 is said of the key that stands in the file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from dynamo.base import errors

_GUARD_SIGNALS = ("jailbreak", "pii")
_GUARD_KEYS = {
    "jailbreak": ("prompt_guard",),
    "pii": ("default_plugins", "default_plugins[0].configuration"),
}
_SIGNALS = {"keywords": "keyword_rules", "embeddings": "embedding_rules", "domains": "categories"}
_MODEL_KEYS = (
    "name",
    "reasoning_family",
    "reasoning",
    "provider_model_id",
    "api_format",
    "pricing",
    "backend_refs",
)
_REFERENCE_KEYS = ("name", "endpoint", "base_url", "protocol", "weight", "provider", "chat_path")
_IDLE_MODEL_KEYS = ("external_model_ids", "reliability")  # names in other systems; retries
_PROVIDERS = ("vllm", "openai")  # whose API every model here is asked by
_GLOBAL_ROUTER = (
    "config_source",
    "auto_model_name",
    "include_config_models_in_list",
    "clear_route_cache",
)
_DEFAULTS = ("default_model", "default_reasoning_effort", "reasoning_families")
_LATER_DEFAULTS = {"model": "default_model", "reasoning_effort": "default_reasoning_effort"}
_LATER_SECTIONS = ("recipes", "entrypoints")  # that have decisions of their own
# By a key of v0.1 the one of v0.3 that has its place.
_KEYS = {
    **{key: f"providers.defaults.{key}" for key in _DEFAULTS},
    **{key: f"global.router.{key}" for key in _GLOBAL_ROUTER},
    **{counterpart: f"routing.signals.{key}" for key, counterpart in _SIGNALS.items()},
    "vllm_endpoints": "providers.models: backend_refs",
    "model_config": "providers.models",
    "strategy": "routing.strategy",
    "decisions": "routing.decisions",
    "semantic_cache": "global.stores.response_cache",
    "tools": "global.integrations.tools",
    "bert_model.model_id": "routing.signals.embeddings",
}
_Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Translation:
    """A configuration in the form v0.1, with notes."""

    tree: _Tree
    notes: list[str] = field(default_factory=list)
    keys: Mapping[str, str] = field(default_factory=dict)  # by a key of v0.1, that of the file

    def name_key(self, text: str) -> str:
        """Return a text that begins with a key of v0.1 with the key that stands in the file."""
        for key in sorted(self.keys, key=len, reverse=True):
            if text.startswith(key) and text[len(key) : len(key) + 1] in (".", ":", "["):
                return self.keys[key] + text[len(key) :]
        return text


def translate(tree: _Tree) -> Translation:
    """Return the configuration in the form v0.1. Raises ConfigError for what v0.1 cannot say, or another version."""
    version = tree.get("version")
    if version is None or str(version) in ("v0.1", "0.1"):
        return Translation(tree)
    if str(version) not in ("v0.3", "0.3"):
        raise errors.ConfigError(f"version: expected v0.1, v0.3 or none, got {version}")
    for key in _LATER_SECTIONS:
        if tree.get(key):
            raise errors.ConfigError(f"{key}: not supported here; write its decisions into routing")
    routing, shared, keys = _section(tree, "routing"), _section(tree, "global"), dict(_KEYS)
    notes = [
        f"{key}: no key of v0.3 that has an effect here"
        for key in tree
        if key not in ("version", "providers", "routing", "global")
    ]
    _refuse_rest("routing", routing, ("strategy", "signals", "decisions", "modelCards"))
    providers = _providers(_section(tree, "providers"), notes, keys)
    result: _Tree = {**providers, **_shared(shared, notes)}
    if "strategy" in routing:
        result["strategy"] = routing["strategy"]
    for number, card in enumerate(_list(routing, "modelCards", "routing.modelCards")):
        _add_card(f"routing.modelCards[{number}]", card, result["model_config"], notes, keys)
    signals = _section(routing, "signals", "routing.signals")
    notes += [
        f"routing.signals.{key}: no decision may ask for it here"
        for key, declared in signals.items()
        if key not in (*_SIGNALS, *_GUARD_SIGNALS) and declared
    ]
    for name, counterpart in _SIGNALS.items():
        if rules := _list(signals, name, f"routing.signals.{name}"):
            result[counterpart] = [_signal(name, rule) for rule in rules]
    result["decisions"] = _decisions(routing, signals, result, notes, keys)
    return Translation(result, notes, keys)


def _providers(providers: _Tree, notes: list[str], keys: dict[str, str]) -> _Tree:
    _refuse_rest("providers", providers, ("defaults", "models"))
    written = _section(providers, "defaults", "providers.defaults")
    _refuse_rest("providers.defaults", written, (*_DEFAULTS, *_LATER_DEFAULTS))
    keys |= {ours: f"providers.defaults.{k}" for k, ours in _LATER_DEFAULTS.items() if k in written}
    defaults = {_LATER_DEFAULTS.get(key, key): value for key, value in written.items()}
    models: _Tree = {}
    endpoints: list[_Tree] = []
    for number, model in enumerate(_list(providers, "models", "providers.models")):
        name = _read_name(f"providers.models[{number}]", model)
        path = f"providers.models.{name}"
        if name in models:  # the first would be forgotten
            raise errors.ConfigError(f"{path}: expected names that differ, got this one twice")
        notes += [
            f"{path}.{key}: it has no effect here" for key in _IDLE_MODEL_KEYS if model.get(key)
        ]
        _refuse_rest(path, model, (*_MODEL_KEYS, *_IDLE_MODEL_KEYS))
        if model.get("provider_model_id", name) != name:
            raise errors.ConfigError(f"{path}.provider_model_id: expected {name!r}, or none")
        if model.get("api_format", "openai") != "openai":
            raise errors.ConfigError(f"{path}.api_format: expected openai, or none")
        entry = {key: model[key] for key in ("reasoning_family", "pricing") if model.get(key)}
        reasoning = _section(model, "reasoning", f"{path}.reasoning")
        _refuse_rest(f"{path}.reasoning", reasoning, ("family",))
        if reasoning.get("family"):
            entry["reasoning_family"] = reasoning["family"]
        references = _list(model, "backend_refs", f"{path}.backend_refs")
        added = [_endpoint(f"{path}.backend_refs[{n}]", ref) for n, ref in enumerate(references)]
        for position, endpoint in enumerate(added):
            # models may give their servers the same names
            endpoint["name"] = f"{name}/{endpoint['name']}"
            place = f"vllm_endpoints[{len(endpoints) + position}]"
            keys[place] = f"{path}.backend_refs[{position}]"
        if added:
            entry["preferred_endpoints"] = [endpoint["name"] for endpoint in added]
        endpoints += added
        models[name] = entry
    return {**defaults, "model_config": models, "vllm_endpoints": endpoints}


def _add_card(
    place: str, card: _Tree, models: _Tree, notes: list[str], keys: dict[str, str]
) -> None:
    """Add what the card of a model says of its adapters and limits to its settings, and a note on the rest."""
    name = _read_name(place, card)
    path = f"routing.modelCards.{name}"
    keys[f"model_config.{name}.loras"] = f"{path}.loras"
    keys[f"model_config.{name}.context_length"] = f"{path}.context_window_size"
    limits = {"loras": card.get("loras"), "context_length": card.get("context_window_size")}
    inputs = _section(card, "modalities", f"{path}.modalities").get("input")
    if inputs and "image" not in inputs:
        limits["accepts_images"] = False
    present = {key: value for key, value in limits.items() if value not in (None, [])}
    if present:
        models[name] = {**models.get(name, {}), **present}
    known = ("name", "loras", "context_window_size", "modalities")
    if without_effect := [key for key in card if key not in known]:
        notes.append(f"{path}: {', '.join(without_effect)}: no effect here")


def _endpoint(path: str, reference: _Tree) -> _Tree:
    _refuse_rest(path, reference, _REFERENCE_KEYS)
    if reference.get("provider", "vllm") not in _PROVIDERS:
        raise errors.ConfigError(f"{path}.provider: expected {' or '.join(_PROVIDERS)}, or none")
    if reference.get("chat_path", "/chat/completions") != "/chat/completions":
        raise errors.ConfigError(f"{path}.chat_path: expected /chat/completions, or none")
    written = str(reference.get("base_url") or reference.get("endpoint") or "")
    try:
        address = urlsplit(written if "//" in written else f"//{written}")
        port = address.port
    except ValueError as error:  # a port that is no number below 65536, a bracket that stays open
        raise errors.ConfigError(
            f"{path}: expected an endpoint HOST:PORT or a base_url over HTTP, got {written!r}: {error}"
        ) from error
    if not address.hostname or reference.get("protocol", "http") not in ("http", "https"):
        raise errors.ConfigError(f"{path}: expected an endpoint HOST:PORT or a base_url over HTTP")
    if address.path.rstrip("/") not in ("", "/v1"):  # a gateway is told a host and a port
        raise errors.ConfigError(f"{path}.base_url: expected no path but /v1, got {address.path}")
    is_https = "https" in (address.scheme, reference.get("protocol"))
    return {
        "name": str(reference.get("name") or written),
        "address": address.hostname,
        "port": (443 if is_https else 80) if port is None else port,
        "weight": reference.get("weight", 1.0),
    }


def _shared(shared: _Tree, notes: list[str]) -> _Tree:
    _refuse_rest(
        "global", shared, ("router", "services", "stores", "integrations", "model_catalog")
    )
    router = _section(shared, "router", "global.router")
    result = {key: router[key] for key in _GLOBAL_ROUTER if key in router}
    notes += [f"global.router.{key}: it has no effect here" for key in router if key not in result]
    notes += [
        f"global.{key}: it has no effect here"
        for key in ("services", "model_catalog")
        if shared.get(key)
    ]
    stores = _section(shared, "stores", "global.stores")
    integrations = _section(shared, "integrations", "global.integrations")
    _refuse_rest(
        "global.stores", {k: v for k, v in stores.items() if _is_on(v)}, ("response_cache",)
    )
    _refuse_rest(
        "global.integrations", {k: v for k, v in integrations.items() if _is_on(v)}, ("tools",)
    )
    if stores.get("response_cache"):
        result["semantic_cache"] = stores["response_cache"]
    if integrations.get("tools"):
        result["tools"] = integrations["tools"]
    return result


def _signal(kind: str, rule: _Tree) -> _Tree:
    method = rule.get("method", "regex")
    if kind == "keywords" and method != "regex":
        raise errors.ConfigError(
            f"routing.signals.keywords.{rule.get('name')}.method: {method} is not supported; expected regex"
        )
    return {key: value for key, value in rule.items() if key != "method"}


def _decisions(
    routing: _Tree, signals: _Tree, result: _Tree, notes: list[str], keys: dict[str, str]
) -> list[_Tree]:
    """Return the decisions; those that only block are turned into guards, for all others."""
    guards = {
        (kind, _read_name(f"routing.signals.{kind}[{number}]", rule)): rule
        for kind in _GUARD_SIGNALS
        for number, rule in enumerate(_list(signals, kind, f"routing.signals.{kind}"))
    }
    kept: list[_Tree] = []
    added: list[_Tree] = []  # plugins for every decision that is kept
    blocked_kinds: set[str] = set()
    for number, decision in enumerate(_list(routing, "decisions", "routing.decisions")):
        path = f"routing.decisions.{decision.get('name')}"
        rules = _section(decision, "rules", path)
        if "type" in rules:  # one condition alone
            decision = {**decision, "rules": {"conditions": [rules]}}
        conditions = _list(_section(decision, "rules", path), "conditions", path)
        if not any(map(_asks_for_guard, conditions)):
            keys[f"decisions[{len(kept)}]"] = f"routing.decisions[{number}]"
            kept.append({**decision, "plugins": list(_plugins(path, decision, notes))})
            continue
        added += _guard_plugins(path, decision, conditions, guards, result)
        signal = f"routing.signals.{conditions[0]['type']}.{conditions[0]['name']}"
        keys |= dict.fromkeys(_GUARD_KEYS[conditions[0]["type"]], signal)
        kind = conditions[0]["type"]
        if kind in blocked_kinds:  # the first would be forgotten
            raise errors.ConfigError(
                f"{path}: a second decision that blocks by {kind}; expected one, which becomes the guard"
            )
        blocked_kinds.add(kind)
        notes.append(f"{path}: it blocks in the router's own words, as the guards of v0.1 do")
    for decision in kept:
        decision["plugins"] += added
    result["default_plugins"] = added
    return kept


def _guard_plugins(
    path: str,
    decision: _Tree,
    conditions: list[_Tree],
    guards: Mapping[tuple[str, str], _Tree],
    result: _Tree,
) -> Iterator[_Tree]:
    """Yield the plugin for personal data that a blocking decision stands for; the guard against attacks is set."""
    kinds = [plugin.get("type") for plugin in _list(decision, "plugins", path)]
    condition = conditions[0]
    signal = guards.get((str(condition.get("type")), str(condition.get("name"))))
    is_negated = _section(decision, "rules", path).get("operator") not in (None, "AND", "OR")
    if len(conditions) != 1 or is_negated or kinds != ["fast_response"] or signal is None:
        raise errors.ConfigError(
            f"{path}: expected one declared jailbreak or pii signal and the plugin fast_response, "
            "which become a guard; other uses of these signals are not supported"
        )
    kind = condition["type"]
    known = ("name", "description", "threshold", "include_history")
    _refuse_rest(
        f"routing.signals.{kind}.{signal['name']}",
        {key: value for key, value in signal.items() if value},
        known if kind == "jailbreak" else (*known, "pii_types_allowed"),
    )
    limits = {key: signal[key] for key in ("threshold", "pii_types_allowed") if key in signal}
    if kind == "jailbreak":
        result["prompt_guard"] = {"enabled": True, **limits}
    else:
        yield {"type": "pii", "configuration": {"enabled": True, **limits}}


def _asks_for_guard(condition: Any) -> bool:
    """Return whether a condition, or one inside of it, asks for a signal that only a guard can be."""
    if not isinstance(condition, dict):
        return False
    inner = condition.get("conditions")
    is_guard = condition.get("type") in _GUARD_SIGNALS
    return is_guard or (isinstance(inner, list) and any(map(_asks_for_guard, inner)))


def _plugins(path: str, decision: _Tree, notes: list[str]) -> Iterator[_Tree]:
    for plugin in _list(decision, "plugins", path):
        if plugin.get("type") == "router_replay":
            notes.append(f"{path}: router_replay: no effect here; the audit log has requests")
            continue
        is_cache = plugin.get("type") == "response_cache"
        yield {**plugin, "type": "semantic-cache"} if is_cache else plugin


def _section(tree: Mapping[str, Any], key: str, path: str = "") -> _Tree:
    value = tree.get(key) or {}
    if not isinstance(value, dict):
        raise errors.ConfigError(f"{path or key}: expected keys and values, got something else")
    return value


def _list(tree: Mapping[str, Any], key: str, path: str) -> list[_Tree]:
    value = tree.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise errors.ConfigError(f"{path}: expected a list of keys and values")
    return value


def _read_name(path: str, entry: _Tree) -> str:
    name = entry.get("name")
    if not (isinstance(name, str) and name):
        raise errors.ConfigError(f"{path}.name: expected a name, got {name!r}")
    return name


def _is_on(section: Any) -> bool:
    return not isinstance(section, dict) or bool(section.get("enabled"))


def _refuse_rest(path: str, tree: _Tree, known: tuple[str, ...]) -> None:
    """Raise ConfigError for a key that cannot be translated."""
    for key, value in tree.items():
        if key not in known and value:
            raise errors.ConfigError(
                f"{path}.{key}: not supported here; expected only {', '.join(known)}"
            )
