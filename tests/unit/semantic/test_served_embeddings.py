"""Embeddings of a server: what a request carries, and every answer that gives none."""

import asyncio
import threading

import numpy as np
import pytest

from dynamo.base import clock, errors
from dynamo.cli import semantic as command
from dynamo.observability import metrics
from dynamo.semantic import config, config_file, encoder_scores, served_embeddings, service
from embedding_server import CONFIG, embeddings, serving
from semantic_configs import chat


def settings_for(url, **fields):
    return config.EncoderSettings(embeddings_url=url, embeddings_model="m", **fields)


async def test_vectors_have_length_one_and_the_key_is_sent(monkeypatch):
    monkeypatch.setenv("EMBEDDINGS_KEY", "secret")
    async with serving(embeddings) as (url, heads):
        settings = settings_for(url, embeddings_key_variable="EMBEDDINGS_KEY")
        texts = ["engine trouble", "hello"]
        answers = await served_embeddings.embed_texts(texts, settings)

    assert encoder_scores.vector_in(answers, "engine trouble").tolist() == pytest.approx([0.6, 0.8])
    assert np.linalg.norm(encoder_scores.vector_in(answers, "hello")) == pytest.approx(1)
    assert heads[0].startswith("POST /v1/embeddings HTTP/1.0")
    assert "authorization: Bearer secret" in heads[0]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.0 503 Busy\r\n\r\n", "expected the status 200, got 503"),
        (b"", "expected an HTTP response"),
        (b"HTTP/1.0 200 OK\r\n\r\n{", "DecodeError"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"data": []}', "KeyError"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"data": [{"embedding": [0, 0]}]}', "a finite length above 0"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b" " * 2**12, "expected at most 1024 bytes"),
    ],
)
async def test_answer_of_another_kind_gives_no_vectors(answer, reason, caplog, monkeypatch):
    monkeypatch.setattr(served_embeddings, "_MOST_BYTES", 2**10)
    async with serving(lambda texts: answer) as (url, _):
        answers = await served_embeddings.embed_texts(["hello"], settings_for(url))

    assert answers == {}
    assert reason in caplog.text


async def test_server_that_is_away_or_silent_is_waited_for_a_bounded_time(caplog):
    gone = settings_for("http://127.0.0.1:1/v1")
    assert await served_embeddings.embed_texts(["a"], gone) == {}

    async def say_nothing(reader, writer):
        await reader.read()
        writer.close()
        has_ended.set()

    has_ended = asyncio.Event()
    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with silent:
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/v1"
        settings = settings_for(url, timeout_seconds=0.05)
        assert await served_embeddings.embed_texts(["a"], settings) == {}
        await has_ended.wait()

    assert "no answer within 0.05 s" in caplog.text


async def test_rule_holds_by_the_vectors_of_a_server_and_not_without_them(tmp_path):
    path = tmp_path / "router.yaml"
    is_up = [True]

    def answer(texts):
        return embeddings(texts) if is_up[0] else b"HTTP/1.0 500 No\r\n\r\n"

    async def model_of(routing, text):
        body = chat(text)
        classifiers = await routing.ask_encoders(body)
        return routing.route(body, {}, classifiers=classifiers).explanation.model

    async with serving(answer) as (url, heads):
        path.write_text(CONFIG.format(url=url))
        routing = service.RoutingService(path, metrics.Registry("llm"), clock.SystemClock())
        assert await model_of(routing, "my car stalls") == "mechanic"
        assert await model_of(routing, "hello") == "general"
        num_requests = len(heads)
        is_up[0] = False
        assert await model_of(routing, "my car stalls") == "general"

    assert num_requests == 3  # one for the candidates


async def test_explanation_and_replay_compare_by_the_vectors_of_the_server(tmp_path, capsys):
    path, trace = tmp_path / "router.yaml", tmp_path / "trace.jsonl"
    trace.write_bytes(chat("my car stalls"))
    async with serving(embeddings) as (url, _):
        path.write_text(CONFIG.format(url=url))
        for options in (
            {"action": "explain", "subject": "my car stalls", "semantic_router": str(path)},
            {"action": "replay", "subject": str(trace), "new_config": str(path)},
        ):
            asked = command.SemanticCommandConfig(**options)
            assert await asyncio.to_thread(command.run, asked) == 0

    printed = capsys.readouterr().out
    assert "embedding rule: cars" in printed
    assert "1  go to mechanic" in printed


async def test_large_request_is_read_beside_the_event_loop(tmp_path, monkeypatch):
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG.format(url="http://127.0.0.1:1/v1"))
    routing = service.RoutingService(path, metrics.Registry("llm"), clock.SystemClock())
    threads = []
    list_inputs = routing.router.list_inputs

    def note_thread(view):
        threads.append(threading.current_thread())
        return list_inputs(view)

    monkeypatch.setattr(routing.router, "list_inputs", note_thread)
    for text in ("hello", "hello " * 100_000):
        await routing.ask_encoders(chat(text))

    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


@pytest.mark.parametrize("fields", ["embeddings_url: host", "embeddings_url: http://host/v1"])
def test_address_without_scheme_or_model_is_refused(fields):
    with pytest.raises(errors.ConfigError, match=r"encoders\.embeddings_url: expected http://HOST"):
        config_file.parse(f"encoders: {{{fields}}}".encode(), frozenset())
