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


async def test_mock_engine_has_the_context_length_of_the_model(directory):
    facts = await facts_of(directory, '{"max_position_embeddings": 512}')

    assert facts.context_length == 512


async def test_model_without_a_context_length_gets_the_usual_one(directory):
    facts = await facts_of(directory, "{}")

    assert facts.context_length == mocking.DEFAULT_CONTEXT


@pytest.mark.parametrize("config", ["no json", "[]"])
async def test_malformed_configuration_is_refused(directory, config):
    with pytest.raises(errors.ConfigError, match=r"config.json: expected a JSON object"):
        await facts_of(directory, config)


def build_all(directory, **settings):
    (directory / "config.json").write_text("{}")
    return mocking.build_all(directory, mock.MockConfig(**settings))


def test_engines_of_one_process_share_the_text_of_their_answers(directory, monkeypatch):
    read = []
    monkeypatch.setattr(
        mocking.tokenize,
        "Tokenizer",
        lambda content, made=mocking.tokenize.Tokenizer: read.append(1) or made(content),
    )

    assert len(build_all(directory, num_workers=3)) == 3
    assert len(read) == 1


def test_build_makes_one_engine_whatever_the_number(directory):
    (directory / "config.json").write_text("{}")

    assert mocking.build(directory, mock.MockConfig(num_workers=3)) is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "p.json: cannot be read: No such file"), ("{}", "p.json: expected a JSON object")],
)
def test_unreadable_profile_is_refused(directory, content, message):
    path = directory / "p.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(errors.ConfigError, match=message):
        build_all(directory, planner_profile_data=str(path))
