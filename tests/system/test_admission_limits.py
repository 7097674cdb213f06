"""API keys, rate limits and the waiting queue of a real deployment."""

import concurrent.futures

import httpx
import pytest
from deployment import MODEL, chat

from waiting import PATIENT_S, eventually

KEYS = """
[[keys]]
name = "greedy"
key = "sk-greedy-1"
requests_per_minute = 3

[[keys]]
name = "modest"
key = "sk-modest-1"
"""
ENDLESS = ("--tick-ms", "100")  # 2,000 tokens take longer than a test waits
ONE_AT_A_TIME = ("--rejection-frontend-request-concurrency-limit", "1", "--queue-limit", "8")


def as_(key):
    return {"authorization": f"Bearer {key}"}


def pending(frontend):
    """Return the number of requests that wait in the queue."""
    rows = httpx.get(f"{frontend.url}/metrics", timeout=PATIENT_S).text.splitlines()
    return sum(
        float(row.rpartition(" ")[2])
        for row in rows
        if row.startswith("dynamo_frontend_admission_queue_pending_requests{")
    )


@pytest.fixture
def guarded(deployment, tmp_path):
    """A frontend that needs API keys, and a worker."""
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    frontend = deployment.frontend("--api-keys-file", str(path))
    frontend.others.append(deployment.mocker("--speedup-ratio", "100"))
    frontend.keys = path

    def ask(key, **fields):
        url = f"{frontend.url}/v1/chat/completions"
        return httpx.post(
            url, json=chat("hi", max_tokens=3, **fields), headers=as_(key), timeout=PATIENT_S
        )

    def is_ready():
        frontend.check()
        return (
            frontend.is_live()
            and httpx.get(f"{frontend.url}/health", timeout=PATIENT_S).status_code == 200
        )

    eventually(is_ready, what="the model is served")
    frontend.ask = ask
    return frontend


def test_tenant_over_its_limit_is_refused_while_another_is_served(guarded):
    greedy = [guarded.ask("sk-greedy-1") for _ in range(5)]
    modest = [guarded.ask("sk-modest-1") for _ in range(5)]

    assert [answer.status_code for answer in greedy] == [200, 200, 200, 429, 429]
    assert all(1 <= int(answer.headers["retry-after"]) <= 20 for answer in greedy[3:])
    assert {answer.status_code for answer in modest} == {200}
    assert "sk-" not in guarded.log.read_text()


def test_added_key_is_valid_and_removed_key_is_not(guarded):
    before = guarded.ask("sk-modest-2").status_code
    guarded.keys.write_text(KEYS.replace("sk-modest-1", "sk-modest-2"))
    eventually(lambda: guarded.ask("sk-modest-2").status_code == 200, what="the new key works")
    after = guarded.ask("sk-modest-1").status_code
    guarded.keys.write_text("broken")
    eventually(
        lambda: "the keys stay as they were" in guarded.log.read_text(),
        what="it is told",
    )

    assert (before, after) == (401, 401)
    assert guarded.ask("sk-modest-2").status_code == 200


def test_queued_requests_are_all_answered(deployment):
    frontend = deployment.frontend(*ONE_AT_A_TIME)
    frontend.others.append(deployment.mocker("--speedup-ratio", "10"))
    frontend.await_models([MODEL])
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: frontend.chat(max_tokens=20), range(6)))

    assert {answer.status_code for answer in answers} == {200}
    assert pending(frontend) == 0


def test_queue_timeout_has_a_retry_after_header(deployment):
    frontend = deployment.frontend(*ONE_AT_A_TIME, "--queue-timeout-secs", "0.1")
    frontend.others.append(deployment.mocker(*ENDLESS))
    frontend.await_models([MODEL])
    with frontend.stream(max_tokens=2000, ignore_eos=True) as lines:
        next(lines)
        answer = frontend.chat()

    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


def test_disconnected_client_frees_its_queue_position(deployment):
    frontend = deployment.frontend(*ONE_AT_A_TIME)
    worker = deployment.mocker(*ENDLESS)
    frontend.others.append(worker)
    frontend.await_models([MODEL])
    with frontend.stream(max_tokens=2000, ignore_eos=True) as lines:
        next(lines)
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{frontend.url}/v1/chat/completions", json=chat("hi"), timeout=0.5)
        eventually(lambda: pending(frontend) == 0, what="the line is empty")

    eventually(lambda: frontend.chat(max_tokens=2).status_code == 200, what="free")
    assert worker.metric("cancellation_total") == 1  # of the stream: the other never came so far


def test_worker_with_full_blocks_is_busy_until_they_are_free(deployment):
    frontend = deployment.frontend("--busy-threshold", "0.0")
    frontend.others.append(deployment.mocker(*ENDLESS))
    frontend.await_models([MODEL])
    with frontend.stream(max_tokens=2000, ignore_eos=True) as lines:
        next(lines)
        eventually(lambda: frontend.chat(max_tokens=1).status_code == 503, what="busy")

    eventually(lambda: frontend.chat(max_tokens=1).status_code == 200, what="free")
