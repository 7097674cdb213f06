"""What `dynamo serve` prints."""

import asyncio
import io
import json
import shlex
import sys
import threading
import types
from unittest import mock

import pytest

from dynamo.base import errors
from dynamo.cli import batch, serve, serve_models, waiting
from dynamo.launch import children, state
from dynamo.runtime import listening
from dynamo.worker import engines
from waiting import PATIENT_S


def test_the_curl_line_is_one_command_with_a_valid_body(tmp_path):
    words = shlex.split(serve.curl_line("http://127.0.0.1:8000", "it's a model", tmp_path))
    body = json.loads(words[-1])

    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert body["model"] == "it's a model"
    assert body["messages"] == [{"role": "user", "content": serve.PROMPT}]


def test_the_curl_line_of_a_model_for_embeddings_asks_for_a_vector(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    words = shlex.split(serve.curl_line("http://127.0.0.1:8000", "vectors", tmp_path))

    assert words[1] == "http://127.0.0.1:8000/v1/embeddings"
    assert json.loads(words[-1]) == {"model": "vectors", "input": serve.PROMPT}


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("[::1]", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("[::]", "http://[::1]:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
    ],
)
def test_address_may_have_brackets(host, url):
    assert serve.ServeConfig(http_host=host).url == url
    serve.check_port(serve.ServeConfig(http_host=host).http_host, 0)


class Clock:
    """Time that the test moves."""

    time_s = 100.0

    def now(self):
        return self.time_s


async def answer(body, status_by_path=None):
    async def serve(reader, writer):
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        status = (status_by_path or {}).get(path, 200)
        writer.write(b"HTTP/1.0 %d X\r\n\r\n" % status + body)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"data": [{"id": "n"}, {"id": "m"}]}', True),
        (b'{"data": [{"id": "n"}]}', False),  # "m" may come a moment later
        (b'{"data": []}', False),
        (b'{"data": 1}', False),
        (b"no json", False),
    ],
)
async def test_models_are_ready_when_the_frontend_lists_them_all(body, expected):
    server, port = await answer(body)
    async with server:
        assert await serve.lists_models("127.0.0.1", port, ["m", "n"]) is expected


@pytest.mark.parametrize(("body", "expected"), [(b'[{"id": "m"}]', True), (b"[]", False)])
async def test_frontend_of_any_model_is_ready_when_it_lists_one(body, expected):
    server, port = await answer(b'{"data": %b}' % body)
    async with server:
        assert await serve.lists_models("127.0.0.1", port, ()) is expected


@pytest.mark.parametrize(("health", "expected"), [(200, True), (503, False)])
async def test_frontend_with_api_keys_is_ready_when_it_is_healthy(health, expected):
    refusal = b'{"error": {"code": "invalid_api_key"}}'
    server, port = await answer(refusal, {"/v1/models": 401, "/health": health})
    async with server:
        assert await serve.lists_models("127.0.0.1", port, ["m"]) is expected
        assert await serve.lists_models("127.0.0.1", port, ["m"], need_workers=False)


async def test_address_without_a_server_lists_no_model(unused_tcp_port):
    assert not await serve.lists_models("127.0.0.1", unused_tcp_port, ["m"])


@pytest.mark.parametrize("models", [(), ("a", "b")])
@pytest.mark.parametrize("name", ["--tls-cert-path", "DYN_TLS_CERT_PATH"])
def test_frontend_with_tls_is_refused_before_anything_starts(monkeypatch, models, name):
    """It serves, but never looks ready to the command, which asks over HTTP."""
    flags = f"{name}=cert.pem --tls-key-path=key.pem" if name.startswith("--") else ""
    monkeypatch.setenv(name, "cert.pem" if not flags else "")
    options = serve.ServeConfig(models=models, engine="mocker", frontend_flags=flags)
    with pytest.raises(errors.ConfigError, match=f"{name}: dynamo serve asks its frontend over"):
        serve_models.serve_any(options)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"pin": ("storyteller",)}, "--pin"),
        ({"memory_budget_gb": 0.0}, "--memory-budget-gb"),
        ({"idle_minutes": 1.0}, "--idle-minutes"),
    ],
)
def test_options_of_several_models_are_refused_with_one(options, flag):
    with pytest.raises(errors.ConfigError, match=f"{flag}: expected several models, got one"):
        serve.serve(serve.ServeConfig(engine="mocker", dry_run=True, **options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"planner_flags": "--ttft 300"}, "--planner-flags: has no effect without --planner"),
        ({"planner_max_workers": 8}, "--planner-max-workers: has no effect without --planner"),
        ({"planner_min_workers": 0}, "--planner-min-workers: has no effect without --planner"),
        ({"planner": True, "workers": 2}, "--workers: has no effect with --planner"),
        (
            {"planner": True, "planner_min_workers": 5},
            "--planner-min-workers 5: expected at most --planner-max-workers 4",
        ),
    ],
)
def test_flag_that_would_have_no_effect_is_refused(options, says):
    with pytest.raises(errors.ConfigError, match=says):
        serve.serve(serve.ServeConfig(engine="mocker", dry_run=True, **options))


