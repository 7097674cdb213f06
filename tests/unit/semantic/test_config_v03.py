"""The form v0.3: what it says is the same as in the form v0.1, and what v0.1 cannot say is refused by name."""

import pytest
import yaml

from dynamo.base import clock, errors
from dynamo.semantic import config_file, router
from dynamo.semantic.classifiers import profile

FAST = profile.load_profile()
NEW = """
version: v0.3
listeners: [{name: http, port: 8801}]
providers:
  defaults:
    default_model: small
    reasoning_families: {gpt: {type: reasoning_effort, parameter: reasoning_effort}}
  models:
    - {name: small, backend_refs: [{name: a, endpoint: "10.0.0.1:8000", weight: 2}]}
    - {name: coder, reasoning_family: gpt, backend_refs: [{base_url: "https://models.example/v1"}]}
routing:
  strategy: priority
  modelCards: [{name: coder, loras: [{name: sql}]}]
  signals:
    keywords: [{name: code, operator: OR, method: regex, keywords: [python]}]
    domains: [{name: sums, mmlu_categories: [math]}]
    jailbreak: [{name: attack, threshold: 0.8}]
    pii: [{name: personal, threshold: 0.7, pii_types_allowed: [EMAIL_ADDRESS]}]
  decisions:
    - name: refuse
      priority: 100
      rules: {operator: OR, conditions: [{type: jailbreak, name: attack}]}
      plugins: [{type: fast_response, configuration: {message: No.}}]
    - name: refuse_data
      rules: {operator: OR, conditions: [{type: pii, name: personal}]}
      plugins: [{type: fast_response, configuration: {message: No.}}]
    - name: code
      priority: 10
      rules: {operator: AND, conditions: [{type: keyword, name: code}]}
      modelRefs: [{model: coder, use_reasoning: true}]
      plugins: [{type: response_cache, configuration: {similarity_threshold: 0.9}}]
global:
  router: {auto_model_name: any}
  stores: {response_cache: {enabled: true, max_entries: 7, milvus: {connection: {port: 1}}}, memory: {enabled: false}}
"""
OLD = """
default_model: small
auto_model_name: any
strategy: priority
reasoning_families: {gpt: {type: reasoning_effort, parameter: reasoning_effort}}
vllm_endpoints:
  - {name: small/a, address: 10.0.0.1, port: 8000, weight: 2}
  - {name: "coder/https://models.example/v1", address: models.example, port: 443}
model_config:
  small: {preferred_endpoints: [small/a]}
  coder: {reasoning_family: gpt, preferred_endpoints: ["coder/https://models.example/v1"], loras: [{name: sql}]}
keyword_rules: [{name: code, operator: OR, keywords: [python]}]
categories: [{name: sums, mmlu_categories: [math]}]
prompt_guard: {enabled: true, threshold: 0.8}
default_plugins:
  - {type: pii, configuration: {enabled: true, threshold: 0.7, pii_types_allowed: [EMAIL_ADDRESS]}}
semantic_cache: {enabled: true, max_entries: 7, milvus: {connection: {port: 1}}}
decisions:
  - name: code
    priority: 10
    rules: {operator: AND, conditions: [{type: keyword, name: code}]}
    modelRefs: [{model: coder, use_reasoning: true}]
    plugins:
      - {type: semantic-cache, configuration: {similarity_threshold: 0.9}}
      - {type: pii, configuration: {enabled: true, threshold: 0.7, pii_types_allowed: [EMAIL_ADDRESS]}}
"""


BLOCK = {
    "name": "refuse",
    "rules": {"conditions": [{"type": "jailbreak", "name": "attack"}]},
    "plugins": [{"type": "fast_response"}],
}


def load(text):
    return config_file.parse(text.encode(), FAST.categories)


def test_new_form_means_the_same_as_the_old_one():
    new, old = load(NEW), load(OLD)

    assert new.settings == old.settings
    assert new.plugins == old.plugins


def test_translated_configuration_routes_a_request():
    routing = router.SemanticRouter(load(NEW), FAST, clock.SystemClock())

    outcome = routing.route(
        b'{"model": "any", "messages": [{"role": "user", "content": "fix my python"}]}', {}
    )

    assert outcome.explanation.model == "coder"
    assert b'"reasoning_effort":"medium"' in outcome.body.replace(b": ", b":")


@pytest.mark.parametrize(
    ("model", "server"), [("small", "10.0.0.1:8000"), ("coder", "[fd00::2]:8000")]
)
def test_models_whose_servers_have_one_name_keep_their_own(model, server):
    tree = yaml.safe_load(NEW)
    tree["providers"]["models"][1]["backend_refs"] = [{"name": "a", "endpoint": "[fd00::2]:8000"}]
    routing = router.SemanticRouter(load(yaml.dump(tree)), FAST, clock.SystemClock())

    outcome = routing.route(b'{"model": "%s", "messages": []}' % model.encode(), {})

    assert ("x-vsr-destination-endpoint", server) in outcome.upstream_headers


