"""The same stories over every mix of planes: real processes, real servers."""

import json
import signal

import httpx
import mixes
import pytest
from deployment import MODEL

from waiting import PATIENT_S, eventually

WORKER = ("--speedup-ratio", "50", "--block-size", "16")


@pytest.fixture(params=mixes.MIXES)
def mixed(request, deployment, tmp_path):
    """A deployment whose processes are told to use this mix."""
    with mixes.running(request.param, deployment, tmp_path):
        yield deployment


def is_listing(frontend, num_workers):
    answer = httpx.get(f"{frontend.url}/health", timeout=PATIENT_S).json()
    return len(answer["instances"]) == num_workers


def cached_tokens(frontend, text):
    body = {"model": MODEL, "prompt": text, "max_tokens": 4}
    answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=PATIENT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_request_goes_to_the_worker_with_its_prefix(mixed):
    frontend = mixed.frontend("--router-mode", "kv")
    workers = [mixed.mocker(*WORKER) for _ in range(3)]
    frontend.others += workers
    frontend.await_models([MODEL])
    eventually(lambda: is_listing(frontend, 3), what="three workers")
    texts = [f"{number} once upon a time " * 60 for number in range(6)]
    first = [cached_tokens(frontend, text) for text in texts]

    def are_all_found():  # the events of what is cached take their time
        return all(cached_tokens(frontend, text) > 100 for text in texts)

    eventually(are_all_found, what="each prefix at its worker")

    assert max(first) < 100


def test_workers_join_and_leave(mixed):
    frontend = mixed.frontend("--worker-wait-secs", "0.5")
    worker = mixed.mocker("--speedup-ratio", "1000")
    frontend.await_models([MODEL])

    assert frontend.chat(max_tokens=4).status_code == 200

    worker.kill()
    frontend.await_models([])

    assert frontend.chat(max_tokens=4).status_code == 503

    leaving = mixed.mocker("--speedup-ratio", "2")
    frontend.await_models([MODEL])
    with frontend.stream(max_tokens=200, ignore_eos=True) as lines:
        next(lines)
        leaving.signal(signal.SIGTERM)
        rest = list(lines)

    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert leaving.exit_code() == 0

    frontend.signal(signal.SIGTERM)

    assert frontend.exit_code() == 0
    assert "Traceback" not in frontend.log.read_text() + leaving.log.read_text()
