import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import semantic_configs
from dynamo.base import errors
from dynamo.semantic import config_file

CATEGORIES = frozenset({"math", "law", "other"})


def parse(text):
    return config_file.parse(text.encode(), CATEGORIES)


def refusal_of(text):
    with pytest.raises(errors.ConfigError) as raised:
        parse(text)
    return str(raised.value)


def test_unknown_keys_are_named_with_their_path():
    notes = parse("typo: 1\nkeyword_rules: [{name: a, keywords: [x], wrong: 2}]").notes

    assert any(note.startswith("typo: unknown key") for note in notes)
    assert any(note.startswith("keyword_rules[0].wrong: unknown key") for note in notes)


def test_section_or_list_without_a_value_is_an_empty_one():
    names = ("semantic_cache", "decisions", "tools", "classifier", "prompt_guard", "observability")
    blank = "".join(f"{name}:\n" for name in names)
    models = parse("model_config:\n  qwen:\n").settings.model_config
    decision = "decisions: [{name: d, modelRefs: , rules: , plugins: [{type: pii, %s}]}]"

    assert parse(blank).settings == parse("").settings
    assert models == parse("model_config: {qwen: {}}").settings.model_config
    assert parse(decision % "configuration: ").plugins == parse(decision % "").plugins
    assert parse("classifier: {category_model: }").settings == parse("").settings
    assert parse(MILVUS % "connection: ").settings == parse(MILVUS % "").settings


def test_value_that_is_missing_where_none_can_be_empty_is_refused():
    assert refusal_of("default_model:") == "default_model: expected a string, got null"


MUTATION = "decisions: [{name: d, plugins: [{type: header_mutation, configuration: {%s}}]}]"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "semantic_cache: {enabled: true, backend_type: redis}",
            "semantic_cache.backend_type: redis",
        ),
        ("config_source: kubernetes", "config_source"),
        ("decisions: [{name: d, plugins: [{type: rag}]}]", "rag"),
        (
            "decisions: [{name: d, rules: {conditions: [{type: preference, name: p}]}}]",
            "preference",
        ),
    ],
)
def test_unsupported_part_is_refused_by_name(text, name):
    assert name in refusal_of(text)
    assert "not supported" in refusal_of(text)


MILVUS = "semantic_cache: {enabled: true, backend_type: milvus, milvus: {%s}}"


def test_original_form_of_milvus_is_read_and_the_rest_is_noted():
    text = """
    connection:
      host: milvus.example
      port: 443
      database: cache
      timeout: 30
      auth: {enabled: true, username: router, password: secret}
      tls: {enabled: true, cert_file: "", key_file: "", ca_file: ""}
    collection:
      name: answers
      description: Answers
      vector_field: {name: embedding, dimension: 384, metric_type: IP}
      index: {type: HNSW, params: {M: 16, efConstruction: 64}}
    search: {params: {ef: 64}, topk: 20, consistency_level: Bounded}
    performance: {batch: {timeout: 30}}
    data_management: {ttl: {enabled: true}}
    logging: {level: info}
    development: {drop_collection_on_startup: false, auto_create_collection: false, verbose_errors: true}
    typo: 1
    """
    loaded = parse(f"semantic_cache:\n  enabled: true\n  backend_type: milvus\n  milvus:{text}")
    milvus = loaded.settings.semantic_cache.milvus
    without = ["vector_field", "index"]

    assert (milvus.connection.host, milvus.connection.timeout) == ("milvus.example", 30)
    assert milvus.collection.name == "answers"
    assert milvus.search.consistency_level == "Bounded"
    assert loaded.notes[0].startswith("semantic_cache.milvus.typo: unknown key")
    assert [
        note.removesuffix(": accepted, it has no effect here") for note in loaded.notes[1:]
    ] == [
        *(f"semantic_cache.milvus.collection.{key}" for key in without),
        *("semantic_cache.milvus.search.params", "semantic_cache.milvus.search.topk"),
        *("semantic_cache.milvus.performance", "semantic_cache.milvus.data_management"),
        "semantic_cache.milvus.logging",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("semantic_cache: {enabled: true, backend_type: milvus}", "needs the section"),
        (MILVUS % "connection: {port: 0}", "port"),
        (MILVUS % "connection: {host: 'a b'}", "host"),
        (MILVUS % "connection: {auth: {enabled: true}}", "username and password"),
        (
            MILVUS % "connection: {tls: {enabled: true, ca_file: /nowhere}}",
            "no such file: /nowhere",
        ),
        (MILVUS % "connection: {tls: {cert_file: a}}", "ca_file beside cert_file"),
        (MILVUS % "collection: {name: 'a-b'}", "name"),
        (MILVUS % "development: {drop_collection_on_startup: true}", "drop_collection_on_startup"),
        (MILVUS.replace("enabled", "directory: /d, enabled") % "", "directory: expected none"),
        (MILVUS.replace("enabled", "max_entries: 20000, enabled") % "", "at most 16384"),
    ],
)
def test_wrong_settings_of_milvus_are_refused_by_name(text, message):
    assert "semantic_cache" in refusal_of(text)
    assert message in refusal_of(text)