@pytest.mark.parametrize("models", [(), ("a", "b")])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"frontend_flags": "--router-mode kv --http-port 9000"}, "--frontend-flags: --http-port"),
        ({"frontend_flags": "--http-host=::"}, "--frontend-flags: --http-host"),
        ({"worker_flags": "--served-model-name x"}, "--worker-flags: --served-model-name"),
        ({"worker_flags": "--model-name=x"}, "--worker-flags: --model-name"),
        ({"worker_flags": "--model /m"}, "--worker-flags: --model"),
    ],
)
def test_flag_that_the_command_sets_itself_is_refused(models, options, says):
    """It would wait for the other port or name in vain."""
    chosen = serve.ServeConfig(models=models, engine="mocker", dry_run=not models, **options)
    with pytest.raises(errors.ConfigError, match=f"{says}: is set by `dynamo serve` itself"):
        serve_models.serve_any(chosen)


def test_port_of_the_planner_is_none_that_connections_take(monkeypatch, tmp_path, capsys):
    """The planner listens there seconds later, and again after a restart."""
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    serve.serve(serve.ServeConfig(engine="mocker", planner=True, dry_run=True))
    words = shlex.split(capsys.readouterr().out, comments=True)
    port = int(words[words.index("--planner-port") + 1])

    assert port in listening.PORT_RANGE


def test_banner_has_the_limits_and_the_address_that_flags_of_the_planner_set(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    flags = "--planner-host ::1 --planner-port 9321 --min-endpoint=0 --max-workers 3"
    chosen = serve.ServeConfig(engine="mocker", planner=True, planner_flags=flags)
    with state.registered("m", "m") as registration:
        serving = serve._Serving(chosen, engines.find_model("mocker", None), registration, None)

        assert serving._describe_workers() == (
            "0 to 3, by load; the first request starts one;"
            " decisions at http://[::1]:9321/planner/decisions"
        )


@pytest.mark.parametrize(("has_planner", "num_lines"), [(False, 1), (True, 0)])
def test_banner_has_a_line_to_join_by_where_no_planner_counts_the_workers(
    has_planner, num_lines, monkeypatch, tmp_path
):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    chosen = serve.ServeConfig(engine="mocker", planner=has_planner)
    with state.registered("m", "m") as registration:
        serving = serve._Serving(chosen, engines.find_model("mocker", None), registration, None)

        assert serving._banner().count("  join  ") == num_lines


def test_option_of_a_planners_file_that_the_command_sets_itself_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))

    def plan(**content):
        more = content.pop("more", "")
        flags = f"--config {shlex.quote(json.dumps(content))} {more}"
        chosen = serve.ServeConfig(engine="mocker", planner=True, planner_flags=flags)
        with state.registered("m", "m") as registration:
            directory = engines.find_model("mocker", None)
            return serve._Serving(chosen, directory, registration, None)._planner[1]

    assert plan(ttft=300, mode="agg").ttft == "300"
    assert plan(adjustment_interval=30, more="--adjustment-interval=5").adjustment_interval == 5
    with pytest.raises(errors.ConfigError, match="--config: adjustment_interval: has no effect"):
        plan(adjustment_interval=30)


@pytest.mark.parametrize("flags", ["--tft 300", "--planner-port x", "--ttft"])
def test_flag_that_the_planner_does_not_take_is_said_before_anything_starts(flags):
    chosen = serve.ServeConfig(engine="mocker", planner=True, dry_run=True, planner_flags=flags)
    with pytest.raises(errors.ConfigError, match=f"--planner-flags: .*{flags.split()[0]}"):
        serve.serve(chosen)


