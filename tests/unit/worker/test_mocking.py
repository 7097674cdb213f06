"""The simulated engine for a model directory."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from dynamo.base import errors
from dynamo.engine.mock import settings as mock
from dynamo.worker import mocking


@pytest.fixture
def directory(tmp_path):
    words = {word: number for number, word in enumerate(sorted(set(mocking.TEXT.split())))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words | {"?": len(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


class Sink:
    """Hears nothing in these tests."""


async def facts_of(directory, config):
    (directory / "config.json").write_text(config)
    engine = mocking.build(directory, mock.MockConfig())
    try:
        return await engine.start(Sink())
    finally:
        await engine.stop()


async def test_it_has_the_context_of_the_model(directory):
    facts = await facts_of(directory, '{"max_position_embeddings": 512}')

    assert facts.context_length == 512


async def test_a_model_that_does_not_say_gets_a_usual_context(directory):
    facts = await facts_of(directory, "{}")

    assert facts.context_length == mocking.DEFAULT_CONTEXT


@pytest.mark.parametrize("config", ["no json", "[]"])
async def test_a_broken_configuration_is_refused(directory, config):
    with pytest.raises(errors.ConfigError, match=r"config.json: expected a JSON object"):
        await facts_of(directory, config)
