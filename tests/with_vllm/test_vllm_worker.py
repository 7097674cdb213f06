"""A worker with real vLLM, as users start it: what an operator sees of it, and how it ends."""

import importlib.util
import os
import pathlib
import signal
import sys
import tempfile

import httpx
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

from deployment import Process, Worker, eventually

import ports
import processes
import vllm_models
from vllm_engine import ENVIRONMENT, FLAGS

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
START_S = 400.0
END_S = 30.0


@pytest.fixture
def worker(tmp_path):
    environ = os.environ | ENVIRONMENT | {"DYN_FILE_KV": str(tmp_path / "discovery")}
    flags = ("--model", str(vllm_models.make(tmp_path / "model")), "--served-model-name", "tiny")
    made = Worker("vllm", environ, tmp_path / "vllm.log", *flags, *FLAGS.split())
    eventually(lambda: is_ready(made), within_s=START_S, what=f"ready, see {made.log}")
    yield made
    made.end()


def is_ready(worker):
    worker.check()
    try:
        return httpx.get(f"{worker.url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def core_of(worker):
    """The process of the engine's scheduler."""
    for pid in processes.descendants(worker.pid):
        with open(f"/proc/{pid}/cmdline") as said:
            if "EngineCore" in said.read():
                return pid
    raise AssertionError(worker.log.read_text())


def await_gone(pids):
    eventually(
        lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids),
        within_s=END_S,
        what=f"the end of {pids}",
    )


def test_a_worker_exports_vllms_metrics_and_ends_with_its_engine(worker):
    shown = httpx.get(f"{worker.url}/metrics", timeout=5).text
    below = processes.descendants(worker.pid)
    worker.may_end = True
    os.kill(core_of(worker), signal.SIGKILL)

    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in shown
    assert "dynamo_component_kvstats_total_blocks 24.0" in shown
    assert "python_info" not in shown
    assert worker.exit_code(END_S) == 1
    assert "vLLM's engine process died" in worker.log.read_text()
    await_gone(below)


def test_a_killed_worker_leaves_no_vllm_process(worker):
    below = processes.descendants(worker.pid)
    worker.kill()

    assert len(below) >= 2
    await_gone(below)


def test_dynamo_serve_that_is_killed_leaves_no_process_socket_or_shared_memory(tmp_path):
    folder = pathlib.Path(tempfile.mkdtemp())  # short: vLLM's sockets lie below
    environ = os.environ | ENVIRONMENT | {"TMPDIR": str(folder)}
    model = vllm_models.make(tmp_path / "model")
    port = str(ports.reserve())
    argv = [sys.executable, "-m", "dynamo.cli", "serve", str(model), "--engine", "vllm"]
    argv += ["--http-port", port, "--ready-timeout", str(START_S), "--worker-flags", FLAGS]
    command = Process(argv, environ, tmp_path / "serve.log")
    try:
        eventually(
            lambda: "curl " in command.log.read_text() or not command.is_running,
            within_s=START_S,
            what=f"ready, see {command.log}",
        )
        below = processes.descendants(command.pid)
        core_of(command)
        assert [path for path in folder.glob("dynamo-serve-*/*") if path.is_socket()]
        shared_files = processes.shared_files(below)
    finally:
        command.kill()

    assert len(below) >= 4
    eventually(
        lambda: not any(os.path.exists(f"/proc/{pid}") for pid in below),
        within_s=10,
        what=f"the end of {below}",
    )
    assert not [path for path in folder.iterdir() if path.name.startswith("dynamo-")]
    assert shared_files
    assert not [name for name in shared_files if os.path.exists(name)]
