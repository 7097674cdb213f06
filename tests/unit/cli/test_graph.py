"""The lines that `dynamo serve` of a graph prints for one more process of a service."""

import os
import shlex
import sys

import pytest

from dynamo.cli import graph
from dynamo.launch import allocation
from dynamo.sdk import commands


def command(service, *devices, number=1):
    return commands.ServiceCommand(
        name=f"{service} {number}",
        service=service,
        num_devices=len(devices),
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
