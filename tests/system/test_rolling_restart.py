"""Every process is restarted in turn, under load, and no request is lost.

The clients stand behind what a load balancer does: a frontend that is not healthy is not asked, and a request for which
nothing was begun (refused, broken before a byte came, or sent away by a frontend that leaves) is asked at the other.
"""

import concurrent.futures
import itertools
import json
import signal
import threading
import time

import httpx
import mixes
import pytest
from deployment import MODEL, chat

from waiting import PATIENT_S, eventually

QUESTION = "Tell me a story about a cat"
WORKER = ("--tick-ms", "10", "--graceful-shutdown-timeout", "0.3")
NUM_WORKERS, NUM_CLIENTS = 3, 6


class Clients:
    """They ask without end, and remember what was wrong."""

    def __init__(self, frontends):
        self.frontends = frontends
        self.wrong, self.num_right = [], 0
        self._expected = self._ask()
        self._is_over = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS)

    def __enter__(self):
        self._asking = [self._pool.submit(self._keep_asking) for _ in range(NUM_CLIENTS)]
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._pool.shutdown()
        for one in self._asking:
            one.result()

    def _keep_asking(self):
        while not self._is_over.is_set():
            answer = self._ask()
            if answer == self._expected:
                self.num_right += 1
            else:
                self.wrong.append(answer)

    def _ask(self):
        """Text and usage, or what went wrong."""
        until = time.monotonic() + PATIENT_S
        answer = None
        for number in itertools.count():
            frontend = self.frontends[number % len(self.frontends)]
            answer = self._ask_one(frontend) if is_healthy(frontend) else None
            if answer is not None or time.monotonic() > until:
                break
            time.sleep(0.02)  # as a client would, who is sent away
        return answer

    def _ask_one(self, frontend):
        """None: nothing was begun."""
        begun = []
        try:
            with httpx.stream("POST", f"{frontend.url}/v1/chat/completions", **asked()) as answer:
                begun.append(answer.status_code)
                lines = list(answer.iter_lines())
        except httpx.TransportError as error:
            return repr(error) if begun else None
        if answer.status_code == 200:
            return text_of(lines)
        said = "".join(lines)
        return None if "shutting down" in said else said


def asked():
    body = chat(QUESTION, max_tokens=40, ignore_eos=True, stream=True)
    return {"json": body | {"stream_options": {"include_usage": True}}, "timeout": PATIENT_S}


def text_of(lines):
    found = [line.removeprefix("data: ") for line in lines if line]
    if found[-1] != "[DONE]":
        return f"it ended with {found[-1]}"
    chunks = [json.loads(line) for line in found[:-1]]
    if "error" in chunks[-1]:
        return chunks[-1]["error"]["message"]
    pieces = [choice["delta"].get("content") or "" for c in chunks for choice in c["choices"]]
    return "".join(pieces), chunks[-1]["usage"]["completion_tokens"]


def is_healthy(frontend):
    try:
        return httpx.get(f"{frontend.url}/health", timeout=PATIENT_S).status_code == 200
    except httpx.TransportError:
        return False


def await_workers(frontends):
    """Until each frontend knows them all."""
    name = f'dynamo_frontend_model_workers{{model="{MODEL}"}}'
    for frontend in frontends:
        eventually(
            lambda one=frontend: is_healthy(one) and one.metric(name) == NUM_WORKERS,
            what=f"{NUM_WORKERS} workers at {frontend.url}",
        )


def end(process):
    process.signal(signal.SIGTERM)
    assert process.exit_code(PATIENT_S) == 0, process.log.read_text()
    assert "Traceback" not in process.log.read_text()


@pytest.mark.parametrize("mix", ["file+tcp+zmq", "etcd+nats+nats"])
def test_restart_of_every_process_in_turn_loses_no_request(deployment, tmp_path, mix):
    with mixes.running(mix, deployment, tmp_path) as servers:
        workers = [deployment.mocker(*WORKER) for _ in range(NUM_WORKERS)]
        frontends = [deployment.frontend() for _ in range(2)]
        await_workers(frontends)
        with Clients(frontends) as clients:
            for server in servers:
                server.stop()
                server.start()
                await_workers(frontends)
            for number, old in enumerate(list(frontends)):
                end(old)
                port = int(old.url.rpartition(":")[2])
                frontends[number] = deployment.frontend(port=port)
                await_workers(frontends)
            for old in workers:
                end(old)
                deployment.mocker(*WORKER)
                await_workers(frontends)

        assert not clients.wrong
        assert clients.num_right > NUM_CLIENTS  # how many depends on how quickly processes start
