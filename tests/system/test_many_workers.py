"""Two hundred workers join within a second or two, and leave at once."""

import signal

import httpx
import mixes
import pytest
from deployment import MODEL

from waiting import PATIENT_S, eventually

NUM_WORKERS = 200


@pytest.mark.parametrize("mix", ["file+tcp+zmq", "etcd+tcp+zmq"])
def test_two_hundred_workers_register_at_once_and_each_gets_a_request(deployment, tmp_path, mix):
    with mixes.running(mix, deployment, tmp_path):
        frontend = deployment.frontend()
        fleet = deployment.mocker("--num-workers", str(NUM_WORKERS), "--speedup-ratio", "1000")
        name = f'dynamo_frontend_model_workers{{model="{MODEL}"}}'
        eventually(
            lambda: frontend.is_live() and frontend.metric(name) == NUM_WORKERS,
            what=f"{NUM_WORKERS} workers",
        )
        statuses = [frontend.chat(max_tokens=1).status_code for _ in range(NUM_WORKERS)]
        health = httpx.get(f"{frontend.url}/health", timeout=PATIENT_S).json()
        fleet.signal(signal.SIGTERM)
        frontend.await_models([])

        assert set(statuses) == {200}
        served = [one for one in health["instances"] if one["endpoint"] == "generate"]
        assert len({one["instance_id"] for one in served}) == NUM_WORKERS
        assert fleet.exit_code() == 0
        assert "Traceback" not in frontend.log.read_text() + fleet.log.read_text()
