"""The lines that `dynamo serve` of a graph prints for one more process of a service."""

import asyncio
import dataclasses
import os
import pathlib
import shlex
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dynamo.base import errors
from dynamo.cli import graph
from dynamo.launch import allocation, guard, state
from dynamo.sdk import commands, settings
from waiting import PATIENT_S


def command(service, *devices, number=1):
    return commands.ServiceCommand(
        name=f"{service} {number}",
        service=service,
        num_devices=len(devices),
        pod_requests={},
        argv=(sys.executable,),
        directory="/",
        environ={},
        resources=allocation.Allocation(devices=devices),
    )


def lines(*planned, devices=(), **options):
    plan = commands.GraphPlan(commands=planned, notes=())
    chosen = graph.GraphConfig(target="m:Root", **options)
    machine = allocation.Allocation(devices=devices)
    return [shlex.split(line) for line in graph.join_lines(chosen, plan, machine, "n-2", "Root")]


@pytest.fixture
def bare(monkeypatch):
    for name in ("DYNAMO_HOME", "DYNAMO_SERVICE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


HELLO = pathlib.Path(__file__).parents[3] / "examples" / "hello_world"


def serve_hello(*overrides, **options):
    return graph.run(
        graph.GraphConfig(
            target="hello_world:Frontend", working_dir=str(HELLO), overrides=overrides, **options
        )
    )


@pytest.mark.parametrize("port", ["x", "0", "70000", "1.5"])
def test_port_that_is_none_is_named_before_anything_starts(bare, tmp_path, monkeypatch, port):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    for dry_run in (False, True):
        with pytest.raises(errors.ConfigError, match=r"Frontend\.port: expected 1 to 65535, got "):
            serve_hello(f"--Frontend.port={port}", dry_run=dry_run)


@pytest.mark.parametrize("namespace", ["a b", "Demo"])
def test_namespace_that_no_endpoint_can_have_is_named(bare, tmp_path, monkeypatch, namespace):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    with pytest.raises(errors.ConfigError, match=rf"expected a name of a-z, .* got '{namespace}'"):
        serve_hello(namespace=namespace)


def test_namespace_that_is_not_the_joined_one_is_named(listed, capsys):
    listed.update(namespace="a")
    with pytest.raises(errors.ConfigError, match=r"--namespace: .* or a, which leaves has, got b"):
        serve_hello(namespace="b", join="leaves", dry_run=True)

    assert serve_hello(namespace="a", join="leaves", dry_run=True) == 0
    assert "DYN_NAMESPACE=a" in capsys.readouterr().out


def test_namespaces_that_are_not_used_are_said(bare, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    other = "--Backend.ServiceArgs.dynamo.namespace=other"
    note = "# namespaces inference, other: all services are in the first"

    assert serve_hello(other, dry_run=True) == 0
    assert note in capsys.readouterr().out
    assert serve_hello(other, namespace="inference", dry_run=True) == 0
    assert note not in capsys.readouterr().out


def test_port_in_use_is_named_with_the_flag_of_the_graph(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.ConfigError, match=r"or choose --Frontend\.port=\.\.\."):
            serve_hello(f"--Frontend.port={port}")


def test_several_processes_for_one_port_are_refused(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    with pytest.raises(
        errors.ConfigError, match=r"Frontend\.ServiceArgs\.workers: .* port 8000, got 2"
    ):
        serve_hello("--Frontend.ServiceArgs.workers=2", dry_run=True)


def address_of_frontend(*flags):
    """Return the address of a graph that begins with our frontend, which has these flags."""
    root = SimpleNamespace(name="Root", module="dynamo.frontend")
    plan = commands.GraphPlan(
        commands=(dataclasses.replace(command("Root"), argv=("python", *flags)),), notes=()
    )
    loaded = graph.LoadedGraph(
        specs=[root], values=settings.ServiceConfig(), directory=pathlib.Path(), notes=()
    )
    address = loaded.address_in(plan)
    return address.http_host, address.http_port


def port_of_frontend(*flags):
    _, port = address_of_frontend(*flags)
    return port


@pytest.mark.parametrize("words", [("--http-port", "9001"), ("--http-port=9001",)])
def test_frontend_of_a_graph_is_asked_at_the_port_of_its_last_flag(bare, words):
    assert port_of_frontend("--http-port", "8000", "--router-mode", "kv", *words) == 9001


def test_frontend_of_a_graph_is_asked_at_its_own_host(bare, monkeypatch):
    by_flag = address_of_frontend("--http-host", "192.0.2.7")
    monkeypatch.setenv("DYN_HTTP_HOST", "192.0.2.8")

    assert by_flag == ("192.0.2.7", 8000)
    assert address_of_frontend() == ("192.0.2.8", 8000)


def test_class_that_listens_elsewhere_is_looked_for_there(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.ConfigError, match=f"port {port} is in use"):
            serve_hello("--Frontend.host=127.0.0.2", f"--Frontend.port={port}")


def test_frontend_of_a_graph_without_a_port_is_asked_at_that_of_the_environment(bare, monkeypatch):
    before = port_of_frontend()
    monkeypatch.setenv("DYN_HTTP_PORT", "9002")

    assert (before, port_of_frontend()) == (8000, 9002)


def test_frontend_of_a_graph_with_tls_is_refused_before_anything_starts(bare):
    with pytest.raises(errors.ConfigError, match="--tls-cert-path: dynamo serve asks its frontend"):
        port_of_frontend("--tls-cert-path", "cert.pem")


def test_service_without_a_process_is_refused(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    with pytest.raises(errors.ConfigError, match="nothing to start: Backend starts no process"):
        serve_hello("--Backend.ServiceArgs.workers=0", service_name="Backend")


def test_service_that_the_graph_lacks_is_named(bare, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    (tmp_path / "all.yaml").write_text("Backend: {message: end}\nPlanner: {x: 1}\n")
    from_file = {"file": str(tmp_path / "all.yaml"), "dry_run": True}
    for word in ("--Bakend.message=x", "--Planner.x=2"):
        with pytest.raises(errors.ConfigError, match="command line: no service is called"):
            serve_hello(word, **from_file)
    serve_hello(**from_file)

    assert "all.yaml: this graph has no service Planner" in capsys.readouterr().out


def test_line_repeats_what_the_graph_was_started_with(bare):
    (line,) = lines(
        command("Root"),
        command("Leaf"),
        command("Leaf", number=2),
        file="my file.yaml",
        working_dir="../a b",
        overrides=("--Leaf.message=it's here",),
    )

    assert line == [
        *("cd", os.getcwd(), "&&", "dynamo", "serve", "m:Root"),
        *("--service-name", "Leaf", "--join", "n-2", "-f", "my file.yaml"),
        *("--working-dir", "../a b", "--Leaf.message=it's here", "--Leaf.ServiceArgs.workers=1"),
    ]


def test_line_has_the_variables_that_the_command_was_started_with(bare, monkeypatch):
    monkeypatch.setenv("DYNAMO_HOME", "/h")
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", '{"Leaf": {}}')

    assert lines(command("Leaf"))[0][3:5] == [
        "DYNAMO_HOME=/h",
        'DYNAMO_SERVICE_CONFIG={"Leaf": {}}',
    ]
    assert lines(command("Leaf"), file="f.yaml")[0][3:5] == ["DYNAMO_HOME=/h", "dynamo"]


def test_one_more_worker_gets_a_free_gpu_or_no_line(bare):
    planned = command("Small", "0"), command("Large", "1", "2")
    (line,) = lines(*planned, devices=("0", "1", "2", "3"))

    assert line[3:8] == ["CUDA_VISIBLE_DEVICES=3", "dynamo", "serve", "m:Root", "--service-name"]
    assert lines(*planned, devices=("0", "1", "2")) == []


def test_line_of_a_joined_service_names_its_number_of_workers_once(bare):
    flag = "--Leaf.ServiceArgs.workers=1"
    (line,) = lines(command("Leaf"), overrides=("--Leaf.seed=7", flag), join="n")

    assert line[-2:] == ["--Leaf.seed=7", flag]


FOREVER = "import signal; signal.pause()"


@pytest.fixture
def listed(bare, tmp_path, monkeypatch):
    """The registration of a `dynamo serve` of a graph, which another test process may join."""
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    with state.registered("leaves", "m:Root") as registration:
        yield registration


@pytest.mark.parametrize(
    ("argv", "environ", "drain_s"),
    [
        (("-m", "dynamo.vllm"), {}, 30),
        (("-m", "dynamo.vllm", "--graceful-shutdown-timeout", "90"), {}, 90),
        (("-m", "dynamo.sdk", "m:Root"), {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "600"}, 600),
    ],
)
def test_processes_of_a_graph_are_not_killed_while_they_may_drain(listed, argv, environ, drain_s):
    planned = (
        dataclasses.replace(command("Leaf"), argv=(sys.executable, *argv), environ=environ),
        dataclasses.replace(command("Root"), argv=(sys.executable, "-m", "dynamo.frontend")),
    )
    plan = commands.GraphPlan(commands=planned, notes=())
    graph._Serving(graph.GraphConfig(target="m:Root"), plan, listed, None, None)

    assert listed.state.stop_timeout_s == drain_s + 5
    assert state.find("leaves").stop_timeout_s == drain_s + 5  # for `dynamo stop`


async def test_graph_ends_when_the_one_that_it_joined_has_ended(listed, capsys):
    other = subprocess.Popen([sys.executable, "-S", "-c", FOREVER])
    with state.registered("main", "m:Root") as main, guard.Guard() as guardian:
        main.update(pid=other.pid, process_start=state.process_start(other.pid))
        leaf = dataclasses.replace(command("Leaf"), argv=(sys.executable, "-S", "-c", FOREVER))
        serving = graph._Serving(
            graph.GraphConfig(target="m:Root", join="main"),
            commands.GraphPlan(commands=(leaf,), notes=()),
            listed,
            None,
            guardian,
            state.find("main"),
        )
        running = asyncio.ensure_future(serving.run(SimpleNamespace(name="Root", module=None)))
        try:
            async with asyncio.timeout(PATIENT_S):
                while not listed.state.processes:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            assert not running.done()
        finally:
            other.kill()
            other.wait()
        async with asyncio.timeout(PATIENT_S):
            exit_code = await running

    assert exit_code == 0
    assert (
        "stopped: main, the `dynamo serve` that this one joined, has ended\n"
        in capsys.readouterr().err
    )