def test_card_of_a_model_limits_what_it_gets():
    tree = yaml.safe_load(NEW)
    card = {"name": "coder", "context_window_size": 4096, "modalities": {"input": ["text"]}}
    tree["routing"]["modelCards"] = [{**card, "family": "x", "tags": ["fast"]}]

    loaded = load(yaml.dump(tree))

    settings = loaded.settings.model_config["coder"]
    assert (settings.context_length, settings.accepts_images) == (4096, False)
    assert settings.reasoning_family == "gpt"
    assert "routing.modelCards.coder: family, tags: no effect here" in loaded.notes


def test_condition_alone_blocks_as_one_in_a_list_does():
    tree = yaml.safe_load(NEW)
    listed = load(yaml.dump(tree))
    for decision in tree["routing"]["decisions"]:
        (decision["rules"],) = decision["rules"]["conditions"]

    assert load(yaml.dump(tree)).settings == listed.settings


def test_personal_data_is_refused_where_no_decision_applies():
    routing = router.SemanticRouter(load(NEW), FAST, clock.SystemClock())
    body = (
        b'{"model": "any", "messages": [{"role": "user", "content": "card 4111 1111 1111 1111"}]}'
    )

    outcome = routing.route(body, {})

    assert dict(outcome.answer.headers)["x-vsr-pii-types"] == "B-CREDIT_CARD"
    assert b"default_model" in outcome.answer.body


def test_keys_of_published_files_that_change_no_request_are_taken():
    tree = yaml.safe_load(NEW)
    model = tree["providers"]["models"][1]
    model |= {"external_model_ids": {"openai": "coder"}, "reliability": {"retry_count": 2}}
    model["backend_refs"][0] |= {"provider": "vllm", "chat_path": "/chat/completions"}
    tree["routing"]["signals"]["language"] = [{"name": "zh"}]
    tree["routing"]["decisions"][2]["plugins"].append({"type": "router_replay"})
    loaded = load(yaml.dump(tree))

    assert loaded.settings == load(NEW).settings
    expected = ("external_model_ids", "reliability", "routing.signals.language", "router_replay")
    assert all(any(name in note for note in loaded.notes) for name in expected)


def test_later_names_of_defaults_mean_the_same():
    tree = yaml.safe_load(NEW)
    defaults, model = tree["providers"]["defaults"], tree["providers"]["models"][1]
    defaults["model"] = defaults.pop("default_model")
    model["reasoning"] = {"family": model.pop("reasoning_family")}

    assert load(yaml.dump(tree)).settings == load(NEW).settings


def test_attack_inside_of_other_conditions_is_refused():
    inner = "{operator: OR, conditions: [{type: jailbreak, name: attack}]}"
    with pytest.raises(errors.ConfigError, match="other uses of these signals"):
        load(NEW.replace("[{type: keyword, name: code}]", f"[{inner}]"))


def test_negated_guard_is_refused():
    with pytest.raises(errors.ConfigError, match="expected one declared"):
        load(
            NEW.replace(
                "operator: OR, conditions: [{type: jail", "operator: NOR, conditions: [{type: jail"
            )
        )


def test_keys_without_effect_are_named():
    notes = load(NEW).notes

    assert any(note.startswith("listeners: ") for note in notes)
    assert any(note.startswith("routing.decisions.refuse: ") for note in notes)


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        ("routing.projections", [{"name": "x"}], "routing.projections"),
        (
            "routing.decisions",
            [{"name": "a", "rules": {"type": "complexity", "name": "x"}}],
            r"routing.decisions.a.rules.conditions\[0\].type: 'complexity' is not supported",
        ),
        ("recipes", [{"name": "default"}], "recipes: not supported here; write its decisions"),
        ("entrypoints", [{"model_names": ["auto"]}], "entrypoints: not supported here"),
        ("routing.signals.keywords", [{"name": "x", "method": "bm25"}], "method: bm25"),
        ("routing.signals.jailbreak", [{"name": "other"}], "routing.decisions.refuse"),
        ("routing.decisions", "all", "routing.decisions: expected a list"),
        ("routing.decisions", [BLOCK, {**BLOCK, "name": "again"}], "again: a second decision"),
        ("routing.signals", [1], "routing.signals: expected keys"),
        ("global.stores.memory", {"enabled": True}, "global.stores.memory"),
        ("global.integrations", {"looper": {"enabled": True}}, "global.integrations.looper"),
        ("providers.models", [{"name": "a", "provider_model_id": "b"}], "provider_model_id"),
        ("providers.models", [{"name": "a", "api_format": "anthropic"}], "api_format"),
        (
            "providers.models",
            [{"name": "a", "backend_refs": [{"endpoint": "b:1", "provider": "bedrock"}]}],
            "provider: expected vllm or openai, or none",
        ),
        (
            "providers.models",
            [{"name": "a", "backend_refs": [{"endpoint": "b:1", "chat_path": "/ask"}]}],
            "chat_path: expected /chat/completions, or none",
        ),
        (
            "providers.models",
            [{"name": "a", "backend_refs": [{"api_key_env": "K"}]}],
            "api_key_env",
        ),
        ("providers.models", [{"name": "a", "backend_refs": [{"name": "b"}]}], "HOST:PORT"),
        ("providers.models", [{"name": "a", "backend_refs": [{"endpoint": "b:x"}]}], "HOST:PORT"),
        (
            "providers.models",
            [{"name": "a", "backend_refs": [{"endpoint": "b:99999"}]}],
            "HOST:PORT",
        ),
        (
            "providers.models",
            [{"name": "a", "backend_refs": [{"base_url": "http://[::1"}]}],
            "HOST:PORT",
        ),
        (
            "providers.models",
            [{"name": "a", "backend_refs": [{"base_url": "https://b.example/openai/v1"}]}],
            r"models.a.backend_refs\[0\].base_url: expected no path but /v1, got /openai/v1",
        ),
        (
            "providers.models",
            [{"name": "a", "backend_refs": [{"endpoint": "b:0"}]}],
            r"models.a.backend_refs\[0\].port: expected a whole number from 1 to 65535, got 0",
        ),
    ],
)
def test_what_v01_cannot_say_is_refused_by_name(path, value, name):
    tree = yaml.safe_load(NEW)
    *sections, key = path.split(".")
    section = tree
    for part in sections:
        section = section.setdefault(part, {})
    section[key] = value

    with pytest.raises(errors.ConfigError, match=name):
        load(yaml.safe_dump(tree))


