"""Graphs of services, as `dynamo serve` starts them: each process is what was printed, and runs alone as well."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import httpx
import pytest
from deployment import eventually

import ports
import processes
from dynamo.cli import bench, top
from dynamo.cli import processes as processes_command
from dynamo.cli.processes import LogsConfig, ProcessListConfig, StopConfig
from waiting import PATIENT_S

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
TOKENS = "DYN_LAUNCH_TOKENS"
MOCKER = "--VllmWorker.ServiceArgs.module=dynamo.mocker"


@pytest.fixture
def home(deployment, tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def dynamo(deployment, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "dynamo.cli", *arguments],
        env=deployment.environ,
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def serve(deployment, folder, *arguments):
    served = deployment.run_in(EXAMPLES / folder, "dynamo.cli", "serve", *arguments)
    eventually(
        lambda: "answers at" in served.log.read_text() or not served.is_running,
        within_s=PATIENT_S,
        what="the graph answers",
    )
    assert served.is_running, served.log.read_text()
    return served


def states(home):
    return [json.loads(path.read_text()) for path in (home / "state").glob("*.json")]


def environment(pid):
    rows = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(row).split("=", 1) for row in rows if row)


def ask(port, content=None, **fields):
    body = {"json": fields} if content is None else {"content": content}
    try:
        return httpx.post(f"http://127.0.0.1:{port}/generate", **body, timeout=PATIENT_S)
    except httpx.TransportError as error:
        return httpx.Response(503, text=str(error))


def test_processes_of_a_graph_are_what_is_printed_and_restart(deployment, home, capsys):
    port = ports.reserve()
    before = dict(deployment.environ)
    served = serve(
        deployment, "hello_world", "hello_world:Frontend", "-f", "config.yaml",
        f"--Frontend.port={port}", "--Backend.message=end",
    )  # fmt: skip
    (state,) = states(home)
    pid_by_name = {process["name"]: process["pid"] for process in state["processes"]}
    shell = next(each["shell"] for each in state["processes"] if each["name"] == "Middle")
    processes_command.list_processes(ProcessListConfig(verbose=True))
    printed = capsys.readouterr().out
    script = f"{shell.partition(sys.executable)[0]} env -0"
    pasted = subprocess.run(
        ["bash", "-c", script], env=before, capture_output=True, timeout=PATIENT_S
    )
    alone = dict(os.fsdecode(row).split("=", 1) for row in pasted.stdout.split(b"\0") if row)
    process = environment(pid_by_name["Middle"])
    command = pathlib.Path(f"/proc/{pid_by_name['Middle']}/cmdline").read_bytes()
    lines = [f"Frontend: Middle: Backend: {word}" for word in ("test", "again-mid-end")]

    assert pid_by_name.keys() == {"Frontend", "Middle", "Backend 1", "Backend 2"}
    assert ask(port, text="test,again").text.splitlines() == lines
    assert ask(port, tex="test").status_code == 400
    assert ask(port, b'{"\xff"}').status_code == 400
    assert shell in printed
    shells_own = ("PWD", "OLDPWD", "SHLVL", "_", "PS1", TOKENS)
    assert {k: v for k, v in process.items() if k not in shells_own} == {
        k: v for k, v in alone.items() if k not in shells_own
    }
    assert shell.endswith(" ".join(os.fsdecode(word) for word in command.split(b"\0")[:-1]))
    assert os.readlink(f"/proc/{pid_by_name['Middle']}/cwd") == str(EXAMPLES / "hello_world")
    os.kill(pid_by_name["Middle"], signal.SIGKILL)
    eventually(
        lambda: ask(port, text="test,again").text.splitlines() == lines,
        within_s=PATIENT_S,
        what="Middle runs again",
    )
    below = processes.descendants(served.pid)
    served.may_end = True
    processes_command.stop(StopConfig(name=state["name"]))
    assert served.exit_code() == 0
    assert not states(home)
    processes_command.show_logs(LogsConfig(name=state["name"]))
    assert "Backend serves ['generate']" in capsys.readouterr().out
    assert not [pid for pid in below if pathlib.Path(f"/proc/{pid}/environ").exists()]


def test_printed_line_starts_one_more_worker_of_a_service(deployment, home):
    port = ports.reserve()
    served = serve(
        deployment, "hello_world", "hello_world:Frontend", "-f", "config.yaml",
        f"--Frontend.port={port}", "--Backend.ServiceArgs.workers=1", "--Middle.note=it's here",
    )  # fmt: skip
    printed = served.log.read_text()
    lines = [
        row.strip().removeprefix("one more  ") for row in printed.splitlines() if "--join" in row
    ]
    (line,) = [line for line in lines if "--service-name Backend" in line]
    bin_folder = pathlib.Path(sys.executable).parent
    environ = {
        name: value
        for name, value in deployment.environ.items()
        if name not in ("DYN_FILE_KV", "DYNAMO_HOME")
    } | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    deployment.environ = environ
    late = deployment.run_shell(f"{line} --Backend.message=late")

    def answers() -> set[str]:
        late.check()
        return {ask(port, text="test").text for _ in range(2)}

    eventually(lambda: len(answers()) == 2, within_s=PATIENT_S, what="both workers answer")

    assert len(lines) == 2  # Middle and Backend; the frontend has the port
    assert answers() == {f"Frontend: Middle: Backend: test-mid-{end}\n" for end in ("back", "late")}
    (first, second) = sorted(states(home), key=lambda state: state["started_at"])
    assert second["namespace"] == first["namespace"]
    assert [process["name"] for process in second["processes"]] == ["Backend"]


def test_planner_of_a_graph_starts_its_workers(deployment, home, tmp_path):
    deployment.environ["DYN_WORKER_WAIT_SECS"] = str(PATIENT_S)
    port = ports.reserve()
    config = tmp_path / "planner.yaml"
    config.write_text(
        f"Frontend: {{port: {port}, served_model_name: mock}}\n"
        "VllmWorker: {ServiceArgs: {workers: 0, module: dynamo.mocker}}\n"
        "Planner: {environment: local, no-operation: false, planner-port: 0, adjustment-interval: 0.5}\n"
    )
    served = serve(deployment, "llm", "graphs.agg_planner:Frontend", "-f", str(config))
    url = f"http://127.0.0.1:{port}"
    body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENT_S)

    def present():
        page = httpx.get(f"{url}/console/api/planner", timeout=PATIENT_S).json()
        return [planner["decisions"][0]["present"] for planner in page["planners"]]

    eventually(lambda: present() == [{"prefill": 0, "decode": 1}], what="the planner's one worker")
    below = processes.descendants(served.pid)
    served.signal(signal.SIGTERM)

    assert answer.json()["usage"]["completion_tokens"] == 3
    assert served.exit_code() == 0
    assert not [pid for pid in below if pathlib.Path(f"/proc/{pid}/environ").exists()]


def test_graph_of_a_language_model_answers_at_its_port(deployment, home, tmp_path, capsys):
    port = ports.reserve()
    config = tmp_path / "agg.yaml"
    config.write_text(f"Frontend: {{port: {port}, served_model_name: mock}}\nVllmWorker: {{}}\n")
    printed = dynamo(
        deployment, "serve", "graphs.agg:Frontend", "-f", str(config), "--dry-run", MOCKER,
        "--working-dir", str(EXAMPLES / "llm"),
    )  # fmt: skip
    serve(deployment, "llm", "graphs.agg:Frontend", "-f", str(config), MOCKER)
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    address = f"http://127.0.0.1:{port}"
    options = bench.BenchConfig(url=address, requests=3, max_tokens=3, json=True)
    exit_code = bench.run(options)
    report = json.loads(capsys.readouterr().out)
    failed_code = bench.run(bench.BenchConfig(url=address, requests=1, model="nope", json=True))
    failed = json.loads(capsys.readouterr().out)
    top.run(top.TopConfig(url=address, interval=0.1, once=True))

    assert "# Processor runs inside Frontend" in printed
    assert "-m dynamo.mocker --model-name mock" in printed
    assert httpx.post(url, json=body, timeout=PATIENT_S).json()["usage"]["completion_tokens"] == 3
    assert (exit_code, report["requests"], report["failed"]) == (0, 3, 0)
    assert report["ttft_ms_p50"] > 0
    assert failed_code == 1
    assert "The model 'nope' does not exist" in failed["first_error"]
    assert "mock" in capsys.readouterr().out


HELD_SERVICE = """
import asyncio
import pathlib
from dynamo.sdk import api, async_on_start, endpoint, service

