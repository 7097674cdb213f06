"""What `dynamo run` is told."""

import asyncio
import contextlib
import socket
import threading

import msgspec
import pytest

from dynamo.base import config, errors
from dynamo.cli import run, workers
from dynamo.protocols import instances, model_card
from dynamo.worker import settings


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["out=mocker"], {"target": "mocker"}),
        (["model", "in=batch:f.jsonl"], {"model": "model", "source": "batch:f.jsonl"}),
        (["in=text", "out=dyn://a.b.c"], {"source": "text", "target": "dyn://a.b.c"}),
        (["in=dyn://a.b.c", "out=echo_core"], {"source": "dyn://a.b.c", "target": "echo_core"}),
        (["in=http", "out=auto"], {"source": "http", "target": "auto"}),
        (["/models/a=b"], {"model": "/models/a=b"}),
    ],
)
def test_words_may_come_in_any_order(words, expected):
    assert run.read_words(words) == expected


def test_words_may_come_behind_flags():
    argv = ["out=mocker", "--prefill", "1", "in=stdin", "--temperature", "0", "m"]
    planned = run.plan(config.load(run.RunConfig, prog="dynamo run", argv=argv))

    assert (planned.target, planned.source, planned.model) == ("mocker", "stdin", "m")
    assert (planned.topology.num_prefill, planned.fields) == (1, {"temperature": 0.0})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["in=telepathy"], "in=telepathy: expected one of text, stdin, batch:FILE, http"),
        (["in=batch:"], "in=batch:: expected one of text, stdin, batch:FILE, http"),
        (["out=warp"], "there are native, mocker"),
        (["out=dyn://a"], "is no endpoint"),
        (["in=dyn://a"], "is no endpoint"),
        (["a", "b"], "'b' is one too many"),
        (["in=text", "in=http"], "'in=http' is one too many"),
        (["in="], "in=: expected one of text, stdin"),
        (["out="], "out=: .*there are native, mocker"),
    ],
)
def test_unknown_words_are_refused(words, message):
    with pytest.raises(errors.ConfigError, match=message):
        run.read_words(words)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (("in=dyn://a.b.c", "m"), "dynamo.native --endpoint dyn://a.b.c --model m"),
        (
            ("in=dyn://a.b.c", "out=echo_core"),
            "dynamo.mocker --endpoint dyn://a.b.c --echo --tick-ms 10",
        ),
    ],
)
def test_endpoint_as_source_is_the_command_of_a_worker(words, flags):
    planned = run.plan(run.RunConfig(words=words))

    assert run.worker_command(planned)[1:] == ["-m", *flags.split()]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"words": ("in=dyn://a.b.c", "out=auto")}, "which out=auto is not"),
        ({"words": ("in=dyn://a.b.c", "out=echo_full")}, "expected an engine, or echo_core"),
        ({"words": ("in=dyn://a.b.c",), "decode": 2}, "expected one worker"),
    ],
)
def test_endpoint_as_source_refuses_what_is_no_single_worker(options, says):
    with pytest.raises(errors.ConfigError, match=says):
        run.worker_command(run.plan(run.RunConfig(**options)))


@pytest.mark.parametrize(
    ("word", "options", "says"),
    [
        (
            "in=text",
            {"output": "o"},
            "--output: has no effect with in=text, only with in=batch:FILE",
        ),
        ("in=http", {"output": "o"}, "--output: has no effect with in=http"),
        ("in=http", {"max_tokens": 5}, "--max-tokens: has no effect with in=http, where each req"),
        (
            "in=dyn://a.b.c",
            {"temperature": 0.0},
            "--temperature: has no effect with in=dyn://a.b.c",
        ),
    ],
)
def test_flag_without_effect_is_refused(word, options, says):
    with pytest.raises(errors.ConfigError, match=says):
        run.plan(run.RunConfig(words=(word,), **options))


def test_port_in_use_is_named_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(run, "_join", lambda _: pytest.fail("it is loaded"))
    monkeypatch.setattr(run.logs, "configure", lambda _: None)  # of the whole process
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.ConfigError, match=f"port {port} is in use: .* --http-port$"):
            run.run(run.RunConfig(words=("in=http", "out=mocker"), http_port=port))


@pytest.mark.parametrize("source", ["in=text", "in=http"])
def test_model_is_fetched_where_ctrl_c_ends_it(monkeypatch, source):
    """In the thread of the event loop, or below its handler of SIGINT, a download would go on to its end."""

    def fetch(engine, model):
        assert threading.current_thread() is threading.main_thread()
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        raise KeyboardInterrupt

    monkeypatch.setattr(run.workers.engines, "find_model", fetch)
    monkeypatch.setattr(run.logs, "configure", lambda _: None)  # of the whole process
    with pytest.raises(KeyboardInterrupt):
        run.run(run.RunConfig(words=(source, "out=mocker", "org/large"), http_port=0))


