"""The encoder models that a configuration names, and the names of their labels."""

import json

import pytest

from dynamo.base import errors
from dynamo.semantic import config_file, encoder_labels

CATEGORIES = frozenset({"math", "law", "other"})
LABELS = {"0": "cooking", "1": "sailing"}
GUARD = "prompt_guard: {enabled: true, model_id: model}"
DOMAIN = "classifier: {category_model: {model_id: model, fallback_category: cooking}}"
PII = "classifier: {pii_model: {model_id: model}}"


def write(directory, **files):
    directory.mkdir(exist_ok=True)
    files.setdefault("config", {"id2label": LABELS})
    for name, fields in files.items():
        (directory / f"{name}.json").write_text(json.dumps(fields))
    return directory


def load(tmp_path, text):
    path = tmp_path / "router.yaml"
    path.write_text(text)
    return config_file.load(path, CATEGORIES)


def refusal_of(tmp_path, text):
    with pytest.raises(errors.ConfigError) as raised:
        load(tmp_path, text)
    return str(raised.value)


def test_a_directory_beside_the_configuration_is_the_model(tmp_path):
    write(tmp_path / "model")

    loaded = load(tmp_path, DOMAIN)

    model = encoder_labels.EncoderModel(tmp_path / "model", ("cooking", "sailing"))
    assert loaded.encoders == {"domain": model}
    assert not loaded.notes


@pytest.mark.parametrize(
    "mapping",
    [
        {"category_to_idx": {"sailing": 1, "cooking": 0}},
        {"idx_to_category": {"1": "sailing", "0": "cooking"}},
        {"name": "x", "label_to_id": {"cooking": 0, "sailing": 1}},
    ],
)
def test_the_mapping_file_beside_a_model_names_its_labels(tmp_path, mapping):
    write(tmp_path / "model", config={"id2label": {"0": "LABEL_0"}}, category_mapping=mapping)

    assert load(tmp_path, DOMAIN).encoders["domain"].labels == ("cooking", "sailing")


def test_the_configured_mapping_goes_first(tmp_path):
    write(tmp_path / "model", category_mapping={"a": {"0": "x", "1": "y"}})
    write(tmp_path, mine={"a": {"0": "cooking", "1": "z"}})
    text = DOMAIN.replace("}}", ", category_mapping_path: mine.json}}")

    assert load(tmp_path, text).encoders["domain"].labels == ("cooking", "z")


@pytest.mark.parametrize(
    "text",
    [
        "categories: [{name: a, mmlu_categories: [math]}]",
        "decisions: [{name: d, rules: {conditions: [{type: domain, name: math}]}}]",
    ],
)
def test_a_category_that_the_model_lacks_stops_the_start(tmp_path, text):
    write(tmp_path / "model")

    assert "no such name: 'math'; expected one of" in refusal_of(tmp_path, f"{DOMAIN}\n{text}")


def test_a_category_of_the_model_is_known(tmp_path):
    write(tmp_path / "model")
    text = "decisions: [{name: d, rules: {conditions: [{type: domain, name: sailing}]}}]"

    assert load(tmp_path, f"{DOMAIN}\n{text}").encoders


def test_a_fallback_category_that_the_model_lacks_stops_the_start(tmp_path):
    write(tmp_path / "model")

    assert "fallback_category: no such name: 'other'" in refusal_of(
        tmp_path, "classifier: {category_model: {model_id: model}}"
    )


def test_types_of_the_pii_model_may_be_allowed(tmp_path):
    labels = {"0": "O", "1": "B-SHOE_SIZE", "2": "I-SHOE_SIZE"}
    write(tmp_path / "model", pii_type_mapping={"idx_to_label": labels})
    decision = (
        "decisions: [{name: d, plugins: [{type: pii, configuration: {pii_types_allowed: [X]}}]}]"
    )

    assert load(tmp_path, f"{PII}\n{decision.replace('X', 'SHOE_SIZE')}").encoders
    assert "no such name: 'HAT_SIZE'" in refusal_of(
        tmp_path, f"{PII}\n{decision.replace('X', 'HAT_SIZE')}"
    )


@pytest.mark.parametrize("labels", [["LABEL_0", "LABEL_1"], ["benign", "safe"], ["jailbreak"]])
def test_a_guard_whose_labels_do_not_say_what_is_an_attack_stops_the_start(tmp_path, labels):
    write(tmp_path / "model", config={"id2label": dict(enumerate(labels))})

    assert "expected labels of attacks and one of benign" in refusal_of(tmp_path, GUARD)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {}}, "expected the names of the labels in jailbreak_type_mapping.json"),
        ({"jailbreak_type_mapping": {"a": {"0": "benign", "2": "x"}}}, "numbered from 0 on"),
        ({"jailbreak_type_mapping": {"a": {"x": "benign"}}}, "expected numbers of labels"),
        ({"jailbreak_type_mapping": {"a": 1}}, "expected a table of labels"),
        ({"jailbreak_type_mapping": []}, "expected a JSON object"),
    ],
)
def test_unusable_labels_are_refused(tmp_path, files, message):
    write(tmp_path / "model", **files)

    assert message in refusal_of(tmp_path, GUARD)


def test_a_directory_without_a_model_is_refused(tmp_path):
    (tmp_path / "model").mkdir()

    assert "has neither config.json nor adapter_config.json" in refusal_of(tmp_path, GUARD)


def test_an_absolute_path_that_is_no_directory_is_refused(tmp_path):
    text = f"prompt_guard: {{enabled: true, model_id: {tmp_path}/nothing}}"

    assert "prompt_guard.model_id: no such directory" in refusal_of(tmp_path, text)
    write(tmp_path / "model")
    text = DOMAIN.replace("}}", f", category_mapping_path: {tmp_path}/nothing}}}}")
    assert "no such file" in refusal_of(tmp_path, text)


def put_in_hub_cache(home, name):
    """Return the directory of a model in a hub cache of this home."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots").mkdir()
    return write(folder / "snapshots" / "abc")


def test_a_model_of_the_hub_is_found_in_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    directory = put_in_hub_cache(tmp_path, "org/cooks")

    found = load(tmp_path, DOMAIN.replace("model_id: model", "model_id: org/cooks"))
    absent = load(tmp_path, "classifier: {category_model: {model_id: org/others}}")

    assert found.encoders["domain"].directory == directory
    assert not absent.encoders
    assert "no directory org/others, and no such model in the hub's cache" in absent.notes[0]


def test_a_model_of_the_hub_is_found_by_a_process_that_can_fetch_it(tmp_path):
    directory = write(tmp_path / "fetched")
    path = tmp_path / "router.yaml"
    path.write_text(GUARD.replace("model_id: model", "model_id: org/guard"))
    (directory / "config.json").write_text(json.dumps({"id2label": {"0": "safe", "1": "attack"}}))

    loaded = config_file.load(path, CATEGORIES, {"org/guard": directory}.get)

    assert loaded.encoders["attack"].directory == directory
