"""A planner that starts local workers, questions to it, and streams that must not be cut."""

import json

import httpx
from deployment import MODEL

import ports
import processes
from waiting import PATIENT_S


class Planner:
    """A planner that starts workers of one engine."""

    def __init__(self, deployment, frontend, *flags, backend="mocker", model=MODEL):
        port = ports.reserve()
        argv = ("dynamo.planner", "--environment", "local", "--backend", backend)
        argv += ("--model-name", model, "--frontend-url", frontend.url)
        self._backend = backend
        self.process = deployment.run(*argv, "--planner-port", str(port), *flags)
        self.url = f"http://127.0.0.1:{port}"

    def decisions(self):
        self.process.check()
        try:
            return httpx.get(f"{self.url}/planner/decisions", timeout=PATIENT_S).json()["decisions"]
        except httpx.TransportError:
            return []

    def num_workers(self):
        """Workers that are ready or starting, by the last decision."""
        rows = self.decisions()
        return rows[0]["present"]["decode"] if rows else 0

    def decisions_with(self, text):
        """Return the decisions whose reason has the text, the newest first."""
        return [row for row in self.decisions() if text in row["reason"]]

    def worker_pids(self):
        """Return the process ids of the workers that it has started."""
        return {
            pid
            for pid in processes.descendants(self.process.pid)
            if f"-m\0dynamo.{self._backend}\0" in processes.command_line(pid)
        }

    def metric(self, name):
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENT_S).text
        rows = [row for row in text.splitlines() if row.startswith(f"dynamo_planner_{name}")]
        return sum(float(row.rpartition(" ")[2]) for row in rows)


def stream_to_the_end(frontend, model, num_tokens):
    """Return the tokens of one streamed answer, and how it ended."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "stream": True,
        "ignore_eos": True,
        "max_tokens": num_tokens,
        "stream_options": {"include_usage": True},
    }
    usage, end = None, None
    with (
        httpx.Client(timeout=PATIENT_S) as client,
        client.stream("POST", f"{frontend.url}/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            end = line.removeprefix("data: ")
            if end != "[DONE]":
                chunk = json.loads(end)
                assert "error" not in chunk, chunk
                usage = chunk.get("usage") or usage
    return (usage or {}).get("completion_tokens"), end
