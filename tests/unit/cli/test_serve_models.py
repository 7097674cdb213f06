"""What `dynamo serve A B` refuses before it starts anything."""

import shutil
from unittest import mock

import pytest

from dynamo.base import config, errors
from dynamo.cli import serve_models
from dynamo.cli.serve_options import ServeConfig
from dynamo.engine import native
from dynamo.worker import engines, model_source


@pytest.fixture
def models(tmp_path):
    """Two copies of the built-in model."""
    paths = [tmp_path / name for name in ("alpha", "beta")]
    for path in paths:
        shutil.copytree(f"{native.__path__[0]}/storyteller", path)
    return [str(path) for path in paths]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory-budget-gb", "0.5"], "alpha can never be loaded: it takes about 1.0 GB, of 0.5"),
        (["--memory-budget-gb", "0"], "alpha can never be loaded: it takes about 1.0 GB, of 0.0"),
        (["--pin", "gamma"], "--pin gamma: expected one of the models alpha, beta"),
        (["--planner"], "--planner is for one model, got 2"),
        (["--model-name", "m"], "--model-name is for one model, got 2"),
        (["--cores-per-worker", "2"], "--cores-per-worker is for one model, got 2"),
        (["--devices-per-worker", "1"], "--devices-per-worker is for one model, got 2"),
        (["--planner-flags", "--ttft 300"], "--planner-flags: has no effect without --planner"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(models, flags, message, unused_tcp_port):
    argv = [*models, "--http-port", str(unused_tcp_port), *flags]
    options = config.load(ServeConfig, prog="dynamo serve", argv=argv)

    with pytest.raises(errors.ConfigError, match=message):
        serve_models.serve_any(options)


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--pin", "Qwen3"], "--pin Qwen3"), (["--dry-run"], "--dry-run is for one model")],
)
def test_wrong_flag_is_told_before_a_model_is_downloaded(
    monkeypatch, flags, message, unused_tcp_port
):
    monkeypatch.setattr(serve_models.engines, "find_model", mock.Mock(side_effect=AssertionError))
    argv = ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "--http-port", str(unused_tcp_port), *flags]

    with pytest.raises(errors.ConfigError, match=message):
        serve_models.serve_any(config.load(ServeConfig, prog="dynamo serve", argv=argv))


def test_budget_is_a_share_of_what_the_machine_and_the_control_group_leave(
    models, monkeypatch, unused_tcp_port
):
    monkeypatch.setattr(serve_models.host_memory, "available_bytes", lambda: 10**9)
    argv = [*models, "--http-port", str(unused_tcp_port)]

    with pytest.raises(errors.ConfigError, match=r"it takes about 1\.0 GB, of 0\.8"):
        serve_models.serve_any(config.load(ServeConfig, prog="dynamo serve", argv=argv))


def test_models_of_one_name_are_refused(models, tmp_path, unused_tcp_port):
    shutil.copytree(models[0], tmp_path / "other" / "alpha")
    argv = [models[0], str(tmp_path / "other" / "alpha"), "--http-port", str(unused_tcp_port)]

    with pytest.raises(errors.ConfigError, match="different names, got alpha, alpha"):
        serve_models.serve_any(config.load(ServeConfig, prog="dynamo serve", argv=argv))


def test_weights_count_as_gigabytes_of_their_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(3_000_000))
    (tmp_path / "tokenizer.json").write_bytes(bytes(5_000_000))
    (tmp_path / "model.gguf").write_bytes(bytes(1_000_000))

    assert serve_models.weights_gb(tmp_path) == pytest.approx(0.004)
    assert serve_models.weights_gb(tmp_path / "model.gguf") == pytest.approx(0.001)


@pytest.mark.parametrize("typed", [["org/a"], ["org/a", "org/b"]])
def test_missing_engine_is_named_before_a_model_is_downloaded(typed, monkeypatch, unused_tcp_port):
    monkeypatch.setattr(engines, "is_installed", lambda _: False)
    monkeypatch.setattr(engines, "_load_part", lambda *_: fail("which is not installed"))
    monkeypatch.setattr(model_source, "resolve", lambda *_, **__: pytest.fail("a download"))
    argv = [*typed, "--engine", "vllm", "--http-port", str(unused_tcp_port)]

    with pytest.raises(errors.ConfigError, match="which is not installed"):
        serve_models.serve_any(config.load(ServeConfig, prog="dynamo serve", argv=argv))


def fail(message):
    """Refuse as a package that is missing is refused."""
    raise errors.ConfigError(message)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ('{"max_position_embeddings": 99}', 99),
        ('{"text_config": {"max_position_embeddings": 99}}', 99),
        ('{"text_config": null, "max_position_embeddings": 99}', 99),
        ('{"max_position_embeddings": "long"}', 0),
    ],
)
def test_context_of_a_model_is_what_its_settings_name(tmp_path, text, length):
    (tmp_path / "config.json").write_text(text)

    assert serve_models._context_length(tmp_path) == length


@pytest.mark.parametrize("content", [b"{broken", b"[1]", b"\xff"])
def test_damaged_settings_of_a_model_are_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(errors.ConfigError, match=r"config\.json: "):
        serve_models._context_length(tmp_path)


def test_second_signal_reaches_the_workers_of_loaded_models(monkeypatch):
    started = {}
    monkeypatch.setattr(
        serve_models.model_loader, "ModelLoader", lambda *_, **fields: started.update(fields)
    )
    adopted, listed = [], []
    run = mock.Mock(_models=[], _list_child=listed.append)
    serve_models._Run._make_loader(run, mock.Mock(), mock.Mock(adopt=adopted.append))
    started["on_start"]("worker")

    assert adopted == listed == ["worker"]
