"""Conversations whose turns come to different frontends, which choose the model by what is said."""

import itertools

import httpx
from deployment import MODEL

from waiting import PATIENT_S, eventually

CONFIG = f"""
default_model: {MODEL}
keyword_rules: [{{name: code, keywords: [python]}}]
decisions:
  - name: code
    rules: {{conditions: [{{type: keyword, name: code}}]}}
    modelRefs: [{{model: coder}}]
"""


def ask(frontend, *texts):
    """Return the model that answers the last of these turns."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    body = {"model": "auto", "messages": messages, "max_tokens": 2}
    answer = httpx.post(f"{frontend.url}/v1/chat/completions", json=body, timeout=PATIENT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["model"]


def test_conversation_keeps_its_model_at_another_frontend(deployment, tmp_path):
    config = tmp_path / "router.yaml"
    config.write_text(CONFIG)
    workers = [
        deployment.mocker("--speedup-ratio", "0", *flags)
        for flags in ((), ("--model-name", "coder"))
    ]
    first, second = (deployment.frontend("--semantic-router", str(config)) for _ in range(2))
    for frontend in (first, second):
        frontend.others = workers
        frontend.await_models(["coder", MODEL, "MoM"])
    numbers = itertools.count()

    def is_kept():
        code = f"some python, please ({next(numbers)})"
        assert ask(first, code) == "coder"
        return ask(second, code, "print", "thanks") == "coder"

    eventually(is_kept, what="the frontends have found each other")

    assert is_kept()
