"""A model hub that several modules of tests download from."""

import os

import pytest

from dynamo.worker import model_source
from throttled_hub import ThrottledHub


@pytest.fixture
def slow_hub(tmp_path):
    """A hub whose model is the built-in one with a large file, in 40 pieces of 0.1 s."""
    model = tmp_path / "model"
    model.mkdir()
    for path in model_source.built_in().iterdir():
        if path.suffix == ".json":
            (model / path.name).write_bytes(path.read_bytes())
    (model / "large.txt").write_bytes(os.urandom(10 * 2**20))
    with ThrottledHub(model, piece_s=0.1) as hub:
        yield hub
