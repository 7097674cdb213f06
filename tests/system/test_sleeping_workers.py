"""A worker is put to sleep and woken by its system port, while others answer."""

import signal

import httpx
from deployment import MODEL, newly_asked

from waiting import PATIENT_S, eventually

FAST = ("--speedup-ratio", "1000")
SLOW = ("--speedup-ratio", "2")


def tell(worker, what, **body):
    return httpx.post(f"{worker.url}/engine/{what}", json=body, timeout=PATIENT_S)


def health(worker):
    return httpx.get(f"{worker.url}/health", timeout=PATIENT_S)


def num_workers(frontend):
    return frontend.metric(f'dynamo_frontend_model_workers{{model="{MODEL}"}}')


def test_other_workers_answer_while_one_sleeps(deployment):
    workers = [deployment.mocker(*FAST) for _ in range(2)]
    frontend = deployment.frontend("--router-mode", "kv")
    frontend.await_models([MODEL])
    eventually(lambda: num_workers(frontend) == 2, what="both")
    sleeper, other = workers

    slept = tell(sleeper, "sleep", level=1)
    eventually(lambda: num_workers(frontend) == 1, what="one alone")
    before = other.metric("requests_total")
    answers = [frontend.chat(max_tokens=4).status_code for _ in range(10)]

    assert slept.json() == {"status": "ok", "message": "asleep (level 1)"}
    assert tell(sleeper, "sleep").json()["message"] == "asleep already (level 1)"
    assert (health(sleeper).status_code, health(sleeper).json()["status"]) == (503, "notready")
    assert httpx.get(f"{sleeper.url}/live", timeout=PATIENT_S).status_code == 200
    assert answers == [200] * 10
    assert other.metric("requests_total") == before + 10

    partly = tell(sleeper, "wake_up", tags=["weights"])
    assert partly.json()["message"] == "asleep still, though weights may be back"
    assert health(sleeper).status_code == 503

    woken = tell(sleeper, "wake_up")
    eventually(lambda: num_workers(frontend) == 2, what="both again")
    other.signal(signal.SIGTERM)
    eventually(lambda: num_workers(frontend) == 1, what="the other is gone")

    assert woken.json() == {"status": "ok", "message": "awake"}
    assert health(sleeper).status_code == 200
    assert frontend.chat(max_tokens=4).status_code == 200


def test_only_worker_finishes_its_answer_before_it_sleeps(deployment):
    worker, frontend = deployment.mocker(*SLOW), deployment.frontend()
    frontend.await_models([MODEL])
    with frontend.stream(max_tokens=300, ignore_eos=True) as lines:
        next(lines)
        slept = tell(worker, "sleep", level=2)
        rest = list(lines)

    assert slept.status_code == 200
    assert rest[-1] == "[DONE]"
    frontend.await_models([])

    tell(worker, "wake_up")
    frontend.await_models([MODEL])

    assert frontend.chat(max_tokens=4).status_code == 200


def test_router_forgets_the_blocks_of_a_worker_that_slept(deployment):
    worker, frontend = deployment.mocker(*FAST), deployment.frontend("--router-mode", "kv")
    frontend.await_models([MODEL])
    known = [num_cached(frontend) for _ in range(2)]

    tell(worker, "sleep")
    tell(worker, "wake_up")
    frontend.await_models([MODEL])
    again = [num_cached(frontend) for _ in range(2)]

    assert known[1] > known[0] == 0
    assert again == known


def num_cached(frontend):
    answer = frontend.chat("Tell me of a hundred long nights. " * 20, max_tokens=4)
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_unfinished_answer_migrates_when_its_worker_sleeps(deployment):
    flags = ("--tick-ms", "20", "--graceful-shutdown-timeout", "0")
    workers = [deployment.mocker(*flags) for _ in range(2)]
    frontend = deployment.frontend()
    frontend.await_models([MODEL])
    eventually(lambda: num_workers(frontend) == 2, what="both")
    with (
        newly_asked(workers) as holder,
        frontend.stream(max_tokens=300, ignore_eos=True) as lines,
    ):
        begun = [next(lines) for _ in range(3)]
        busy = holder()
        tell(busy, "sleep")
        rest = list(lines)

    assert rest[-1] == "[DONE]"
    assert len(begun) + len(rest) > 300
    assert health(busy).status_code == 503


def test_sleeping_worker_ends_on_sigterm(deployment):
    worker = deployment.mocker(*FAST)
    eventually(lambda: is_healthy(worker), what="a worker")
    tell(worker, "sleep")
    worker.signal(signal.SIGTERM)

    assert worker.exit_code() == 0


def is_healthy(worker):
    worker.check()
    try:
        return health(worker).status_code == 200
    except httpx.TransportError:
        return False


def test_engine_without_sleep_has_no_sleep_route(deployment):
    worker = deployment.native()
    eventually(lambda: is_healthy(worker), what="a worker")

    assert tell(worker, "sleep").status_code == 404
