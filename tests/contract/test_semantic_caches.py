"""What the semantic cache promises, in the memory of one router and in a Milvus that two routers share."""

import asyncio
import itertools
import logging
import re
import sys
import time

import msgspec
import pytest

import milvus_server
from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.observability import metrics
from dynamo.semantic import service
from dynamo.testing import clock
from semantic_configs import COMPLETION, chat
from waiting import PATIENT_S, eventually, until

CONFIG = """
default_model: general
keyword_rules: [{name: capital, keywords: [capital]}]
decisions:
  - name: capitals
    rules: {conditions: [{type: keyword, name: capital}]}
    modelRefs: [{model: general}]
    plugins: [{type: semantic-cache, configuration: {similarity_threshold: 0.8}}]
"""
MEMORY = "semantic_cache: {{enabled: true, max_entries: {most}, ttl_seconds: 60}}"
MILVUS = """
semantic_cache:
  enabled: true
  max_entries: {most}
  ttl_seconds: 60
  backend_type: milvus
  milvus:
    connection: {{host: 127.0.0.1, port: {port}, timeout: {write}}}
    collection: {{name: {name}}}
    lookup_timeout_seconds: {lookup}
"""
QUESTION, REPHRASED = "What is the capital of France?", "Please tell me the capital of France"
OTHER, TOO_LONG = "What is the capital of Chile?", b'"content":"' + 70_000 * b"x"
names = (f"answers_{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = milvus_server.MilvusServer(tmp_path_factory.mktemp("milvus"))
    server.start()
    yield server
    server.stop()


class Routers:
    """Opens routers that share one cache; with the backend `memory` they are one and the same."""

    def __init__(self, directory, backend, server, at):
        self.directory, self.server, self.at = directory, server, at
        self.is_shared = backend == "milvus"
        self.name, self.opened = next(names), []

    def open(self, *, most=100, lookup_s=PATIENT_S, write_s=PATIENT_S, waits=True):
        if self.opened and not self.is_shared:
            return self.opened[0]
        text = MEMORY.format(most=most)
        if self.is_shared:
            port = self.server.port
            text = MILVUS.format(
                most=most, port=port, name=self.name, lookup=lookup_s, write=write_s
            )
        path = self.directory / "router.yaml"
        path.write_text(CONFIG + text)
        registry = metrics.Registry("llm")
        router = service.RoutingService(path, registry, self.at)
        router.registry = registry
        self.opened.append(router)
        if waits and self.is_shared:
            eventually(lambda: count(router, "connect", "success"), what="Milvus is connected")
        return router

    def close(self):
        for router in self.opened:
            router.close()


@pytest.fixture
def at():
    return clock.VirtualClock()


@pytest.fixture(params=["memory", "milvus"])
def routers(request, tmp_path, at):
    shared = request.getfixturevalue("server") if request.param == "milvus" else None
    routers = Routers(tmp_path, request.param, shared, at)
    yield routers
    routers.close()


@pytest.fixture
def milvus(tmp_path, at, server):
    """Routers with Milvus."""
    routers = Routers(tmp_path, "milvus", server, at)
    yield routers
    routers.close()


@pytest.fixture
def own(tmp_path):
    """Routers with the time of this machine and a Milvus of their own, which is down at first."""
    server = milvus_server.MilvusServer(tmp_path / "milvus")
    routers = Routers(tmp_path, "milvus", server, clocks.SystemClock())
    yield routers
    routers.close()
    server.stop()


def count(router, operation, status):
    """Return how often an operation in Milvus ended so."""
    text = router.registry.render().decode()
    pattern = rf'operations_total{{.*operation="{operation}",status="{status}"}} (\S+)'
    return sum(float(number) for number in re.findall(pattern, text))


def headers_of(tenant):
    return {"authorization": f"Bearer {tenant}"} if tenant else {}


async def ask(router, text, tenant="", **headers):
    """Return the outcome of a request, as the frontend and the gateway get it."""
    headers = {**headers_of(tenant), **headers}
    tenant = service.tenant_of(headers)
    await router.recall(chat(text), headers, tenant)
    return router.route(chat(text), headers, tenant)


async def is_hit(router, text, tenant="", **headers):
    return (await ask(router, text, tenant, **headers)).explanation.path == "cache"


async def answer(router, text, tenant="", body=COMPLETION):
    """Ask, store the answer that a model gives, and return the name of the entry."""
    outcome = await ask(router, text, tenant)
    before = count(router, "put", "success")
    router.record_answer(outcome, body)
    if router._milvus is not None:
        await until(lambda: count(router, "put", "success") > before)
    return outcome.explanation.cache_key


async def answer_until_stored(router):
    """Answer new questions, slowly, until Milvus has one: it may be busy for longer than the bounds at first."""

    async def is_stored():
        await asyncio.sleep(0.1)
        router.record_answer(await ask(router, OTHER, time.monotonic()), COMPLETION)
        return count(router, "put", "success")

    await until(is_stored)


async def test_answer_is_given_again_by_another_router(routers):
    await answer(routers.open(), QUESTION)
    other = routers.open()
    outcome = await ask(other, REPHRASED)

    assert outcome.explanation.path == "cache"
    assert b"It is four." in outcome.answer.body
    assert not await is_hit(other, OTHER)


async def test_meaning_decides_after_the_key(routers):
    await answer(routers.open(), "Name the capital of the US")
    other = routers.open()

    assert await is_hit(other, "name the capital of the US")
    assert not await is_hit(other, "Name the capital of the us")


async def test_tenants_do_not_share(routers):
    await answer(routers.open(), QUESTION, "ann")
    other = routers.open()

    assert not await is_hit(other, QUESTION)
    assert not await is_hit(other, QUESTION, "bob")
    assert await is_hit(other, QUESTION, "ann")


async def test_answers_end_with_their_time(routers, at):
    await answer(routers.open(), QUESTION)
    await at.advance(59)
    assert await is_hit(routers.open(), QUESTION)
    await at.advance(2)

    assert not await is_hit(routers.open(), QUESTION)
    assert not await is_hit(routers.opened[0], QUESTION)


async def test_name_deletes_the_answer_for_its_tenant_only(routers):
    first, other = routers.open(), routers.open()
    name = await answer(first, QUESTION, "ann")
    ann, bob = (service.tenant_of(headers_of(tenant)) for tenant in ("ann", "bob"))

    assert await other.delete_answers([name], bob) == 0
    assert await other.delete_answers([name, "ff", "no name"], ann) == 1
    assert not await is_hit(other, QUESTION, "ann")
    assert await other.delete_answers([name], ann) == 0


async def test_header_deletes_before_the_request_is_answered(routers):
    first, other = routers.open(), routers.open()
    name = await answer(first, QUESTION, "ann")

    assert not await is_hit(other, QUESTION, "ann", **{"x-vsr-cache-delete": name})
    assert not await is_hit(other, QUESTION, "ann")


async def test_invalidation_of_a_tenant_leaves_the_others(routers):
    first, other = routers.open(), routers.open()
    for tenant in ("ann", "bob"):
        await answer(first, QUESTION, tenant)

    assert await other.invalidate_answers(service.tenant_of(headers_of("ann"))) == 1
    assert not await is_hit(other, QUESTION, "ann")
    assert await is_hit(other, QUESTION, "bob")
    assert await other.invalidate_answers() == 1
    assert not await is_hit(other, QUESTION, "bob")


async def test_oldest_answers_go_when_there_are_too_many(routers, at):
    first = routers.open(most=2)
    for place in ("France", "Chile", "Peru"):
        await answer(first, f"What is the capital of {place}?")
        await at.advance(1)
    other = routers.open(most=2)

    hits = [await is_hit(other, f"Capital of {place}") for place in ("France", "Chile", "Peru")]
    assert hits == [False, True, True]


async def test_deleted_answer_is_soon_gone_from_other_memories(milvus, at):
    first, other = milvus.open(), milvus.open()
    name = await answer(first, QUESTION, "ann")
    await other.delete_answers([name], service.tenant_of(headers_of("ann")))
    assert await is_hit(first, QUESTION, "ann")  # it has not heard of it
    await at.advance(11)

    assert not await is_hit(first, QUESTION, "ann")


async def test_answers_outlive_routers_and_milvus(own):
    own.server.start()
    await answer(own.open(), QUESTION)
    own.opened.pop().close()
    own.server.stop()
    own.server.start()

    assert await is_hit(own.open(), REPHRASED)


async def test_milvus_that_is_down_at_the_start_is_used_when_it_comes(own, caplog):
    began_at = time.monotonic()
    router = own.open(lookup_s=2, write_s=10, waits=False)
    await until(lambda: count(router, "connect", "error"))
    assert not await is_hit(router, QUESTION)
    own.server.start()
    await answer_until_stored(router)
    assert 1 <= len(warnings_in(caplog)) <= 1 + (time.monotonic() - began_at) / 60
    assert "fails" in warnings_in(caplog)[0]


async def test_milvus_that_dies_or_hangs_is_a_miss_within_the_bound(own, caplog):
    began_at = time.monotonic()
    own.server.start()
    router, other = (own.open(lookup_s=2, write_s=10, waits=False) for _ in range(2))
    await answer_until_stored(router)
    await answer_until_stored(other)
    name = (await ask(other, QUESTION)).explanation.cache_key
    own.server.freeze()
    times = [time.monotonic()]
    for _ in range(21):
        assert not await is_hit(router, QUESTION)
        times.append(time.monotonic())
    with pytest.raises(errors.Unavailable, match="ask again"):
        await router.delete_answers([name], "")
    own.server.stop()
    assert not await is_hit(other, OTHER)

    assert 1.9 < times[1] - times[0] < 60  # a frozen Milvus never answers
    assert times[-1] - times[1] < 20 * 2  # the next requests do not wait
    assert 2 <= len(warnings_in(caplog)) <= 2 + 2 * (time.monotonic() - began_at) / 60


async def test_answers_are_dropped_where_milvus_does_not_take_them(own):
    own.server.start()
    router = own.open(lookup_s=2)
    outcome = await ask(router, QUESTION)
    own.server.freeze()
    began_at = time.monotonic()
    for _ in range(300):
        router.record_answer(outcome, COMPLETION)

    assert time.monotonic() - began_at < 300  # none waits for a write
    assert count(router, "put", "dropped") >= 100
    assert await is_hit(router, QUESTION)  # in this process


async def test_answer_that_is_too_long_for_milvus_stays_in_the_process(milvus):
    first, other = milvus.open(), milvus.open()
    body = COMPLETION.replace(b'"content":"', TOO_LONG)
    first.record_answer(await ask(first, QUESTION), body)

    assert count(first, "put", "too_large") == 1
    assert await is_hit(first, QUESTION)
    assert not await is_hit(other, QUESTION)


@pytest.mark.parametrize(
    "change",
    [
        {"body": "no JSON"},
        {"body": '{"choices":[]}'},
        {"meaning": "[]"},
        {"meaning": '{"words": ["x"]}'},
        {"tenant": "0000"},
        {"weights": {"capital": 1e308}},
        {"weights": {"capital": -1}},
        {"words": ["other"]},
        {"decision": "other"},
    ],
    ids=str,
)
async def test_broken_row_is_a_miss(milvus, change):
    first, other = milvus.open(), milvus.open()
    await answer(first, QUESTION)
    client = first._milvus._client
    [row] = client.query(milvus.name, filter="expires_at > 0", output_fields=["*"])
    row, (decision, meaning) = dict(row), msgspec.json.decode(row["meaning"])
    meaning.update((k, v) for k, v in change.items() if k in meaning)
    decision = change.get("decision", decision)
    row["meaning"] = msgspec.json.encode((decision, meaning)).decode()
    row.update((k, v) for k, v in change.items() if k in row)
    client.upsert(milvus.name, [row])

    assert not await is_hit(other, QUESTION)


async def test_collection_of_another_program_is_left_alone(milvus, caplog):
    client = milvus.open()._milvus._client
    milvus.name = next(names)
    client.create_collection(milvus.name, dimension=4)
    router = milvus.open(waits=False)
    await until(lambda: count(router, "connect", "error"))

    assert "set semantic_cache.milvus.collection.name" in warnings_in(caplog)[0]
    assert not await is_hit(router, QUESTION)


async def test_change_of_the_configuration_starts_without_answers(milvus, monkeypatch):
    await answer(milvus.open(), QUESTION)
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", CONFIG.replace("general", "other"))

    assert not await is_hit(milvus.open(), QUESTION)


async def test_reload_that_leaves_milvus_goes_on_in_memory(milvus):
    router = milvus.open()
    await answer(router, QUESTION)
    router.loader.path.write_text(CONFIG + MEMORY.format(most=100))
    assert router.loader.reload_if_changed()

    assert not await is_hit(router, QUESTION)
    await answer(router, QUESTION)
    assert await is_hit(router, QUESTION)


def test_absent_client_stops_the_start_and_names_the_extra(tmp_path, at, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    monkeypatch.delitem(sys.modules, "dynamo.semantic.milvus_answers", raising=False)
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG + MILVUS.format(most=1, port=1, name="a", lookup=1, write=1))

    with pytest.raises(errors.ConfigError, match=r"needs pymilvus.*EXTRAS=milvus|\[milvus\]"):
        service.RoutingService(path, metrics.Registry("llm"), at)


def warnings_in(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "semantic cache" in record.getMessage()
    ]
