"""LlamaIndex's OpenAILike: chats, streams, completions."""

import pytest
import questions

openai_like = pytest.importorskip("llama_index.llms.openai_like")
core = pytest.importorskip("llama_index.core.llms")


def test_model_chats_streams_and_completes(server):
    options = {"model": server.model, "api_base": server.v1, "api_key": "none"}
    model = openai_like.OpenAILike(**options, is_chat_model=True)
    say = [core.ChatMessage(role="user", content=questions.WHO)]
    completed = openai_like.OpenAILike(**options, is_chat_model=False, max_tokens=9)

    assert questions.NAME in model.chat(say).message.content
    assert questions.NAME in "".join(piece.delta for piece in model.stream_chat(say))
    assert completed.complete("Once upon").text
