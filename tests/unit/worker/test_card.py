"""The card of a model directory."""

import dataclasses
import hashlib
import json

import pytest
from worker_fakes import FACTS

from dynamo.base import errors
from dynamo.protocols import model_card
from dynamo.worker import card


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def build(directory, **told):
    return card.build(directory, name="m", facts=FACTS, created=5, **told)


def test_files_are_named_by_size_and_checksum(directory):
    described = build(directory).files["tokenizer.json"]
    checksum = "sha256:" + hashlib.sha256(b'{"a": 1}').hexdigest()

    assert described == model_card.ModelFile(
        path=str(directory / "tokenizer.json"), checksum=checksum, size=8
    )


def test_weights_are_no_affair_of_a_frontend(directory):
    assert set(build(directory).files) == {"config.json", "tokenizer.json"}


def test_the_engine_s_facts_are_on_the_card(directory):
    built = build(directory)

    assert (built.display_name, built.created) == ("m", 5)
    assert built.context_length == FACTS.context_length
    assert built.kv_cache_block_size == FACTS.kv_block_size
    assert built.runtime_config.total_kv_blocks == FACTS.total_kv_blocks


def test_a_model_without_a_chat_template_only_completes(directory):
    assert build(directory).model_type == (model_card.ModelType.COMPLETIONS,)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ messages }}"})),
    ],
)
def test_a_model_with_a_chat_template_chats(directory, file, content):
    (directory / file).write_text(content)

    assert model_card.ModelType.CHAT in build(directory).model_type


def test_how_answers_are_to_be_read_is_on_the_card(directory):
    told = build(directory, tool_call_parser="hermes", reasoning_parser="none").runtime_config

    assert (told.tool_call_parser, told.reasoning_parser) == ("hermes", "none")
    assert build(directory).runtime_config.tool_call_parser is None


def test_a_worker_may_say_how_often_its_requests_move(directory):
    assert build(directory, migration_limit=1).migration_limit == 1
    assert build(directory).migration_limit is None


def test_a_tokenizer_config_that_is_no_json_is_named(directory):
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(errors.ConfigError, match=r"tokenizer_config.json: expected a JSON object"):
        build(directory)


def test_an_adapter_is_on_the_card_and_must_not_be_called_as_its_model(directory):
    facts = dataclasses.replace(FACTS, lora_names=("poet",))

    assert card.build(directory, name="m", facts=facts, created=5).lora_names == ("poet",)
    with pytest.raises(errors.ConfigError, match="'poet', and so is its model"):
        card.build(directory, name="poet", facts=facts, created=5)