def test_file_of_milvus_may_be_beside_the_configuration(tmp_path):
    (tmp_path / "milvus.yaml").write_text("connection: {host: there}")
    text = "semantic_cache: {enabled: true, backend_type: milvus, backend_config_path: %s}"

    loaded = config_file.parse((text % "milvus.yaml").encode(), CATEGORIES, tmp_path)
    assert loaded.settings.semantic_cache.milvus.connection.host == "there"
    for name, content in (("absent.yaml", None), ("wrong.yaml", "[")):
        if content:
            (tmp_path / name).write_text(content)
        with pytest.raises(errors.ConfigError, match=f"backend_config_path: .*{name}"):
            config_file.parse((text % name).encode(), CATEGORIES, tmp_path)


def test_section_of_milvus_goes_before_its_file():
    text = MILVUS.replace("enabled", "backend_config_path: absent.yaml, enabled")

    assert parse(text % "connection: {host: there}").settings.semantic_cache.milvus is not None
    notes = parse("semantic_cache: {enabled: true, backend_config_path: absent.yaml}").notes
    assert notes == ("semantic_cache.backend_config_path: accepted, it has no effect here",)


def test_disabled_unsupported_parts_are_accepted():
    parse("tools: {enabled: false}\nhallucination_mitigation: {enabled: false}")


@pytest.mark.parametrize(
    "text",
    [
        "decisions: [{name: d, rules: {conditions: [{type: domain, name: cooking}]}}]",
        "categories: [{name: c, mmlu_categories: [cooking]}]",
        "decisions: [{name: d, rules: {conditions: [{type: keyword, name: cooking}]}}]",
        "model_config: {m: {reasoning_family: cooking}}",
        "model_config: {m: {preferred_endpoints: [cooking]}}",
        "decisions: [{name: d, plugins: [{type: pii, configuration: {pii_types_allowed: [cooking]}}]}]",
    ],
)
def test_label_that_nothing_defines_is_refused(text):
    assert "cooking" in refusal_of(text)


def test_wrong_type_names_its_key():
    assert "prompt_guard.threshold" in refusal_of("prompt_guard: {threshold: 7}")


def test_a_model_without_a_directory_is_said_to_be_replaced():
    notes = parse("classifier: {category_model: {model_id: models/x}}").notes

    assert any(
        "no directory models/x, and no such model in the hub's cache; the shipped" in note
        for note in notes
    )


@pytest.mark.parametrize(
    "text",
    [
        "- a list",
        "{",
        "a: &a [x, x]\nb: &b [*a, *a]\n"
        + "".join(f"{chr(i)}: &{chr(i)} [*{chr(i - 1)}, *{chr(i - 1)}]\n" for i in range(99, 123)),
        "[" * 3000,
        "a: " + "x" * 2**20,
        "a: !!bool x",
        "a: !!int ''",
        "a: !!float ''",
        "a: !!timestamp x",
        "decisions: !!set {a}",
        "decisions: !!pairs [a: 1]",
    ],
)
def test_file_that_is_no_configuration_is_refused(text):
    assert "expected" in refusal_of(text)


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(data):
    with contextlib.suppress(errors.ConfigError):
        config_file.parse(data, CATEGORIES)


def test_shared_configuration_of_the_tests_has_no_notes():
    assert parse(semantic_configs.CONFIG).notes == ()


@pytest.mark.parametrize(
    "text",
    [
        "prompt_guard: {enabled: true, mode: route}",
        "decisions: [{name: a, plugins: [{type: pii, configuration: {mode: route}}]}]",
        "decisions: [{name: a, plugins: [{type: jailbreak, configuration: {mode: route}}]}]",
    ],
)
def test_guard_that_routes_to_no_model_is_refused(text):
    with pytest.raises(errors.ConfigError, match="mode: route needs route_to"):
        parse(text)


UNUSED = """
default_model: m
model_config: {m: {pricing: {prompt_per_1m: 2}, loras: [{name: x}]}}
semantic_cache: {use_hnsw: true, hnsw_m: 16, embedding_model: gemma, backend_config_path: x}
categories: [{name: sums, mmlu_categories: [math], model_scores: [{model: m, score: 3}]}]
api: {batch_classification: {max_batch_size: 5, max_concurrency: 3}}
classifier: {category_model: {threshold: 0.6, use_cpu: false}}
"""


