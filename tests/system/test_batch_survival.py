"""Batches survive their frontend and their workers: each line is answered exactly once."""

import json
import os

import httpx
from deployment import MODEL

from waiting import PATIENT_S, eventually

FAST = ("--speedup-ratio", "1000")
NUM_LINES = int(os.environ.get("BATCH_LINES", "2000"))  # `make test-batches`: 10,000


def as_jsonl(num_lines):
    """Lines whose answers have one or two tokens."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a story"}]}
    lines = (
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body | {"max_tokens": 1 + number % 2},
        }
        for number in range(num_lines)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def begin(frontend, content):
    """Upload lines, and begin their batch; return its URL."""
    form = {"files": {"file": ("lines.jsonl", content)}, "data": {"purpose": "batch"}}
    file = httpx.post(f"{frontend.url}/v1/files", timeout=PATIENT_S, **form).json()
    batch = httpx.post(
        f"{frontend.url}/v1/batches",
        json={
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
        timeout=PATIENT_S,
    )
    return f"{frontend.url}/v1/batches/{batch.json()['id']}"


def find(url):
    return httpx.get(url, timeout=PATIENT_S)


def await_answers(url, num_answers):
    """Wait until so many lines of the batch are answered."""
    return eventually(
        lambda: find(url).json()["request_counts"]["completed"] >= num_answers,
        what=f"{num_answers} answers",
        every_s=0.05,
    )


def test_every_line_is_answered_once_though_frontend_and_worker_are_killed(deployment, tmp_path):
    options = ("--files-dir", str(tmp_path))
    dying, _ = deployment.mocker(*FAST), deployment.mocker(*FAST)
    frontend = deployment.frontend(*options)
    frontend.await_models([MODEL])
    url = begin(frontend, as_jsonl(NUM_LINES))

    await_answers(url, NUM_LINES // 5)
    frontend.kill()
    frontend = deployment.frontend(*options, port=httpx.URL(frontend.url).port)
    eventually(frontend.is_live, what="a frontend")
    await_answers(url, NUM_LINES // 2)
    dying.kill()
    await_answers(url, NUM_LINES * 4 // 5)
    eventually(lambda: find(url).json()["status"] == "completed", what="the end")

    batch = find(url).json()
    content = find(f"{frontend.url}/v1/files/{batch['output_file_id']}/content").text
    answers = [json.loads(row) for row in content.splitlines()]
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    assert [row["custom_id"] for row in answers] == [f"line {n}" for n in range(NUM_LINES)]
    assert [row["response"]["body"]["usage"]["completion_tokens"] for row in answers] == [
        1 + number % 2 for number in range(NUM_LINES)
    ]
