"""A worker with real vLLM, as users start it: what an operator sees of it, and how it ends."""

import importlib.util
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import time

import httpx
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

from deployment import Frontend, Process, Worker

import ports
import processes
import vllm_models
import worker_families
from vllm_engine import ENVIRONMENT, FLAGS
from waiting import PATIENT_S, eventually

pytestmark = pytest.mark.system
START_S = 400.0


@pytest.fixture
def worker(tmp_path):
    environ = os.environ | ENVIRONMENT
    environ |= {"DYN_FILE_KV": str(tmp_path / "discovery"), "DYN_LOGGING_JSONL": "1"}
    flags = ("--model", str(vllm_models.make(tmp_path / "model")), "--served-model-name", "tiny")
    made = Worker("vllm", environ, tmp_path / "vllm.log", *flags, *FLAGS.split())
    eventually(lambda: is_ready(made), within_s=START_S, what=f"ready, see {made.log}")
    yield made
    made.end()


def is_ready(worker):
    worker.check()
    try:
        return httpx.get(f"{worker.url}/health", timeout=PATIENT_S).status_code == 200
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
        within_s=PATIENT_S,
        what=f"the end of {pids}",
    )


def test_a_worker_exports_vllms_metrics_and_ends_with_its_engine(worker):
    shown = worker.metrics()
    below = processes.descendants(worker.pid)
    worker.may_end = True
    os.kill(core_of(worker), signal.SIGKILL)

    worker_families.check(shown)
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in shown
    assert "dynamo_component_kvstats_total_blocks 24.0" in shown
    assert "python_info" not in shown
    assert worker.exit_code() == 1
    assert "vLLM's engine process died" in worker.log.read_text()
    await_gone(below)


def test_worker_that_is_interrupted_with_its_group_finishes_its_streams(worker, tmp_path):
    environ = os.environ | {"DYN_FILE_KV": str(tmp_path / "discovery")}
    frontend = Frontend(ports.reserve(), environ, tmp_path / "frontend.log")
    try:
        frontend.await_models(["tiny"])
        body = {"model": "tiny", "nvext": {"ignore_eos": True}, "max_tokens": 300}
        with frontend.stream(**body) as lines:
            first = next(lines)
            group = [
                pid
                for pid in (worker.pid, *processes.descendants(worker.pid))
                if os.getpgid(pid) == os.getpgid(worker.pid)
            ]
            engine = core_of(worker)
            worker.may_end = True
            for pid in group:  # as a terminal does
                os.kill(pid, signal.SIGINT)
            rest = list(lines)
        code = worker.exit_code()
    finally:
        frontend.end()
    log = worker.log.read_text()
    rows = [json.loads(line) for line in log.splitlines()]

    assert engine not in group
    assert "error" not in "".join((first, *rest[:-1]))
    assert '"finish_reason":"length"' in "".join(rest)
    assert code == 0
    assert "Traceback" not in log
    assert "force killing" not in log
    assert {row["target"].partition(".")[0] for row in rows} >= {"dynamo", "vllm"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", row["time"]) for row in rows)
    story = "Prefilling locally for request ", "Added request "
    assert all(any(row["message"].startswith(line) for row in rows) for line in story)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs NIXL")
def test_idle_worker_with_nixl_takes_little_of_a_core(worker):
    pids = {worker.pid, *processes.descendants(worker.pid)}
    before = cpu_s(pids)
    time.sleep(5)  # a share of CPU is over a time

    assert "NixlConnector" in worker.log.read_text()
    assert (cpu_s(pids) - before) / 5 < 0.25  # without the pause more than 0.9


def cpu_s(pids):
    """The seconds of CPU that these processes have taken."""
    ticks = 0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


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
        what=f"the end of {below}",
    )
    assert not [path for path in folder.iterdir() if path.name.startswith("dynamo-")]
    assert shared_files
    assert not [name for name in shared_files if os.path.exists(name)]
