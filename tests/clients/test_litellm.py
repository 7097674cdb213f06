"""LiteLLM in all three modes: OpenAI's chat, Responses, Anthropic's messages; and as a client of vLLM and Ollama."""

import json

import pytest
import questions

litellm = pytest.importorskip("litellm")


def base_of(mode, server):
    return server.url if mode in ("anthropic", "ollama_chat") else server.v1


@pytest.mark.parametrize("mode", ["openai", "hosted_vllm", "anthropic", "ollama_chat"])
def test_chat_is_answered_whole_and_streamed(server, mode):
    asked = {
        "model": f"{mode}/{server.model}",
        "api_base": base_of(mode, server),
        "api_key": "none",
        "messages": questions.SAY,
    }
    whole = litellm.completion(**asked)
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)
    )

    assert questions.NAME in whole.choices[0].message.content
    assert questions.NAME in streamed


@pytest.mark.parametrize("mode", ["openai", "anthropic"])
def test_tool_is_called(server, mode):
    answer = litellm.completion(
        model=f"{mode}/{server.model}",
        api_base=base_of(mode, server),
        api_key="none",
        messages=questions.ASK_TIME,
        tools=[questions.TOOL],
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls

    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_response_is_answered(server):
    response = litellm.responses(
        model=f"openai/{server.model}", api_base=server.v1, api_key="none", input=questions.WHO
    )

    assert questions.NAME in response.output[-1].content[0].text