@pytest.mark.parametrize(
    ("options", "variables", "drain_s"),
    [
        ({}, {}, 30),
        ({"worker_flags": "--graceful-shutdown-timeout 90"}, {}, 90),
        ({"frontend_flags": "--http-graceful-shutdown-timeout-secs 80"}, {}, 80),
        ({}, {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "0.5"}, 5),  # that of the frontend
        # the planner waits for its workers
        ({"planner": True, "worker_flags": "--graceful-shutdown-timeout 90"}, {}, 95),
        ({"planner": True}, {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "600"}, 605),
    ],
)
def test_stop_takes_as_long_as_the_slowest_process_may(
    monkeypatch, tmp_path, options, variables, drain_s
):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    chosen = serve.ServeConfig(engine="mocker", **options)
    directory = engines.find_model("mocker", None)
    with state.registered("m", "m") as registration:
        serve._Serving(chosen, directory, registration, None)

        assert state.find("m").stop_timeout_s == drain_s + 5


def test_stop_of_several_models_takes_as_long_as_the_slowest_process_may(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAMO_HOME", str(tmp_path))
    chosen = serve.ServeConfig(engine="mocker", worker_flags="--graceful-shutdown-timeout=90")
    with state.registered("m", "m") as registration:
        serve_models._Run(chosen, [], None, registration, None)

        assert state.find("m").stop_timeout_s == 95


def test_progress_shows_the_seconds_waited_and_the_limit(capsys):
    clock = Clock()
    progress = waiting.Progress("waiting for m", limit_s=30, clock=clock)
    progress.show()
    clock.time_s += 10
    progress.show()

    assert capsys.readouterr().err.splitlines() == [
        "dynamo: waiting for m ...",
        "dynamo: waiting for m (10 s of at most 30 s)",
    ]


def test_line_that_is_drawn_anew_stays_on_one_row_of_the_terminal(monkeypatch):
    terminal = mock.Mock(wraps=io.StringIO(), isatty=lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    clock = Clock()
    progress = waiting.Progress("waiting for m", limit_s=30, clock=clock)
    clock.time_s += 10
    progress.show()
    batch.show_progress(1, 2)

    assert [call.args[0] for call in terminal.write.call_args_list[-2:]] == [
        "\r\x1b[Kwaiting for m (10 s\r",
        "\r\x1b[K[###############   ",
    ]


def test_nothing_is_drawn_anew_on_a_terminal_that_obeys_no_codes(monkeypatch):
    terminal = mock.Mock(wraps=io.StringIO(), isatty=lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    clock = Clock()
    progress = waiting.Progress("waiting for m", limit_s=30, clock=clock)
    clock.time_s += 10
    progress.show()
    batch.show_progress(1, 2)

    written = "".join(call.args[0] for call in terminal.write.call_args_list)
    assert written.endswith("dynamo: waiting for m (10 s of at most 30 s)\n")
    assert "\x1b" not in written


def test_wait_is_told_again_and_again_until_it_is_over(capsys, monkeypatch):
    monkeypatch.setattr(waiting, "INTERVAL_S", 0.01)
    told = threading.Event()

    def describe():
        told.set()
        return "loading m"

    with waiting.say_regularly(describe):
        assert told.wait(PATIENT_S)
    lines = capsys.readouterr().err.splitlines()

    assert set(lines) == {"dynamo: loading m (0 s)"}


async def test_wait_in_vain_ends_with_the_last_words_of_the_children():
    class Owner:
        def __init__(self):
            silent = types.SimpleNamespace(last_line="")
            worker = types.SimpleNamespace(last_line="loading")
            self.child_by_name = {"frontend": silent, "worker 1": worker}

        async def wait_until(self, probe, **options):
            raise TimeoutError

    with pytest.raises(children.ChildDied) as death:
        await serve.wait_until_answers(Owner(), Clock(), "m", None, 30)

    expected = "m did not answer within 30 s (--ready-timeout); last words: worker 1: loading"
    assert str(death.value) == expected


def test_closed_terminal_is_no_error(monkeypatch):
    class Closed:
        def write(self, text):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stderr", Closed())

    waiting.say("stopped")
