"""`dynamo serve`, as a user meets it."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess

import httpx
import pytest
from deployment import Frontend, Process

import ports
from dynamo.cli import processes
from dynamo.launch import state
from waiting import PATIENT_S, eventually

MOCK = ("--engine", "mocker", "--worker-flags", "--speedup-ratio 1000")


def serve(deployment, port, *flags):
    """A `dynamo serve` that has said how to use it."""
    process = deployment.run("dynamo.cli", "serve", "--http-port", str(port), *flags)
    eventually(
        lambda: "curl " in process.log.read_text() or not process.is_running,
        what=f"ready; see {process.log}",
    )
    assert process.is_running, process.log.read_text()
    return process


def pids_of(process: Process) -> list[int]:
    line = re.search(r"pids +(.*)", process.log.read_text())
    assert line
    return [int(pid) for pid in re.findall(r"\d+(?=,|$)", line[1])]


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def last_line(process: Process) -> str:
    return process.log.read_text().strip().splitlines()[-1]


def test_printed_curl_line_works_and_ctrl_c_leaves_nothing(deployment):
    process = serve(deployment, ports.reserve())
    arguments = re.search(r"curl (.*?}')$", process.log.read_text(), re.DOTALL | re.MULTILINE)
    assert arguments
    answer = subprocess.run(
        f"curl -sS {arguments[1]}",
        shell=True,
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )
    story = json.loads(answer.stdout)["choices"][0]["message"]["content"]
    pids = pids_of(process)

    assert len(story) > 40
    assert len(pids) == 3

    process.signal(signal.SIGINT)

    assert process.exit_code() == 0
    assert not any(map(is_alive, pids))


def test_ctrl_c_says_how_many_requests_it_waits_for(deployment):
    flags = ("--engine", "mocker", "--worker-flags", "--speedup-ratio 0.1")
    process = serve(deployment, port := ports.reserve(), *flags)
    body = {"model": "storyteller", "prompt": "Once", "max_tokens": 1000, "stream": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENT_S) as answer:
        chunks = answer.iter_lines()
        next(chunks)
        process.signal(signal.SIGINT)
        eventually(
            lambda: process.log.read_text().count("stopping; running requests: 1,") >= 2,
            what="frontend and worker say it",
        )  # the answer itself would take a minute; its client leaves

    assert process.exit_code() == 0


def test_model_is_listed_stopped_and_its_log_shown_by_name(deployment, monkeypatch, capsys):
    monkeypatch.setenv("DYNAMO_HOME", deployment.environ["DYNAMO_HOME"])
    port = ports.reserve()
    process = serve(deployment, port, *MOCK, "--model-name", "org/My Model")
    processes.list_processes(processes.ProcessListConfig(verbose=True))
    listed = capsys.readouterr().out
    (served,) = state.running()
    pid_by_name = {each.name: each.pid for each in served.processes}
    os.kill(pid_by_name["worker 1"], signal.SIGKILL)
    eventually(
        lambda: state.find("My-Model").processes[-1].pid not in pid_by_name.values(),
        what="the worker that was started in its place is listed",
    )
    process.may_end = True

    assert [served.pid, *pid_by_name.values()] == pids_of(process)
    assert re.search(rf"My-Model +{process.pid} .* http://127.0.0.1:{port} +org/My Model", listed)
    assert f"DYN_FILE_KV={deployment.environ['DYN_FILE_KV']} " in listed
    assert "-m dynamo.mocker" in listed
    assert processes.stop(processes.StopConfig()) == 0
    assert process.exit_code() == 0
    assert state.running() == []
    capsys.readouterr()
    processes.show_logs(processes.LogsConfig(name="My-Model"))
    assert capsys.readouterr().out.endswith("dynamo: stopped\n")


def test_two_in_one_discovery_answer_by_their_own_workers(deployment):
    serve(deployment, ports.reserve(), *MOCK)
    port = ports.reserve()
    second = serve(deployment, port, *MOCK)
    health = lambda: httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENT_S).json()  # noqa: E731
    (line,) = re.findall(r"join +(.*)", second.log.read_text())

    assert "  namespace dynamo-2\n" in second.log.read_text()
    assert health()["endpoints"] == ["dyn://dynamo-2.backend.generate"]
    del deployment.environ["DYN_FILE_KV"]  # as in another terminal
    deployment.run_shell(line)
    eventually(lambda: len(health()["instances"]) == 2, what="the worker that joined")


def test_commands_are_printed_and_nothing_is_started(deployment):
    flags = ("--prefill", "1", "--frontend-flags", "--router-mode kv")
    printing = deployment.run("dynamo.cli", "serve", "--dry-run", *flags, *MOCK)
    printing.may_end = True

    assert printing.exit_code() == 0
    names = re.findall(r"^# (.*)", printing.log.read_text(), re.MULTILINE)
    assert names == ["frontend", "prefill worker 1", "decode worker 1"]
    assert "--disaggregation-mode prefill" in printing.log.read_text()
    assert re.search("dynamo.frontend .*--router-mode kv", printing.log.read_text())


def test_closed_terminal_ends_all_processes_in_order(deployment):
    process = serve(deployment, ports.reserve(), *MOCK)
    pids = pids_of(process)
    process.signal(signal.SIGHUP)

    assert process.exit_code() == 0
    assert last_line(process) == "dynamo: stopped"
    assert not any(map(is_alive, pids))


def test_no_child_survives_the_sudden_death_of_its_parent(deployment):
    process = serve(deployment, ports.reserve(), *MOCK)
    pids = pids_of(process)
    process.kill()

    eventually(lambda: not any(map(is_alive, pids)), what="all children are gone")


def test_port_in_use_is_one_sentence(deployment):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process = deployment.run("dynamo.cli", "serve", "--http-port", str(port), *MOCK)

        assert process.exit_code() == 2
        assert f"port {port} is in use" in last_line(process)


def test_crashed_worker_is_replaced(deployment):
    port = ports.reserve()
    process = serve(deployment, port, *MOCK)
    frontend_pid, worker_pid = pids_of(process)[1:]
    os.kill(worker_pid, signal.SIGKILL)
    eventually(
        lambda: "worker 1 was killed by SIGKILL" in process.log.read_text(),
        what="the death is reported",
    )
    probe = Frontend.__new__(Frontend)
    probe.url, probe.log = f"http://127.0.0.1:{port}", process.log
    eventually(lambda: probe.chat(max_tokens=2).status_code == 200, what="served again")

    assert is_alive(frontend_pid)


def test_crashed_frontend_is_replaced(deployment):
    port = ports.reserve()
    process = serve(deployment, port, *MOCK)
    frontend_pid, worker_pid = pids_of(process)[1:]
    os.kill(frontend_pid, signal.SIGKILL)
    probe = Frontend.__new__(Frontend)
    probe.url, probe.log = f"http://127.0.0.1:{port}", process.log

    def is_served():
        with contextlib.suppress(httpx.TransportError):
            return probe.chat(max_tokens=2).status_code == 200

    eventually(is_served, what="served again")

    assert "frontend was killed by SIGKILL" in process.log.read_text()
    assert is_alive(worker_pid)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serve", "/no/such/model"), "no such directory: /no/such/model"),
        (("serve", "nobody/no-such-model"), "not in the local cache"),
        (
            ("serve", "--device", "cuda"),
            "unrecognized argument: --device (did you mean --decode? Flags of the processes that this starts go into"
            " --worker-flags or --frontend-flags or --planner-flags)",
        ),
        (("serve", "--engine", "warp"), "native, mocker"),
        (
            ("serve", "--frontend-flags", "--router-mode best", "--http-port", "{port}"),
            "--router-mode",
        ),
        (("serve", "--worker-flags", "--no-such-flag", "--http-port", "{port}"), "--no-such-flag"),
    ],
)
def test_wrong_setting_is_one_sentence_at_once(deployment, arguments, expected):
    argv = [argument.format(port=ports.reserve()) for argument in arguments]
    process = deployment.run("dynamo.cli", *argv)

    assert process.exit_code() == 2
    assert expected in last_line(process)
    assert "Traceback" not in process.log.read_text()


def test_prefill_worker_computes_prompts(deployment):
    process = serve(
        deployment, ports.reserve(), "--prefill", "1", "--decode", "1",
        "--worker-flags", "--max-local-prefill-length 0",
    )  # fmt: skip
    url = re.search(r"answers at (\S+)", process.log.read_text())[1]
    eventually(lambda: "is connected" in process.log.read_text(), what="they know each other")
    body = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENT_S)
    pids = pids_of(process)
    process.signal(signal.SIGINT)

    assert answer.json()["usage"]["completion_tokens"] == 4
    assert "computed by 1 prefill worker, answers by 1 decode worker" in process.log.read_text()
    assert len(pids) == 4
    assert process.exit_code() == 0
    assert not any(map(is_alive, pids))
