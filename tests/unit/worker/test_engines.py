"""Engines by name."""

import os

import pytest

from dynamo.base import errors
from dynamo.engine.adapters import settings as adapters
from dynamo.engine.mock import settings as mock
from dynamo.engine.native import settings as native
from dynamo.worker import engines, model_source


def test_unknown_engine_is_refused_with_the_known_engines():
    with pytest.raises(
        errors.ConfigError, match="'warp'; there are native, mocker, vllm, sglang, trtllm"
    ):
        engines.kind_of("warp")
    with pytest.raises(errors.ConfigError, match="use native, or llamacpp for a GGUF file"):
        engines.kind_of("mistralrs")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("native", native.NativeConfig), ("mocker", mock.MockConfig), ("vllm", adapters.VllmConfig)],
)
def test_each_engine_brings_its_settings(name, expected):
    assert engines.settings_of(name) is expected


def test_error_for_an_engine_without_an_extra_says_what_to_install(monkeypatch, tmp_path):
    def fail(module):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(engines.importlib, "import_module", fail)
    with pytest.raises(errors.ConfigError, match=r"make setup EXTRAS=native"):
        engines.build("native", tmp_path, native.NativeConfig())


def test_gguf_file_beside_other_weights_keeps_no_engine_from_them(tmp_path):
    for name in (*model_source.REQUIRED, "model.gguf", "model.safetensors"):
        (tmp_path / name).write_text("{}")

    assert engines.find_model("native", str(tmp_path)) == tmp_path


def test_directory_of_a_gguf_file_alone_is_refused(tmp_path):
    for name in (*model_source.REQUIRED, "model.gguf"):
        (tmp_path / name).write_text("{}")

    with pytest.raises(errors.ConfigError, match="a GGUF file, which the native engine"):
        engines.find_model("native", str(tmp_path))


def test_wait_policy_of_torch_is_set_before_the_import(monkeypatch, tmp_path):
    environment = {}
    monkeypatch.setattr(os, "environ", environment)
    told = []
    monkeypatch.setattr(engines, "_load", lambda *_: told.append(dict(environment)) or _engine)

    engines.build("native", tmp_path, native.NativeConfig())

    assert [one["OMP_WAIT_POLICY"] for one in told] == ["PASSIVE"]


def test_wait_policy_of_the_user_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "ACTIVE"})
    monkeypatch.setattr(engines, "_load", lambda *_: _engine)

    engines.build("native", tmp_path, native.NativeConfig())

    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_engine_gets_the_build_arguments_of_its_kind(monkeypatch, tmp_path):
    told = {}
    monkeypatch.setattr(engines, "_load_part", lambda *_: lambda *_, **beside: told.update(beside))

    engines.build("vllm", tmp_path, adapters.VllmConfig(), model_name="tiny", room=object())

    assert told == {"model_name": "tiny"}


def test_installed_version_is_checked_before_the_import(monkeypatch, tmp_path):
    def refuse():
        raise errors.ConfigError("too old")

    loaded = []
    monkeypatch.setattr(engines, "_load", lambda _, target: loaded.append(target) or refuse)
    with pytest.raises(errors.ConfigError, match="too old"):
        engines.build("vllm", tmp_path, adapters.VllmConfig())

    assert loaded == [engines.KIND_BY_NAME["vllm"].check]


def test_error_for_an_engine_without_an_embedder_names_one_with_it(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"python -m dynamo\.native"):
        engines.build_embedder("vllm", tmp_path, adapters.VllmConfig())


def _engine(directory, settings, room):
    return directory, settings


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_model_without_safetensors_at_the_hub_is_refused_where_weights_are_read(
    tmp_path, monkeypatch, engine
):
    monkeypatch.setattr(model_source, "resolve", lambda model, **_: tmp_path)

    assert engines.find_model("mocker", "org/model") == tmp_path
    with pytest.raises(errors.ConfigError, match="'org/model' has no safetensors at the hub"):
        engines.find_model(engine, "org/model")