async def test_http_api_has_the_keys_and_limits_of_the_environment(monkeypatch):
    seen = []

    def look(options, runtime):
        seen.append(options)
        raise errors.ConfigError("seen")

    variables = {"API_KEYS_FILE": "/keys.toml", "QUEUE_LIMIT": "7", "HTTP_HOST": "192.0.2.1"}
    for name, value in {**variables, "NAMESPACE": "other"}.items():
        monkeypatch.setenv(f"DYN_{name}", value)
    monkeypatch.setattr(run, "_join", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(run.service, "Frontend", look)
    planned = run.plan(run.RunConfig(words=("in=http", "out=mocker"), http_port=0))
    with pytest.raises(errors.ConfigError, match="seen"):
        await run._serve_http(planned)

    assert (seen[0].api_keys_file, seen[0].queue_limit) == ("/keys.toml", 7)
    assert (seen[0].http_host, seen[0].http_port) == ("127.0.0.1", 0)  # flags of the command
    assert seen[0].namespace == ""  # all models that this process serves


@pytest.mark.parametrize(
    ("words", "options", "says"),
    [
        (("in=http", "out=auto", "some/model"), {}, "some/model: has no effect with in=http and o"),
        (("in=http", "out=dyn://a.b.c"), {"model_name": "m"}, "--model-name: has no effect with"),
    ],
)
def test_model_of_workers_elsewhere_is_refused_where_requests_name_it(words, options, says):
    with pytest.raises(errors.ConfigError, match=says):
        run.plan(run.RunConfig(words=words, **options))
    assert run.plan(run.RunConfig(words=words[:2])).model is None


@pytest.mark.parametrize(("target", "namespace"), [("dyn://a.b.c", "a"), ("auto", "")])
async def test_api_serves_the_models_of_the_namespace_that_is_named(monkeypatch, target, namespace):
    def look(options, runtime):
        assert options.namespace == namespace
        raise errors.ConfigError("seen")

    monkeypatch.setenv("DYN_NAMESPACE", "other")
    monkeypatch.setattr(run, "_join", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(run.service, "Frontend", look)
    with pytest.raises(errors.ConfigError, match="seen"):
        await run._serve_http(run.plan(run.RunConfig(words=("in=http", f"out={target}"))))


def test_flags_of_earlier_releases_name_the_model_and_its_length():
    flags = ["in=dyn://a.b.c", "--model-path", "m", "--model-name", "n", "--context-length", "99"]
    planned = run.plan(config.load(run.RunConfig, prog="dynamo run", argv=flags))
    sglang = run.plan(config.load(run.RunConfig, prog="dynamo run", argv=["out=sglang", *flags]))

    assert run.worker_command(planned)[2:] == [
        *("dynamo.native", "--endpoint", "dyn://a.b.c"),
        *("--model", "m", "--model-name", "n", "--max-model-len", "99"),
    ]
    assert run.worker_command(sglang)[-2:] == ["--context-length", "99"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ("--static-worker", "a.b.c"),
            "--static-worker: use out=dyn://namespace.component.endpoint",
        ),
        (("m", "--router-mode=kv"), "--router-mode: use `python -m dynamo.frontend --router-mode"),
        (("-vv",), "-vv: use DYN_LOG=trace"),
        (("--http-prot", "1"), r"--http-prot \(did you mean --http-port"),
        (("m", "--model-path", "n"), "'n' is one too many"),
    ],
)
def test_flag_without_an_equal_is_refused_with_what_to_use(argv, says):
    with pytest.raises(errors.ConfigError, match=says):
        run.plan(config.load(run.RunConfig, prog="dynamo run", argv=argv))


async def test_requests_are_as_long_as_the_context_that_was_asked_for():
    model = settings.WorkerConfig(model_name="named")
    async with workers.join("mocker", model, workers.Topology(), 64) as runtime:
        (stored,) = (await runtime.discovery.get_prefix(instances.CARDS)).values()
    card = msgspec.json.decode(stored, type=model_card.CardRecord).card_json

    assert (card.display_name, card.context_length) == ("named", 64)


@pytest.mark.parametrize("target", ["sglang", "auto"])
async def test_context_length_is_refused_where_nothing_here_takes_it(target):
    with pytest.raises(errors.ConfigError, match="--context-length"):
        async with workers.join(target, settings.WorkerConfig(), workers.Topology(), 64):
            pass


@pytest.mark.parametrize(
    ("words", "model", "target"),
    [
        (["m"], "n.gguf", "llamacpp"),
        (["m.gguf"], "n", "native"),
        (["out=mocker", "m"], "n.gguf", "mocker"),
    ],
)
def test_another_model_is_served_by_its_own_engine_unless_one_was_named(words, model, target):
    planned = run.plan(run.RunConfig(words=tuple(words), model_name="called"))
    other = run.with_model(planned, model)

    assert (other.model, other.model_name, other.target) == (model, None, target)
