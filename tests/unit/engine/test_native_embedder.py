"""Failures of the native embedder; `tests/contract/test_embedder.py` has its results."""

import pytest

import checkpoints
from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.native.embedder import NativeEmbedder
from dynamo.engine.native.settings import NativeConfig
from dynamo.protocols import blocks

pytestmark = pytest.mark.reference  # transformers, which makes the checkpoint, takes long to import


async def test_an_unsupported_model_raises_config_error(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["T5Model"]}')
    embedder = NativeEmbedder(tmp_path, NativeConfig())

    with pytest.raises(errors.ConfigError, match="the architecture T5Model is not supported"):
        await embedder.start()
    await embedder.stop()


async def test_a_batch_that_fails_does_not_end_the_embedder(tmp_path):
    embedder = NativeEmbedder(checkpoints.make_encoder(tmp_path, "bert"), NativeConfig())
    await embedder.start()

    with pytest.raises(errors.EngineFailed, match="a batch of 1 texts failed: IndexError"):
        await embedder.embed([api.EmbedInput(blocks.pack([10_000]))])
    assert len(await embedder.embed([api.EmbedInput(blocks.pack([1]))])) == 1
    await embedder.stop()