def test_keys_without_effect_are_named():
    keys = {note.partition(":")[0] for note in parse(UNUSED).notes}

    assert keys == {
        "model_config.m.loras",
        "semantic_cache.use_hnsw",
        "semantic_cache.embedding_model",
        "semantic_cache.backend_config_path",
        "categories[0].model_scores",
        "api.batch_classification.max_concurrency",
        "classifier.category_model.threshold",
        "classifier.category_model.use_cpu",
    }


def test_decision_for_which_no_model_is_named_is_noted():
    text = "decisions: [{name: sums, rules: {conditions: [{type: domain, name: math}]}}]"
    (note,) = parse(text).notes

    assert note.startswith("decisions.sums: no model")
    assert not parse(f"default_model: m\n{text}").notes


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ("{}", "it has no conditions"),
        ("{operator: AND, conditions: [{type: keyword, name: a}, {type: keyword, name: b}]}", "for a, b"),
    ],
)  # fmt: skip
def test_decision_that_never_applies_is_noted(rules, reason):
    words = (
        "keyword_rules: [{name: a, keywords: [x]}, {name: b, keywords: [y]}]\ndefault_model: m\n"
    )

    (note,) = parse(f"{words}decisions: [{{name: both, rules: {rules}}}]").notes

    assert note.startswith("decisions.both: ")
    assert reason in note
    assert not parse(
        words + "decisions: [{name: both, rules: {operator: OR, conditions: ["
        "{type: keyword, name: a}, {type: keyword, name: b}]}}]"
    ).notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model_config: {m: {access_key: "secret\\n"}}', "access_key"),
        (MUTATION % 'add: [{name: "x y", value: a}]', "add[0].name"),
        (MUTATION % 'update: [{name: x-y, value: "a\\n"}]', "update[0].value"),
        (MUTATION % 'delete: ["x: y"]', "delete[0]"),
    ],
)
def test_header_that_no_server_takes_is_refused(text, message):
    assert message in refusal_of(text)


def test_decision_without_a_name_does_not_take_the_place_of_the_guards_of_all_others():
    text = """
        default_plugins: [{type: pii}]
        decisions: [{name: a}, {name: ""}]
    """

    assert refusal_of(text).startswith("decisions[1].name: expected a name")


def test_endpoint_that_stands_twice_is_refused():
    endpoint = "{name: a, address: b, port: 80}"

    assert "vllm_endpoints" in refusal_of(f"vllm_endpoints: [{endpoint}, {endpoint}]")


@pytest.mark.parametrize(
    "text",
    [
        "conversations: {max_conversations: -1}",
        "semantic_cache: {max_entries: -1}",
        "semantic_cache: {ttl_seconds: -1}",
        "vllm_endpoints: [{name: a, address: b, port: 70000}]",
    ],
)
def test_number_out_of_its_bounds_is_refused(text):
    assert "expected a whole number from" in refusal_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "default_model: a\ndecisions: []\ndefault_model: b",
        "default_model: a\nprompt_guard: {enabled: true,\n  enabled: false}\n",
    ],
)
def test_key_that_stands_twice_is_refused_with_its_lines(text):
    assert "stands twice, in lines" in refusal_of(text)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("{type: semantic-cache}", "default_plugins: expected jailbreak and pii"),
        ("{type: pii, configuration: {mode: route}}", "default_plugins: pii: mode: route"),
        ("{type: pii, configuration: {pii_types_allowed: [X]}}", "default_plugins: pii_types"),
        ("{type: other}", "default_plugins[0].type: 'other' is not supported"),
        ("{type: pii}, {type: pii}", "default_plugins[1]: the plugin pii stands twice"),
    ],
)
def test_plugin_that_is_no_guard_needs_a_decision(plugin, message):
    assert message in refusal_of(f"default_plugins: [{plugin}]")


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", '"x\\0"'])
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("tools.tools_db_path", "tools: {enabled: true, tools_db_path: %s}"),
        (
            "semantic_cache.backend_config_path",
            "semantic_cache: {enabled: true, backend_type: milvus, backend_config_path: %s}",
        ),
        ("prompt_guard.model_id", "prompt_guard: {enabled: true, model_id: %s}"),
    ],
)
def test_path_of_no_file_system_is_refused_by_its_key(key, text, path):
    assert f"{key}: expected a path" in refusal_of(text % path)


def test_merged_key_may_be_overridden():
    merged = parse("a: &a {context_length: 1}\nmodel_config: {m: {<<: *a, context_length: 2}}")

    assert merged.settings.model_config["m"].context_length == 2


