"""From what the user typed to a directory, or to one sentence."""

import sys

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from dynamo.base import errors
from dynamo.worker import model_source


def fill(directory):
    for name in model_source.REQUIRED:
        (directory / name).write_text("{}")
    return directory


def fail_with(error):
    def snapshot_download(name, *, local_files_only, **options):
        if local_files_only:
            raise hub_errors.LocalEntryNotFoundError("not cached")
        raise error

    return snapshot_download


def hub_error(kind):
    return kind.__new__(kind)


def refusal(model):
    with pytest.raises(errors.ConfigError) as caught:
        model_source.resolve(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_existing_directory_is_the_model(tmp_path):
    assert model_source.resolve(str(fill(tmp_path))) == tmp_path
    assert model_source.display_name(str(tmp_path)) == tmp_path.name


def test_error_for_a_directory_without_a_model_names_the_missing_file(tmp_path):
    assert "config.json and tokenizer.json missing" in refusal(str(tmp_path))


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "~/no-such-model", "a/b/c"])
def test_missing_path_is_not_searched_on_the_hub(model, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail_with(AssertionError()))

    assert f"no such directory: {model}" in refusal(model)


@pytest.mark.parametrize(
    ("model", "reason"),
    [("~nosuch/model", "~nosuch is no user's home"), ("a" * 300, "File name too")],
)
def test_path_that_cannot_be_looked_at_is_refused(model, reason):
    assert f"no such directory: {model} ({reason}" in refusal(model)
    with pytest.raises(errors.ConfigError, match="no such directory"):
        model_source.display_name(model)


def test_file_instead_of_a_directory_is_refused(tmp_path):
    (tmp_path / "model.bin").write_text("")

    assert "is a file" in refusal(str(tmp_path / "model.bin"))


def test_cached_model_needs_no_network(tmp_path, monkeypatch):
    fill(tmp_path)
    (tmp_path / "model.safetensors").touch()

    def snapshot_download(name, *, local_files_only, **options):
        assert local_files_only
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    assert model_source.resolve("org/model") == tmp_path
    assert model_source.display_name("org/model") == "org/model"


@pytest.mark.parametrize("with_weights", [True, False])
def test_code_of_a_model_comes_with_its_weights(tmp_path, monkeypatch, with_weights):
    fill(tmp_path)
    (tmp_path / "model.safetensors").touch()

    def snapshot_download(name, *, allow_patterns, **options):
        assert ("*.py" in allow_patterns) == with_weights
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    assert model_source.resolve("org/model", with_weights=with_weights) == tmp_path


def test_offline_is_respected(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail_with(AssertionError()))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    assert "HF_HUB_OFFLINE" in refusal("org/model")


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (OSError("network is unreachable"), "network is unreachable"),
        (hub_error(hub_errors.RepositoryNotFoundError), "no such model"),
        (hub_error(hub_errors.GatedRepoError), "set HF_TOKEN"),
    ],
)
def test_refusal_by_the_hub_is_one_sentence(monkeypatch, failure, expected):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail_with(failure))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    assert expected in refusal("org/model")


def test_unreachable_hub_is_reported(monkeypatch, unused_tcp_port, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{unused_tcp_port}"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    assert "cannot be downloaded" in refusal("org/no-such-model")


@pytest.mark.parametrize("value", ["abc", "2.5", ""])
def test_variable_of_the_hub_that_is_no_whole_number_is_refused(monkeypatch, value):
    """The hub's library reads it as it is loaded, and raises an error that does not name it."""
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", value)
    for module in ("huggingface_hub.constants", "dynamo.worker.hub_models"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delattr("dynamo.worker.hub_models", raising=False)

    assert "HF_HUB_ETAG_TIMEOUT" in refusal("org/model")


def test_built_in_model_is_named_storyteller():
    assert model_source.display_name(None) == "storyteller"


@pytest.mark.parametrize(
    ("asked", "files", "expected"),
    [
        ("auto", {"config.json": '{"model_type": "qwen3"}'}, "generate"),
        ("auto", {"config.json": '{"model_type": "bert"}'}, "embed"),
        ("auto", {"config.json": '{"model_type": "qwen3"}', "modules.json": "[]"}, "embed"),
        ("embed", {"config.json": '{"model_type": "qwen3"}'}, "embed"),
        ("generate", {"config.json": "{}", "modules.json": "[]"}, "generate"),
    ],
)
def test_task_is_the_requested_one_or_found_in_the_files(tmp_path, asked, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    assert model_source.task(asked, tmp_path) == expected


@pytest.mark.parametrize(
    ("typed", "name", "aliases"),
    [
        ("./Qwen/Qwen3-0.6B", "Qwen3-0.6B", ("./Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B/", "Qwen3-0.6B", ("Qwen/Qwen3-0.6B/", "Qwen/Qwen3-0.6B")),
        ("meta/Llama", "meta/Llama", ("Llama",)),
        ("storyteller", "storyteller", ()),
        (None, "storyteller", ()),
    ],
)
def test_model_has_the_names_as_typed_and_of_its_directory(
    tmp_path, monkeypatch, typed, name, aliases
):
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert model_source.display_name(typed) == name
    assert model_source.aliases(typed) == aliases
