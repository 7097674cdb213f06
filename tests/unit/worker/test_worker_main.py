"""A worker process, by its exit code."""

import asyncio
import dataclasses
import importlib.util
import shutil
import sys
import threading

import httpx
import msgspec
import pytest

from dynamo.base import errors
from dynamo.engine.mock.answers import TokenCycle
from dynamo.engine.mock.engine import MockEngine
from dynamo.engine.mock.settings import MockConfig
from dynamo.protocols import generate, instances
from dynamo.runtime import component, reachability
from dynamo.worker import engines, main, model_source, settings
from waiting import PATIENT_S


@pytest.fixture
def run(monkeypatch):
    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["mocker", *argv])
        return main.main("mocker")

    return run


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--no-such-flag"], "unrecognized argument: --no-such-flag (see --help)"),
        (
            ["--system-port", "70000"],
            "--system-port: expected a whole number up to 65535, or a range of ports like 7000-7099, got '70000'",
        ),
        (
            ["--tcp-rpc-port", "-1"],
            "--tcp-rpc-port: expected a whole number up to 65535, or a range of ports like 7000-7099, got '-1'",
        ),
        (["--engine-request-limit", "0"], "--engine-request-limit: expected at least 1, got 0"),
    ],
)
def test_configuration_error_is_one_sentence_and_exit_code_2(run, capsys, argv, says):
    assert run(*argv) == 2
    assert capsys.readouterr().err == f"python -m dynamo.mocker: {says}\n"


def test_flag_of_another_process_ends_a_vllm_worker_before_a_model_is_looked_for(
    monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["vllm", "--model", "no/such", "--router-mode", "kv"])

    assert main.main("vllm") == 2
    assert "unrecognized argument: --router-mode" in capsys.readouterr().err
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("name", ["native", "vllm", "sglang", "trtllm", "llamacpp"])
def test_missing_package_is_named_before_a_model_is_downloaded(monkeypatch, capsys, name):
    package = engines.KIND_BY_NAME[name].requires
    find_spec, import_module = importlib.util.find_spec, importlib.import_module

    def fail(module):
        if module.startswith(("dynamo.engine.native.engine", package)):
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return import_module(module)

    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module == package else find_spec(module)
    )
    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setattr(model_source, "resolve", lambda *_, **__: pytest.fail("a download"))
    monkeypatch.setattr(sys, "argv", [name, "--model", "org/large"])

    assert main.main(name) == 2
    error = capsys.readouterr().err
    assert f"needs {package}, which is not installed: make setup EXTRAS={name}" in error


@pytest.mark.parametrize("name", engines.KIND_BY_NAME)
def test_help_of_every_worker_names_every_engine(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit):
        main.main(name)
    shown = capsys.readouterr().out

    assert all(f"dynamo.{engine}" in shown for engine in engines.KIND_BY_NAME)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (errors.EngineFailed("out of memory"), 1),
        (ZeroDivisionError(), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_engine_failure_and_bug_exit_with_1(run, monkeypatch, failure, expected):
    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(model_source, "resolve", fail)

    assert run() == expected


def test_worker_ends_though_its_engine_hangs_in_a_thread(run, monkeypatch):
    may_end, has_ended = threading.Event(), threading.Event()

    def hang():
        may_end.wait(PATIENT_S)
        has_ended.set()

    async def serve(*_):
        asyncio.get_running_loop().run_in_executor(None, hang)
        raise errors.EngineFailed("it did not answer a token")

    monkeypatch.setattr(main, "_serve", serve)
    exit_code, has_waited = run(), has_ended.is_set()
    may_end.set()

    assert (exit_code, has_waited) == (1, False)


def test_model_with_an_invalid_chat_template_is_refused(run, capsys, tmp_path):
    directory = shutil.copytree(model_source.built_in(), tmp_path / "model")
    (directory / "chat_template.jinja").write_text("{% if %}")
    memory = ("--discovery-backend=mem", "--request-plane=memory", "--event-plane=memory")

    assert run("--model", str(directory), *memory) == 2
    assert "the chat template is no valid template" in capsys.readouterr().err


def test_template_of_the_flag_that_cannot_be_read_is_refused(run, capsys):
    memory = ("--discovery-backend=mem", "--request-plane=memory", "--event-plane=memory")

    assert run("--custom-jinja-template", "/no/such.jinja", *memory) == 2
    assert "--custom-jinja-template /no/such.jinja: expected a file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]", "{", "enable_thinking=false"])
def test_variables_of_the_template_that_are_no_object_are_refused(run, capsys, text):
    assert run("--default-chat-template-kwargs", text) == 2
    assert "--default-chat-template-kwargs: expected a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 409),
        ({"is_prefill_worker": True}, 409),
        ({"is_prefill_worker": True, "prefill_queue": "queue"}, 404),
    ],
)
async def test_worker_that_takes_from_a_queue_cannot_sleep(fields, status):
    """409: not before it is ready."""
    engine = MockEngine(MockConfig(), cycle=TokenCycle((1, 2)), context_length=64)
    async with await component.DistributedRuntime.in_memory(
        component.MemoryCluster(), item_type=generate.Output
    ) as runtime:
        worker = settings.WorkerConfig(**fields)
        made = main.make_host(worker, engine, runtime, model_source.built_in())
        port = await made.system_port.start("127.0.0.1", 0)
        async with httpx.AsyncClient(timeout=PATIENT_S) as client:
            answer = await client.post(f"http://127.0.0.1:{port}/engine/sleep")
        await made.stop(0)

    assert answer.status_code == status


@pytest.mark.parametrize(("fields", "num_announced"), [({}, 1), ({"is_prefill_worker": True}, 0)])
async def test_start_of_a_worker_that_answers_is_announced_until_it_serves(fields, num_announced):
    worker = settings.WorkerConfig(model_name="m", start_estimate_s=7.0, **fields)
    async with await component.DistributedRuntime.in_memory(
        component.MemoryCluster(), item_type=generate.Output
    ) as runtime:
        async with main._announced_start(runtime, worker):
            during = await runtime.discovery.get_prefix(instances.STARTS)
        after = await runtime.discovery.get_prefix(instances.STARTS)
    starts = [msgspec.json.decode(value, type=instances.WorkerStart) for value in during.values()]

    assert [(start.model, start.estimate_s) for start in starts] == [("m", 7.0)] * num_announced
    assert not after


@pytest.mark.parametrize(
    ("fields", "is_exporting"), [({}, False), ({"is_prefill_worker": True}, True)]
)
def test_kv_blocks_are_exported_at_the_address_at_which_requests_are_reached(
    run, monkeypatch, fields, is_exporting
):
    """Both are settings of their own, of which the host's address is one."""
    asked = []

    def give_address(worker, _environ, *, exports_blocks):
        asked.append(exports_blocks)
        return dataclasses.replace(worker, tcp_rpc_host="10.77.0.3")

    def end(_name, _directory, engine_settings, *_):
        raise errors.ConfigError(f"the engine has {engine_settings.tcp_rpc_host}")

    monkeypatch.setattr(reachability, "with_reachable_host", give_address)
    monkeypatch.setattr(engines, "build_all", end)
    flags = [f"--{name.replace('_', '-')}" for name in fields]

    assert run(*flags) == 2
    assert asked == [is_exporting]