def test_merge_keys_cannot_multiply_a_file():
    lines = ["a0: &a0 {x: 1}"]
    for number in range(1, 12):
        aliases = ", ".join([f"*a{number - 1}"] * 10)
        lines.append(f"a{number}: &a{number} {{<<: [{aliases}]}}")

    assert "merged values" in refusal_of("\n".join(lines))
    assert parse("a: &a {model: m}\nmodel_config: {m: {<<: *a}}").settings.model_config


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("strategy: best", "strategy: expected 'confidence' or 'priority', got a string ('best')"),
        ("default_model: 5", "default_model: expected a string, got 5"),
        (
            "prompt_guard: {threshold: 7}",
            "prompt_guard.threshold: expected a number from 0 to 1, got 7",
        ),
        (
            "encoders: {timeout_seconds: 0}",
            "encoders.timeout_seconds: expected a number above 0, got 0",
        ),
        (
            "model_config: {a: {}, org/b: {x: 1, context_length: many}}",
            "model_config.org/b.context_length: expected a whole number from 1, got a string ('many')",
        ),
        ("model_config: {a: {}, b: 3}", "model_config.b: expected an object, got 3"),
        ("mom_registry: {a: 3}", "mom_registry: expected values that are a string"),
        (
            "reasoning_families: {qwen: {x: y}}",
            "reasoning_families.qwen.type: required, but missing",
        ),
        (
            "default_plugins: [{type: pii, configuration: {threshold: high}}]",
            "default_plugins[0].configuration.threshold: expected a number from 0 to 1, got a string ('high')",
        ),
        (
            "decisions: [{name: a, plugins: [{type: header_mutation, configuration: {add: [{name: x}]}}]}]",
            "decisions[0].plugins[0].configuration.add[0].value: required, but missing",
        ),
        (
            "decisions: [{name: a, modelRefs: [b]}]",
            "decisions[0].modelRefs[0]: expected an object, got a string ('b')",
        ),
    ],
)
def test_wrong_value_is_refused_by_its_path_what_is_expected_and_what_came(text, refusal):
    assert refusal_of(text) == refusal


def test_context_that_no_request_fits_in_is_refused():
    text = "model_config: {a: {context_length: 0}}"

    assert "model_config.a.context_length: expected a whole number from 1" in refusal_of(text)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (
            "decisions: [{name: a, rules: {conditions: [{type: domain, name: law}, {type: keyword, name: b}]}}]",
            "decisions.a.rules.conditions[1]: keyword: no such name: 'b'; expected a name of which none is defined",
        ),
        (
            "decisions: [{name: a, rules: {conditions: [{type: ''}]}}]",
            "decisions.a.rules.conditions[0].type: '' is not supported; expected one of keyword, embedding, domain",
        ),
        (
            "decisions: [{name: a, rules: {conditions: [{operator: NOT, conditions: [{type: domain, name: x}]}]}}]",
            "decisions.a.rules.conditions[0].conditions[0]: domain: no such name: 'x'; expected one of"
            " ['law', 'math', 'other']",
        ),
        (
            "decisions: [{name: a, rules: " + "{conditions: [" * 60 + "]}" * 60 + "}]",
            "expected nested keys, got far too many levels of them",
        ),
        (
            "default_plugins: [{type: cache}]",
            "default_plugins[0].type: 'cache' is not supported; expected one of semantic-cache, jailbreak, pii,"
            " system_prompt, header_mutation",
        ),
        (
            "semantic_cache: {enabled: true, backend_type: redis}",
            "semantic_cache.backend_type: redis is not supported; expected memory or milvus",
        ),
        (
            "conversations: {switch_margin: .nan}",
            "conversations.switch_margin: expected a number from 0 to 1, got nan",
        ),
    ],
)
def test_word_that_nothing_defines_is_refused_by_its_path_and_what_is_expected(text, refusal):
    assert refusal_of(text) == refusal


@pytest.mark.parametrize("keywords", ["", "keywords: []", "keywords: ['']"])
def test_keyword_rule_that_never_holds_is_noted(keywords):
    notes = parse(f"keyword_rules: [{{name: a, {keywords}}}]").notes

    assert notes == ("keyword_rules.a: it has no keywords, and never holds",)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('model_config: {a: {access_key: "s3cret\\n"}}', "model_config.a.access_key"),
        ("model_config: {a: {access_key: [s3cret]}}", "model_config.a.access_key"),
        (
            'default_plugins: [{type: header_mutation, configuration: {add: [{name: a, value: "s3cret\\n"}]}}]',
            "default_plugins[0].configuration.add[0].value",
        ),
        (
            "semantic_cache: {milvus: {connection: {auth: {password: 53}}}}",
            "semantic_cache.milvus.connection.auth.password",
        ),
    ],
)
def test_wrong_key_or_password_is_not_shown(text, path):
    """Whoever reads the log, or asks for the last error over HTTP, need not know it."""
    refusal = refusal_of(text)

    assert refusal.startswith(f"{path}: expected a string")
    assert "s3cret" not in refusal
    assert "53" not in refusal
