"""A model's files are the ones that its card names."""

import hashlib

import pytest

from dynamo.base import errors
from dynamo.preprocess import loading
from dynamo.protocols import model_card


def card(path, names=()):
    files = {
        name: model_card.ModelFile(
            path=str(path / name),
            checksum="sha256:" + hashlib.sha256((path / name).read_bytes()).hexdigest(),
            size=(path / name).stat().st_size,
        )
        for name in names
    }
    return model_card.ModelCard(
        display_name="tiny",
        source_path=str(path),
        context_length=64,
        kv_cache_block_size=16,
        files=files,
    )


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    (tmp_path / "other.json").write_text("[]")
    return tmp_path


def test_a_card_without_files_means_those_of_the_directory(model):
    files = loading.ModelFiles(card(model))

    assert files.read_json("config.json") == {"vocab_size": 5}
    assert files.read("tokenizer.json") is None
    assert files.read_json("tokenizer.json") == {}
    assert files.read_text("tokenizer.json") is None


def test_a_file_that_the_card_does_not_name_is_not_read(model):
    files = loading.ModelFiles(card(model, ["config.json"]))

    assert files.read("config.json") == b'{"vocab_size": 5}'
    assert files.read("other.json") is None


def test_another_file_under_the_same_path_is_noticed(model):
    files = loading.ModelFiles(card(model, ["config.json"]))
    (model / "config.json").write_text('{"vocab_size": 6}')

    with pytest.raises(errors.ConfigError, match=r"config\.json is not the file that its worker"):
        files.read("config.json")


def test_a_named_file_that_is_missing_is_an_error(model):
    files = loading.ModelFiles(card(model, ["config.json"]))
    (model / "config.json").unlink()

    with pytest.raises(errors.ConfigError, match=r"cannot read .*config\.json"):
        files.read("config.json")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_file_that_is_no_object_names_itself(model, content):
    (model / "config.json").write_bytes(content)

    with pytest.raises(errors.ConfigError, match=r"config\.json: expected a JSON object"):
        loading.ModelFiles(card(model)).read_json("config.json")


def test_a_file_that_is_no_text_names_itself(model):
    (model / "chat_template.jinja").write_bytes(b"\xff")

    with pytest.raises(errors.ConfigError, match=r"chat_template\.jinja: expected UTF-8"):
        loading.ModelFiles(card(model)).read_text("chat_template.jinja")