def change(path, value):
    """Return the configuration with another value at a path of keys and numbers."""
    tree = section = yaml.safe_load(NEW)
    *outer, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    for part in outer:
        section = section[part]
    section[last] = value
    return yaml.safe_dump(tree)


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        ("providers/defaults/default_model", [], "providers.defaults.default_model"),
        ("providers/models/0/reasoning_family", "x", "providers.models.small.reasoning_family"),
        (
            "providers/models/1/backend_refs/0/weight",
            "x",
            "providers.models.coder.backend_refs[0].weight",
        ),
        (
            "routing/modelCards/0/context_window_size",
            "x",
            "routing.modelCards.coder.context_window_size",
        ),
        ("routing/strategy", "best", "routing.strategy"),
        ("routing/signals/keywords/0/operator", "XOR", "routing.signals.keywords[0].operator"),
        (
            "routing/signals/domains/0/mmlu_categories",
            ["x"],
            "routing.signals.domains.sums.mmlu_categories",
        ),
        ("routing/signals/jailbreak/0/threshold", 7, "routing.signals.jailbreak.attack.threshold"),
        ("routing/signals/pii/0/threshold", "x", "routing.signals.pii.personal.threshold"),
        (
            "routing/signals/pii/0/pii_types_allowed",
            ["x"],
            "routing.signals.pii.personal: pii_types_allowed",
        ),
        # behind two decisions that become guards
        ("routing/decisions/2/priority", "x", "routing.decisions[2].priority"),
        (
            "routing/decisions/2/rules/conditions/0/name",
            "x",
            "routing.decisions.code.rules.conditions[0]",
        ),
        ("routing/decisions/2/plugins/0/type", "tools", "routing.decisions[2].plugins[0].type"),
        ("global/router/auto_model_name", 3, "global.router.auto_model_name"),
        (
            "global/stores/response_cache/max_entries",
            "x",
            "global.stores.response_cache.max_entries",
        ),
        (
            "global/integrations",
            {"tools": {"enabled": True}},
            "global.integrations.tools.tools_db_path",
        ),
    ],
)
def test_wrong_value_is_refused_by_the_key_in_the_file(path, value, key):
    with pytest.raises(errors.ConfigError) as raised:
        load(change(path, value))

    assert str(raised.value).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("providers/models/0/pricing", "providers.models.small.pricing.x"),
        ("routing/decisions/2/plugins/0/configuration", "routing.decisions[2].plugins[0]"),
        ("global/stores/response_cache", "global.stores.response_cache.x"),
    ],
)
def test_note_names_the_key_in_the_file(path, key):
    notes = load(change(path, {"x": 1})).notes

    assert [note for note in notes if "unknown key" in note and note.startswith(key)]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("providers/models/1/name", "small", "providers.models.small: expected names that differ"),
        ("providers/models/1/name", None, r"providers.models\[1\].name: expected a name, got None"),
        ("routing/modelCards/0/name", 3, r"routing.modelCards\[0\].name: expected a name, got 3"),
        ("routing/signals/pii/0/name", "", r"routing.signals.pii\[0\].name: expected a name"),
    ],
)
def test_name_that_is_missing_or_stands_twice_is_refused(path, value, message):
    with pytest.raises(errors.ConfigError, match=message):
        load(change(path, value))


def test_unknown_version_is_refused():
    with pytest.raises(errors.ConfigError, match=r"v0\.1, v0\.3"):
        load("version: v0.9")
