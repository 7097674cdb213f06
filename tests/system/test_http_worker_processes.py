"""Several processes at one port: all answer, dead ones are restarted, and what one of them knows the others find."""

import contextlib
import os
import pathlib
import re
import signal

import httpx
import pytest
from deployment import MODEL, Deployment

from waiting import PATIENT_S, eventually


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The same as `two`, for tests that end none of them."""
    folder = tmp_path_factory.mktemp("shared")
    deployment = Deployment(folder)
    yield start(deployment, "--usage-file", str(folder / "usage.json"))
    deployment.end()


@pytest.fixture
def two(deployment):
    """Two processes at one port that know the model of a worker."""
    return start(deployment)


def start(deployment, *flags):
    frontend = deployment.frontend("--http-workers", "2", *flags)
    frontend.others.append(deployment.mocker("--speedup-ratio", "1"))
    eventually(lambda: serving(frontend) == {"1", "2"}, what="both serve")
    return frontend


def children(frontend):
    """The ids of the processes that answer requests, without the guard of their parent."""
    text = pathlib.Path(f"/proc/{frontend.pid}/task/{frontend.pid}/children").read_text()
    pids = []
    for word in text.split():
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            if "guard.py" not in pathlib.Path(f"/proc/{word}/cmdline").read_text():
                pids.append(int(word))
    return pids


def metrics(frontend):
    try:
        return httpx.get(f"{frontend.url}/metrics", timeout=PATIENT_S).text
    except httpx.TransportError:
        return ""


def serving(frontend):
    """Return the processes that can answer."""
    rows = re.findall(r'model_ready{http_worker="(\d+)".*} 1.0', metrics(frontend))
    return set(rows)


def num_started(frontend):
    """Return the number of chat requests that each process took."""
    rows = re.findall(r'requests_started_total{http_worker="(\d+)".*} (\S+)', metrics(frontend))
    return {worker: float(value) for worker, value in rows}


def thresholds(frontend):
    """Return the threshold of the model in each process: each request has a connection of its own."""
    answers = [httpx.get(f"{frontend.url}/busy_threshold", timeout=PATIENT_S) for _ in range(16)]
    rows = [row for answer in answers for row in answer.json()["thresholds"]]
    return {row["active_decode_blocks_threshold"] for row in rows}


def test_both_processes_answer_and_metrics_show_both(shared):
    two, before = shared, num_started(shared)
    for _ in range(24):  # each on a connection of its own; all to one of two: 1 in 8 million
        assert two.chat(max_tokens=2).status_code == 200
    counted = num_started(two)

    assert counted.keys() == {"1", "2"}
    assert all(number > before.get(name, 0) for name, number in counted.items())
    assert sum(counted.values()) == sum(before.values()) + 24
    assert metrics(two).count("# TYPE dynamo_frontend_requests_total counter") == 1


def test_usage_adds_up_what_all_processes_count(shared):
    def num_asked():
        rows = httpx.get(f"{shared.url}/usage", timeout=PATIENT_S).json()["rows"]
        return sum(row["num_requests"] for row in rows)

    before = num_asked()
    for _ in range(12):
        assert shared.chat(max_tokens=2).status_code == 200

    assert {num_asked() for _ in range(8)} == {before + 12}


def test_killed_process_restarts_while_the_other_answers(two):
    before = children(two)
    change = {"model": MODEL, "active_decode_blocks_threshold": 0.75}
    httpx.post(f"{two.url}/busy_threshold", json=change, timeout=PATIENT_S).raise_for_status()
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: before[0] not in children(two), what="it is gone")
    answer = two.chat(max_tokens=2)
    eventually(lambda: len(children(two)) == 2, what="it is started again")
    eventually(lambda: serving(two) == {"1", "2"}, what="both serve again")

    assert answer.status_code == 200
    assert before[1] in children(two)
    eventually(lambda: thresholds(two) == {0.75}, what="both have the changed threshold")


def test_sigterm_lets_running_answers_finish_and_ends_all_processes(two):
    pids = children(two)
    with two.stream(max_tokens=60) as lines:
        next(lines)
        two.signal(signal.SIGTERM)
        last = list(lines)[-1]
    code = two.exit_code()

    assert last == "[DONE]"
    assert code == 0
    assert not [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]


def test_second_start_at_the_same_port_fails_with_one_sentence(shared, deployment):
    port = shared.url.rpartition(":")[2]
    for flags in ((), ("--http-workers", "2")):
        other = deployment.run("dynamo.frontend", "--http-port", port, *flags)
        other.may_end = True

        assert other.exit_code() == 2
        assert f"port {port} is in use" in other.log.read_text()


def test_wrong_setting_in_a_child_ends_all_processes(deployment):
    flags = ("--http-port", "0", "--http-workers", "2", "--api-keys-file", "/nowhere")
    command = deployment.run("dynamo.frontend", *flags)
    command.may_end = True

    assert command.exit_code() == 2
    assert "--api-keys-file /nowhere" in command.log.read_text()


def test_conversation_continues_at_any_process(shared):
    two = shared

    def ask(**fields):
        body = {"model": MODEL, "input": "hi", "max_output_tokens": 2, **fields}
        return httpx.post(f"{two.url}/v1/responses", json=body, timeout=PATIENT_S)

    first = ask().json()["id"]
    shown = [httpx.get(f"{two.url}/v1/responses/{first}", timeout=PATIENT_S) for _ in range(12)]
    follow = [ask(previous_response_id=first) for _ in range(12)]
    deleted = httpx.delete(f"{two.url}/v1/responses/{first}", timeout=PATIENT_S)
    gone = [httpx.get(f"{two.url}/v1/responses/{first}", timeout=PATIENT_S) for _ in range(12)]

    assert {answer.status_code for answer in shown + follow} == {200}
    assert deleted.status_code == 200
    assert {answer.status_code for answer in gone} == {404}


def test_threshold_is_set_in_all_processes(shared):
    two = shared
    body = {"model": MODEL, "active_decode_blocks_threshold": 0.7}
    httpx.post(f"{two.url}/busy_threshold", json=body, timeout=PATIENT_S)
    told = [
        httpx.get(f"{two.url}/busy_threshold", timeout=PATIENT_S).json()["thresholds"][0]
        for _ in range(12)
    ]

    assert {one["active_decode_blocks_threshold"] for one in told} == {0.7}
