"""The configuration of a graph: precedence, sections and flags."""

import json

import pytest

from dynamo.base import errors
from dynamo.sdk import declaration, settings, yaml_file
from dynamo.sdk.settings import ServiceConfig

TEXT = """
Common:
  model: m
  block-size: 64
Worker:
  common-configs: [model, block_size]
  enforce_eager: true
  max-num-seqs: 8
  ServiceArgs:
    workers: 2
"""


def config(tmp_path, text=TEXT):
    path = tmp_path / "graph.yaml"
    path.write_text(text)
    return ServiceConfig(yaml_file.read(path))


def test_section_has_the_common_values_that_it_names(tmp_path):
    section = config(tmp_path).section("Worker")

    assert section == {"model": "m", "block-size": 64, "enforce-eager": True, "max-num-seqs": 8}


def test_own_value_overrides_a_common_one(tmp_path):
    values = config(tmp_path).with_overrides(["--Worker.model=other"])

    assert values.require("Worker", "model") == "other"


def test_command_line_reaches_into_sections(tmp_path):
    words = ["--Worker.ServiceArgs.workers=3", "--Worker.max_num_seqs", "4", "--Worker.on"]
    values = config(tmp_path).with_overrides([*words, "--New.names=[1,2]"])

    assert values.process_settings("Worker") == {"workers": 3}
    assert values.section("Worker")["max-num-seqs"] == 4
    assert values.section("Worker")["on"] is True
    assert values.section("New") == {"names": [1, 2]}


def test_command_line_fills_an_empty_section_and_does_not_reach_into_a_value(tmp_path):
    values = config(tmp_path, "Worker:\nOther: {model: m}\n")

    assert values.with_overrides(["--Worker.a.b=1"])["Worker"] == {"a": {"b": 1}}
    with pytest.raises(errors.ConfigError, match=r"--Other\.model\.x: Other\.model is a value"):
        values.with_overrides(["--Other.model.x=1"])


@pytest.mark.parametrize("word", ["stray", "--flag", "--Worker.=1"])
def test_argument_that_is_no_override_is_named(word):
    with pytest.raises(errors.ConfigError, match=r"expected --Service\.key=value"):
        ServiceConfig().with_overrides([word])


def test_decorator_is_below_the_file_and_above_the_constructor(tmp_path):
    @declaration.service(max_num_seqs=1, port=7)
    class Worker:
        def __init__(self, port=1, max_num_seqs=2, other=3):
            pass

    values = settings.with_defaults(config(tmp_path), [declaration.spec_of(Worker)])

    assert settings.constructor_values(Worker, values.section("Worker")) == {
        "port": 7,
        "max_num_seqs": 8,
    }


def test_flags_are_rendered_as_vllm_reads_them():
    values = {"a_b": True, "c": False, "enable-x": False, "n": 2, "l": [1], "s": "t", "none": None}

    assert settings.render_flags(values) == [
        "--a-b", "--no-enable-x", "--n", "2", "--l", "[1]", "--s", "t"
    ]  # fmt: skip


def test_prefix_chooses_flags():
    values = ServiceConfig(A={"x-one": 1, "two": 2})

    assert values.as_args("A", "x-") == ["--one", "1"]


def test_parsed_config_of_a_service_has_the_keys_of_the_file(monkeypatch):
    own = {"served_model_name": "m", "common-configs": ["kv-transfer", "port"], "port": 2}
    sections = {"Common": {"kv-transfer": "x", "port": 1}, "A": {**own, "ServiceArgs": {}}}
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", json.dumps(sections))

    assert ServiceConfig.get_parsed_config("A") == {
        "kv-transfer": "x",
        "served_model_name": "m",
        "port": 2,
    }
    assert ServiceConfig.get_parsed_config("B") == {}


def test_environment_holds_the_configuration(monkeypatch):
    monkeypatch.setenv(settings.VARIABLE, '{"A": {"b": 1}}')
    assert ServiceConfig.get_instance().require("A", "b") == 1
    with pytest.raises(errors.ConfigError, match=r"A\.c"):
        ServiceConfig.get_instance().require("A", "c")
    monkeypatch.setenv(settings.VARIABLE, "{")
    with pytest.raises(errors.ConfigError, match=settings.VARIABLE):
        ServiceConfig.get_instance()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("A: [", "expected a readable YAML file"),
        pytest.param("[" * 1000, "expected a readable YAML file", id="deep"),
        ("[1]", "expected sections by service"),
        ("A: 1", "A: expected keys with values"),
        ("A: {common-configs: [x]}", "'x' is not in Common"),
        ("A: {ServiceArgs: {cores: 1}}", "got 'cores'"),
        ("A: {ServiceArgs: 2}", r"A\.ServiceArgs: expected keys with values, got 2"),
        ("A: {ServiceArgs: {resources: 1}}", r"A\.ServiceArgs\.resources: expected keys with"),
        ("A: {ServiceArgs: {resources: {gpus: 1}}}", "expected cpu, gpu, memory, got 'gpus'"),
        ("A: {ServiceArgs: {dynamo: {namespase: b}}}", "expected namespace, got 'namespase'"),
        ("Common: {x: 1}\nA: {common-configs: [1]}", r"A\.common-configs\[0\]: expected a text"),
        ("A: {ServiceArgs: {module: 5}}", r"A\.ServiceArgs\.module: expected a text, got 5"),
        (
            "A: {since: 2026-11-28}",
            r"graph\.yaml: expected values as in JSON: .* date .* in quotes",
        ),
        ("A: {common-configs: model}", r"A\.common-configs: expected a list such as \[model\]"),
        ("A: {common_configs: model}", r"A\.common-configs: expected a list such as \[model\]"),
        ("A: {common_configs: 5}", r"A\.common-configs: expected a list such as \[5\], got 5"),
        ("A: {common_configs: [1]}", r"A\.common-configs\[0\]: expected a text, got 1"),
        ("A: {on: 1}", "A: expected a word as key, got True: write it in quotes"),
        ("B: {}", "no service is called B; there are A"),
    ],
)
def test_mistake_in_a_file_is_one_sentence(tmp_path, text, says):
    def read():
        values = config(tmp_path, text)
        values.check_names(["A"], "graph.yaml")
        return values.section("A"), values.process_settings("A")

    with pytest.raises(errors.ConfigError, match=says):
        read()


@pytest.mark.parametrize("port", ["x", 0, 70_000, 1.5, True, None])
def test_port_that_is_none_names_its_service(port):
    with pytest.raises(errors.ConfigError, match=r"A\.port: expected 1 to 65535, got "):
        settings.read_port("A", {"port": port})


def test_port_is_8000_or_the_one_that_is_named():
    assert settings.read_port("A", {}) == 8000
    assert settings.read_port("A", {"port": "9001"}) == settings.read_port("A", {"port": 9001})
