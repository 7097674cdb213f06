"""pydantic-ai, in an environment of its own: agents over chats, Responses and Anthropic's messages."""

import json
import pathlib

import client_rig
import pytest
import questions

SCRIPT = pathlib.Path(__file__).parent / "pydantic_ai_agent.py"


@pytest.mark.parametrize("form", ["chat", "responses", "anthropic"])
def test_agent_answers_and_calls_its_tool(server, form):
    client_rig.find_client("pydantic_ai/lib/*/site-packages/pydantic_ai")
    python = client_rig.find_client("pydantic_ai/bin/python")
    said = client_rig.run_client(
        python, SCRIPT, form, server.url, server.model, questions.WHO, questions.TIME
    )
    answer, cities = json.loads(said.splitlines()[-1])

    assert questions.NAME in answer
    assert cities == ["Paris"]
