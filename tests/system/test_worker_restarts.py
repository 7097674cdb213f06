"""Frontends and workers start in any order, die, and are replaced."""

import json
import signal

from deployment import MODEL

from waiting import eventually

FAST = ("--speedup-ratio", "1000")


def test_worker_may_start_before_the_frontend(deployment):
    deployment.mocker(*FAST)
    frontend = deployment.frontend()
    frontend.await_models([MODEL])

    assert frontend.chat(max_tokens=4).status_code == 200


def test_frontend_may_start_before_the_worker(deployment):
    frontend = deployment.frontend()
    eventually(frontend.is_live, what="a frontend")
    refused = frontend.chat(max_tokens=4)

    assert refused.status_code in (404, 503)
    assert frontend.models() == []

    deployment.mocker(*FAST)
    frontend.await_models([MODEL])

    assert frontend.chat(max_tokens=4).status_code == 200


def test_killed_worker_is_unlisted_and_replaced(deployment):
    worker = deployment.mocker(*FAST)
    frontend = deployment.frontend("--worker-wait-secs", "0.5")
    frontend.await_models([MODEL])
    worker.kill()
    frontend.await_models([])
    refused = frontend.chat(max_tokens=4)

    assert refused.status_code == 503
    assert MODEL in refused.json()["error"]["message"]

    deployment.mocker(*FAST)
    frontend.await_models([MODEL])

    assert frontend.chat(max_tokens=4).status_code == 200


def test_worker_outlives_its_frontend(deployment):
    worker, first = deployment.mocker(*FAST), deployment.frontend()
    first.await_models([MODEL])
    first.kill()
    second = deployment.frontend()
    second.await_models([MODEL])

    assert worker.is_running
    assert second.chat(max_tokens=4).status_code == 200


def test_terminated_worker_finishes_its_answers(deployment):
    worker, frontend = deployment.mocker("--speedup-ratio", "2"), deployment.frontend()
    frontend.await_models([MODEL])
    with frontend.stream(max_tokens=300, ignore_eos=True) as lines:
        next(lines)
        worker.signal(signal.SIGTERM)
        frontend.await_models([])
        rest = list(lines)

    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert worker.exit_code() == 0


def test_stream_of_the_only_worker_ends_with_an_error_when_it_is_killed(deployment):
    worker, frontend = deployment.mocker("--speedup-ratio", "1"), deployment.frontend()
    frontend.await_models([MODEL])
    with frontend.stream(max_tokens=2000, ignore_eos=True) as lines:
        next(lines)
        worker.kill()
        rest = list(lines)

    assert any("error" in line for line in rest[-2:])
