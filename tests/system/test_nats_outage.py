"""The NATS server is absent, dies, stops and comes back while processes talk through it."""

import signal
import subprocess
import sys
import threading

import pytest
from deployment import MODEL, newly_asked

import ports
from nats_server import NatsServer
from waiting import PATIENT_S, eventually

SILENCE_S = 3.0


@pytest.fixture
def absent(tmp_path, deployment):
    """A server that is not started yet, and is to be used."""
    server = NatsServer(tmp_path / "nats")
    deployment.environ |= {
        "DYN_REQUEST_PLANE": "nats",
        "DYN_EVENT_PLANE": "nats",
        "NATS_SERVER": server.url,
    }
    yield server
    deployment.end()
    server.stop()


@pytest.fixture
def server(absent):
    absent.start()
    return absent


def answers(frontend):
    return frontend.chat(max_tokens=4).status_code == 200


@pytest.mark.parametrize("harm", ["kill", "stop"])
def test_streams_end_and_service_resumes_after_an_outage(deployment, server, harm):
    frontend = deployment.frontend("--router-mode", "kv", "--request-plane-outage-secs", "5")
    worker = deployment.mocker("--speedup-ratio", "1")
    frontend.await_models([MODEL])
    with frontend.stream(max_tokens=2000, ignore_eos=True) as lines:
        next(lines)
        if harm == "kill":
            server.stop()
        else:
            server.freeze()
        rest = list(lines)
    if harm == "kill":
        server.start()
    else:
        server.thaw()
    eventually(lambda: answers(frontend), what="an answer after the server is back")
    eventually(lambda: worker.metric("inflight_requests") == 0, what="nothing left behind")

    assert rest[-1] == "[DONE]" or "error" in "".join(rest[-2:])
    assert "Traceback" not in frontend.log.read_text() + worker.log.read_text()


def test_stream_of_the_only_worker_goes_on_after_a_stop(deployment, server):
    frontend = deployment.frontend()
    worker = deployment.mocker("--speedup-ratio", "1")
    frontend.await_models([MODEL])
    with frontend.stream(max_tokens=1000, ignore_eos=True) as lines:
        next(lines)
        worker.signal(signal.SIGSTOP)
        threading.Timer(2 * SILENCE_S, worker.signal, (signal.SIGCONT,)).start()
        rest = list(lines)

    assert rest[-1] == "[DONE]"
    assert not any("error" in line for line in rest)


def test_stopped_worker_is_given_up_where_another_can_take_over(deployment, server):
    frontend = deployment.frontend("--router-mode", "round-robin")
    workers = [deployment.mocker("--speedup-ratio", "1") for _ in range(2)]
    frontend.await_workers(2)
    with (
        newly_asked(workers) as holder,
        frontend.stream(max_tokens=2000, ignore_eos=True) as lines,
    ):
        next(lines)
        busy = holder()
        busy.signal(signal.SIGSTOP)
        rest = list(lines)
    busy.signal(signal.SIGCONT)

    assert rest[-1] == "[DONE]"
    assert not any("error" in line for line in rest)


def test_absent_server_is_named_and_may_start_later(deployment, absent):
    deployment.environ["DYN_NATS_START_TIMEOUT_SECS"] = "0.5"
    impatient = deployment.mocker()
    code = impatient.exit_code()
    said = impatient.log.read_text()
    # On a busy machine one of them may begin to wait long before the other.
    deployment.environ["DYN_NATS_START_TIMEOUT_SECS"] = str(PATIENT_S)
    patient, frontend = deployment.mocker(), deployment.frontend()
    for process in (patient, frontend):
        eventually(lambda p=process: "NATS" in p.log.read_text(), what="a line in the log")
    absent.start()
    frontend.await_models([MODEL])

    assert code != 0
    assert absent.url.removeprefix("nats://") in said
    assert "DYN_REQUEST_PLANE=tcp" in said
    assert "Traceback" not in said
    assert frontend.chat(max_tokens=4).status_code == 200


def test_help_connects_to_no_server(deployment):
    environ = deployment.environ | {
        "DYN_REQUEST_PLANE": "nats",
        "NATS_SERVER": f"nats://127.0.0.1:{ports.reserve()}",
    }
    argv = [sys.executable, "-m", "dynamo.frontend", "--help"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=PATIENT_S)

    assert done.returncode == 0
    assert "--nats-server" in done.stdout
    assert "NATS at" not in done.stderr
