"""How the semantic cache connects to Milvus; what it keeps there is in `tests/contract/test_semantic_caches.py`."""

import asyncio
import threading

import pytest

from dynamo.semantic import cache, cache_file, config, milvus_config, question_meaning
from dynamo.testing import clock
from waiting import eventually

pymilvus = pytest.importorskip("pymilvus", reason="pymilvus is not installed: make .venv/.dev")

from dynamo.semantic import milvus_answers  # noqa: E402 - it imports pymilvus

REAL = pymilvus.MilvusClient
ORIGIN = cache_file.FileOrigin("format", "configuration", "wordings")
COLUMNS = ("id", "tenant", "meaning", "body", "expires_at", "num_bytes", "embedding")


class FakeClient:
    """A Milvus in which another process makes the collection first."""

    def __init__(self, made, uri, **arguments):
        self.calls = [(uri, arguments)]
        self.has_it = False
        made.append(self)

    def __getattr__(self, name):
        def call(*arguments, **_):
            self.calls.append((name, arguments))
            return REAL.create_schema() if name == "create_schema" else self

        return call

    def has_collection(self, name, timeout):
        return self.has_it

    def create_collection(self, name, **_):
        self.has_it = True
        raise pymilvus.MilvusException(message="it exists already")

    def describe_collection(self, name, timeout):
        return {"fields": [{"name": column} for column in COLUMNS]}


@pytest.fixture
def connect(monkeypatch):
    """Connects with these settings; returns the client and how the first operation ended."""

    def connect(**settings):
        made, ended = [], []
        monkeypatch.setattr(
            milvus_answers.pymilvus,
            "MilvusClient",
            lambda uri, **arguments: FakeClient(made, uri, **arguments),
        )
        answers = milvus_answers.MilvusAnswers(
            config.CacheSettings(milvus=milvus_config.MilvusSettings(**settings)),
            ORIGIN,
            clock.VirtualClock(),
            lambda *end: ended.append(end),
        )
        eventually(lambda: ended, what="the first attempt has ended")
        answers.close()
        return made[0], ended[0]

    return connect


def test_connection_has_the_user_the_database_and_the_certificates(connect):
    client, ended = connect(
        connection=milvus_config.MilvusConnection(
            host="::1",
            database="cache",
            auth=milvus_config.MilvusAuth(enabled=True, username="router", password="secret"),
            tls=milvus_config.MilvusTls(enabled=True, ca_file="a", cert_file="c", key_file="k"),
        )
    )

    uri, arguments = client.calls[0]
    assert ended == ("connect", "success")
    assert uri == "https://[::1]:19530"
    assert arguments["token"] == "router:secret"
    assert arguments["db_name"] == "cache"
    assert arguments["ca_pem_path"] == "a"
    assert (arguments["client_pem_path"], arguments["client_key_path"]) == ("c", "k")


def test_authority_alone_proves_who_milvus_is(connect):
    tls = milvus_config.MilvusTls(enabled=True, ca_file="a")
    client, _ = connect(connection=milvus_config.MilvusConnection(tls=tls))

    assert client.calls[0][1]["server_pem_path"] == "a"


def test_absent_collection_is_not_made_where_it_is_not_to_be(connect):
    development = milvus_config.MilvusDevelopment(auto_create_collection=False)

    client, ended = connect(development=development)
    assert ended == ("connect", "error")
    assert not client.has_it


async def test_lookup_that_waits_while_the_configuration_changes_is_a_miss(monkeypatch):
    made, ended, may_answer = [], [], threading.Event()

    class SlowClient(FakeClient):
        def query(self, *_, **__):
            may_answer.wait()
            return []

    monkeypatch.setattr(
        milvus_answers.pymilvus,
        "MilvusClient",
        lambda uri, **arguments: SlowClient(made, uri, **arguments),
    )
    answers = milvus_answers.MilvusAnswers(
        config.CacheSettings(milvus=milvus_config.MilvusSettings()),
        ORIGIN,
        clock.VirtualClock(),
        lambda *end: ended.append(end),
    )
    eventually(lambda: ended, what="it is connected")
    key = cache.CacheKey(bytes(16), "", question_meaning.read_meaning("What is life?"))
    lookups = [asyncio.create_task(answers.find(key)) for _ in range(8)]
    await asyncio.sleep(0)
    answers.close()
    may_answer.set()

    assert await asyncio.gather(*lookups) == [None] * 8


def test_vector_has_the_weights_of_the_words():
    vectors = [
        milvus_answers.embed(question_meaning.read_meaning(text))
        for text in ("The capital of France", "capital of France", "?")
    ]
    cosine = sum(a * b for a, b in zip(*vectors[:2], strict=True))

    assert 0.9 < cosine < 1.0001
    assert vectors[2] == [0.0] * 64
