"""A stopped frontend (SIGSTOP) costs its workers little, and the clients of another frontend nothing."""

import concurrent.futures
import signal
import threading
import time

import mixes
import pytest
from deployment import MODEL

from waiting import PATIENT_S, eventually

NUM_STREAMS = 64
NUM_TOKENS = 400
STILL_S = 4.0  # longer than a silent peer is borne
ROOM_BYTES = 32 * 2**20


@pytest.mark.parametrize("mix", ["file+tcp+zmq", "file+nats+nats"])
def test_answers_of_a_stopped_frontend_continue_when_it_wakes(deployment, tmp_path, mix):
    with mixes.running(mix, deployment, tmp_path):
        worker = deployment.mocker("--tick-ms", "10")
        still, other = deployment.frontend(), deployment.frontend()
        for frontend in (still, other):
            frontend.await_models([MODEL])
        begun, ends = threading.Barrier(NUM_STREAMS + 1), []

        def listen():
            with still.stream(max_tokens=NUM_TOKENS, ignore_eos=True) as lines:
                next(lines)
                begun.wait(PATIENT_S)
                ends.append(list(lines)[-1])

        with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
            for _ in range(NUM_STREAMS):
                pool.submit(listen)
            begun.wait(PATIENT_S)
            before = worker.rss_bytes()
            still.signal(signal.SIGSTOP)
            until = time.monotonic() + STILL_S
            statuses, peak = set(), 0
            while time.monotonic() < until:  # the fault itself
                statuses.add(other.chat(max_tokens=4).status_code)
                peak = max(peak, worker.rss_bytes())
            eventually(lambda: worker.metric("inflight_requests") == 0, what="it is left")
            still.signal(signal.SIGCONT)

        assert statuses == {200}
        assert peak - before < ROOM_BYTES
        assert ends == ["[DONE]"] * NUM_STREAMS
        assert still.chat(max_tokens=4).status_code == 200


def test_frontend_that_stood_still_gives_up_no_worker(deployment):
    worker = deployment.mocker("--tick-ms", "20")
    frontend = deployment.frontend()
    frontend.await_models([MODEL])
    with frontend.stream(max_tokens=NUM_TOKENS, ignore_eos=True) as lines:
        next(lines)
        frontend.signal(signal.SIGSTOP)
        time.sleep(STILL_S * 1.5)  # the fault itself
        frontend.signal(signal.SIGCONT)
        end = list(lines)[-1]
    logs = frontend.log.read_text() + worker.log.read_text()

    assert end == "[DONE]"
    assert "was silent" not in logs
    assert "migrat" not in logs
