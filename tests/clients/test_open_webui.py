"""Open WebUI's requests, as it sends them to a server of OpenAI's API and to one of Ollama's (recorded shapes).

The program itself is a web application of several gigabytes, which is not installed here.
"""

import json

import httpx
import pytest
import questions

from waiting import PATIENT_S

CHAT = {
    "stream": True,
    "messages": questions.SAY,
    "stream_options": {"include_usage": True},
    "metadata": {},
    "files": [],
    "features": {"web_search": False, "image_generation": False},
    "session_id": "s",
    "chat_id": "c",
    "background_tasks": {"title_generation": True},
}


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENT_S) as client:
        yield client


def test_models_are_listed_in_both_forms(http, server):
    open_ai = http.get("/v1/models").json()["data"]
    ollama = http.get("/api/tags").json()["models"]

    assert [model["id"] for model in open_ai] == [model["model"] for model in ollama]
    assert http.get("/api/version").json()["version"]


def test_chat_of_openais_form_is_streamed(http, server):
    answer = http.post("/v1/chat/completions", json={**CHAT, "model": server.model})
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]

    assert answer.status_code == 200
    assert questions.NAME in "".join(choice["delta"].get("content", "") for choice in choices)
    assert "files" in answer.headers["x-dynamo-ignored-parameters"]


def test_chat_of_ollamas_form_is_streamed(http, server):
    body = {"model": server.model, "messages": questions.SAY, "options": {}, "keep_alive": "5m"}
    lines = [json.loads(line) for line in http.post("/api/chat", json=body).text.splitlines()]

    assert questions.NAME in "".join(line["message"]["content"] for line in lines)
    assert lines[-1]["done"]