async def file_is_there(name):
    while not pathlib.Path(name).exists():
        await asyncio.sleep(0.01)

@service
class Held:
    @async_on_start
    async def prepare(self):
        await file_is_there("may-start")

    @endpoint()
    async def ask(self, request: str):
        yield request

    @api
    async def generate(self, text: str):
        yield f"{text}: begun, "
        await file_is_there("may-end")
        yield "ended"
"""


def test_service_is_ready_when_it_is_listed_and_ends_when_its_answers_have(deployment, tmp_path):
    def status():
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENT_S).status_code
        except httpx.TransportError:
            return None

    (tmp_path / "held.py").write_text(HELD_SERVICE)
    port = ports.reserve()
    deployment.environ["DYNAMO_SERVICE_CONFIG"] = json.dumps({"Held": {"port": port}})
    served = deployment.run_in(tmp_path, "dynamo.sdk", "held:Held")
    eventually(lambda: status() == 503, what="it starts")
    early = ask(port, text="early")
    (tmp_path / "may-start").touch()
    eventually(lambda: status() == 200, what="it is listed")
    url, body = f"http://127.0.0.1:{port}/generate", {"text": "a"}
    with httpx.stream("POST", url, json=body, timeout=PATIENT_S) as answer:
        pieces = answer.iter_text()
        first = next(pieces)
        served.may_end = True
        served.signal(signal.SIGTERM)
        eventually(lambda: status() == 503, what="it drains")
        (tmp_path / "may-end").touch()
        rest = "".join(pieces)

    assert (early.status_code, early.json()["error"]["message"][:16]) == (503, "this service is ")
    assert (first, rest) == ("a: begun, ", "ended")
    assert served.exit_code() == 0
    assert "stopping; running requests: " in served.log.read_text()


def test_service_without_api_tells_its_health_at_the_system_port(deployment):
    port = ports.reserve()
    deployment.environ["DYN_SYSTEM_PORT"] = str(port)
    deployment.run_in(
        EXAMPLES / "hello_world", "dynamo.sdk", "hello_world:Frontend", "--service-name", "Backend"
    )

    def answer(path):
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=PATIENT_S).status_code
        except httpx.TransportError:
            return None

    eventually(lambda: answer("/health") == 200, what="it is listed")
    assert answer("/live") == 200
    assert answer("/generate") == 404
