"""A frontend that cannot read the worker's model directory, as on another host, with every combination of planes."""

import shutil

import pytest
from mixes import MIXES

from dynamo.worker import model_source
from etcd_server import EtcdServer
from nats_server import NatsServer
from waiting import eventually


@pytest.fixture
def over_nats(deployment, tmp_path):
    server = NatsServer(tmp_path / "nats")
    server.start()
    deployment.environ |= MIXES["file+nats+nats"] | {"NATS_SERVER": server.url}
    yield deployment
    deployment.end()
    server.stop()


@pytest.fixture
def model(tmp_path):
    """A directory of a model that only the worker will see."""
    shutil.copytree(model_source.built_in(), tmp_path / "there" / "tiny")
    return tmp_path / "there" / "tiny"


def frontend_elsewhere(deployment, tmp_path):
    return deployment.frontend("--model-cache", str(tmp_path / "cache"))


def answers(frontend):
    body = {"model": "tiny", "max_tokens": 4}
    return frontend.chat(**body).status_code == 200


def test_model_files_come_from_the_object_store(over_nats, model, tmp_path):
    worker = over_nats.mocker("--model", str(model), "--speedup-ratio", "100")
    eventually(lambda: "serving tiny" in worker.log.read_text(), what="it serves")
    model.rename(tmp_path / "gone")
    frontend = frontend_elsewhere(over_nats, tmp_path)
    frontend.await_models(["tiny"])

    assert answers(frontend)
    assert "from nats://dynamo-files/sha256-" in frontend.log.read_text()
    assert list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("mix", ["file+tcp+zmq", "etcd+tcp+zmq"])
def test_model_files_come_from_the_worker_without_nats(deployment, model, tmp_path, mix):
    etcd = EtcdServer(tmp_path / "etcd") if mix.startswith("etcd") else None
    if etcd is not None:
        etcd.start()
        deployment.environ["ETCD_ENDPOINTS"] = etcd.url
    deployment.environ |= MIXES[mix]
    deployment.run_in(model.parent, "dynamo.mocker", "--model", "./tiny", "--speedup-ratio", "100")
    frontend = frontend_elsewhere(deployment, tmp_path)
    frontend.await_models(["tiny"])

    assert answers(frontend)
    assert "from the worker at" in frontend.log.read_text()
    deployment.end()
    if etcd is not None:
        etcd.stop()
