"""Limits of thinking, asked of a model that has tokens for its marks."""

import shutil

import pytest
import tokenizers

from dynamo.protocols import model_card

SAY = [{"role": "user", "content": "hi"}]
MESSAGE = {
    "model": "m",
    "max_tokens": 2000,
    "messages": SAY,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}


@pytest.fixture
async def thinker(bare, model_dir, tmp_path):
    """A function that starts a worker, whose engine can limit thoughts or cannot."""
    bare.model_dir = tmp_path / "thinking"
    shutil.copytree(model_dir, bare.model_dir)
    path = str(bare.model_dir / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.add_special_tokens(["<think>", "</think>"])
    tokenizer.save(path)
    await bare.start()

    async def start(**facts):
        runtime_config = model_card.ModelRuntimeConfig(reasoning_parser="basic", **facts)
        bare.one = await bare.worker(runtime_config=runtime_config, context_length=4000)
        return bare

    return start


async def test_budget_of_a_message_limits_its_thoughts(thinker):
    rig = await thinker()
    answer = await rig.client.post("/v1/messages", json=MESSAGE)

    assert answer.status_code == 200, answer.text
    assert rig.one.requests[0].thinking.max_tokens == 1024


async def test_budget_of_a_message_is_left_out_for_an_engine_that_limits_no_thoughts(thinker):
    rig = await thinker(supports_thinking_limit=False)
    answer = await rig.client.post("/v1/messages", json=MESSAGE)

    assert answer.status_code == 200, answer.text
    assert rig.one.requests[0].thinking is None


async def test_limit_of_a_chat_is_refused_for_an_engine_that_limits_no_thoughts(thinker):
    rig = await thinker(supports_thinking_limit=False)
    answer = await rig.chat(thinking_token_budget=5)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "thinking_token_budget"
