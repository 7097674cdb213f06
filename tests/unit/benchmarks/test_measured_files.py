"""The models and prompts of measurements: a run that was interrupted leaves none that the next one takes for whole."""

import types

import pytest
from benchmarks import frontend, prompts


def interrupt(path, *_):
    path.write_text("half")
    raise KeyboardInterrupt


def test_half_made_model_and_prompts_are_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(frontend, "WORK", tmp_path)
    monkeypatch.setattr(prompts, "Sampler", str)
    made = []

    def make_model(argv, *, check):
        folder = tmp_path / argv[-1]
        folder.mkdir()
        made.append(folder)
        if len(made) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(frontend.subprocess, "run", make_model)
    with pytest.raises(KeyboardInterrupt):
        frontend.Files()
    files = frontend.Files()
    frontend.Files()
    assert len(made) == 2
    assert files.model.is_dir()

    cell = types.SimpleNamespace(prompts="short")
    monkeypatch.setattr(prompts, "short", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.of(cell, 1)
    monkeypatch.setattr(prompts, "short", lambda path: path.write_text("whole"))
    with open(files.of(cell, 1)) as file:
        assert file.read() == "whole"
