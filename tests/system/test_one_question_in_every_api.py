"""The same greedy question, through each API and its official client, has the same answer and the same counts."""

import json

import anthropic
import httpx
import openai
from deployment import MODEL

from waiting import PATIENT_S

QUESTION = "Tell me a story about a brave cat"
SAY = [{"role": "user", "content": QUESTION}]
LENGTH = 24


def test_all_apis_tell_the_same_and_count_the_same(deployment):
    deployment.native()
    frontend = deployment.frontend()
    frontend.await_models([MODEL])
    open_ai = openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none")
    claude = anthropic.Anthropic(base_url=frontend.url, api_key="none")
    with open_ai, claude, httpx.Client(base_url=frontend.url, timeout=PATIENT_S) as client:
        chat = open_ai.chat.completions.create(
            model=MODEL, messages=SAY, max_tokens=LENGTH, temperature=0
        )
        text, num_tokens = chat.choices[0].message.content, chat.usage.prompt_tokens
        cleared = client.post("/clear_kv_blocks").json()
        message = claude.messages.create(
            model=MODEL, messages=SAY, max_tokens=LENGTH, extra_body={"temperature": 0}
        )
        response = open_ai.responses.create(
            model=MODEL, input=QUESTION, max_output_tokens=LENGTH, temperature=0
        )
        counted = claude.messages.count_tokens(model=MODEL, messages=SAY)
        tokens = client.post("/tokenize", json={"messages": SAY}).json()
        written = client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()

    assert text
    assert [message.content[0].text, response.output_text] == [text, text]
    assert message.usage.input_tokens == num_tokens  # all of them: the cache was cleared
    assert response.usage.input_tokens == counted.input_tokens == tokens["count"] == num_tokens
    assert QUESTION in written["prompt"]
    assert [one["status"] for one in cleared["cleared_workers"]] == ["cleared"]


def test_all_apis_call_the_same_tool(deployment):
    deployment.native()
    frontend = deployment.frontend()
    frontend.await_models([MODEL])
    ask, name = "What time is it in Paris?", "get_time"
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": name, "parameters": schema}
    open_ai = openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none")
    claude = anthropic.Anthropic(base_url=frontend.url, api_key="none")
    with open_ai, claude:
        chat = open_ai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": ask}],
            tools=[{"type": "function", "function": function}],
            temperature=0,
        )
        message = claude.messages.create(
            model=MODEL,
            messages=[{"role": "user", "content": ask}],
            tools=[{"name": name, "input_schema": schema}],
            max_tokens=100,
            extra_body={"temperature": 0},
        )
        response = open_ai.responses.create(
            model=MODEL, input=ask, tools=[{"type": "function", **function}], temperature=0
        )
    call = chat.choices[0].message.tool_calls[0].function

    assert message.stop_reason == "tool_use"
    assert message.content[-1].name == response.output[-1].name == call.name
    assert message.content[-1].input == json.loads(call.arguments)
    assert response.output[-1].arguments == call.arguments
