"""Processes that ask each other, here as objects of one process over real sockets."""

import asyncio
import contextlib

import pytest

from dynamo.base import clock
from dynamo.frontend.processes import peers, response_store, shared_responses
from dynamo.runtime.http import exchange


def echo(caller):
    caller.respond(200, caller.request.method.encode() + b" " + caller.request.body)


def refuse(caller):
    caller.respond(404, b"")


@pytest.fixture
async def three(tmp_path):
    """Siblings by name, each with its routes."""
    async with contextlib.AsyncExitStack() as stack:
        made = {}
        for name in "123":
            made[name] = peers.Peers(str(tmp_path / f"{name}.sock"), clock.SystemClock())
            handler = refuse if name == "3" else echo
            await made[name].start({("POST", "/x"): handler, ("GET", "/x"): handler})
            stack.push_async_callback(made[name].close)
        yield made


async def test_it_hears_from_the_others_that_have_something_to_say(three):
    assert await three["1"].ask_all("POST", "/x", b"body") == {"2": b"POST body"}
    assert await three["2"].ask_all("GET", "/x") == {"1": b"GET "}


async def test_one_that_is_gone_is_left_out(three):
    await three["2"].close()

    assert await three["1"].ask_all("POST", "/x") == {}
    assert await three["3"].ask_all("POST", "/x") == {"1": b"POST "}


async def test_one_that_says_nothing_is_not_waited_for(three, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "TIMEOUT_S", 0.05)
    writers = []
    path = str(tmp_path / "0.sock")
    async with await asyncio.start_unix_server(lambda _, writer: writers.append(writer), path):
        answers = await three["1"].ask_all("POST", "/x")
    for writer in writers:
        writer.close()
        await writer.wait_closed()

    assert answers == {"2": b"POST "}
    assert len(writers) == 1


async def test_one_that_talks_nonsense_is_left_out(three, tmp_path):
    def talk(_, writer):
        writer.write(b"nonsense")
        writer.close()

    async with await asyncio.start_unix_server(talk, str(tmp_path / "0.sock")):
        assert await three["1"].ask_all("POST", "/x") == {"2": b"POST "}


async def test_an_answer_without_end_is_given_up(three, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "_MAX_RESPONSE_BYTES", 1000)

    def talk(_, writer):
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + bytes(10_000))
        writer.close()

    async with await asyncio.start_unix_server(talk, str(tmp_path / "0.sock")):
        assert await three["1"].ask_all("POST", "/x") == {"2": b"POST "}


async def test_a_new_process_takes_the_place_of_a_dead_one(three, tmp_path):
    await three["2"].close()
    reborn = peers.Peers(str(tmp_path / "2.sock"), clock.SystemClock())
    await reborn.start({("POST", "/x"): echo})

    assert await three["1"].ask_all("POST", "/x") == {"2": b"POST "}
    await reborn.close()


async def test_alone_there_is_nobody_to_ask():
    alone = peers.Peers(None, clock.SystemClock())
    await alone.start({})

    assert alone.name is None
    assert await alone.ask_all("GET", "/x") == {}
    await alone.close()


class Wire:
    """Where the answer to a handler's caller goes."""

    def write(self, data):
        self.data = data

    write_soon = write


def caller(method="POST", path="/v1/responses", body=b""):
    request = exchange.Request(
        method=method, path=path, query="", headers={}, body=body, peer="test"
    )
    return exchange.Exchange(request, Wire(), lambda: None)


@pytest.fixture
async def stores(tmp_path):
    """Two processes that keep answers."""
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for name in "12":
            others = peers.Peers(str(tmp_path / f"{name}.sock"), clock.SystemClock())
            store = response_store.ResponseStore(max_items=9, max_bytes=9999)
            shared = shared_responses.SharedResponses(store, others)
            await others.start(shared.routes)
            stack.push_async_callback(others.close)
            made.append((store, shared))
        yield made


KEPT = response_store.StoredResponse(b'{"id": "resp_1"}', b"[]")


async def test_an_answer_to_go_on_from_is_here_when_it_is_needed(stores):
    (first, _), (second, shared) = stores
    first.put("resp_1", KEPT)
    seen = []
    handler = shared.wrap_continuing(lambda _: seen.append(second.find("resp_1")))
    await handler(caller(body=b'{"previous_response_id": "resp_1", "model": "m"}'))

    assert seen == [KEPT]


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"{}", b'{"previous_response_id": 3}', b'{"previous_response_id": "../x?y z"}']
)  # fmt: skip
async def test_whatever_else_the_request_says_it_reaches_its_handler(stores, body):
    seen = []
    await stores[0][1].wrap_continuing(lambda one: seen.append(one.request.body))(caller(body=body))

    assert seen == [body]


async def test_a_deleted_answer_is_deleted_everywhere(stores):
    (first, _), (second, shared) = stores
    for store in (first, second):
        store.put("resp_1", KEPT)
    seen = []
    handler = shared.wrap_lookup("/v1/responses/", lambda _: seen.append(len(first)))
    await handler(caller("DELETE", "/v1/responses/resp_1"))

    assert seen == [0]
    assert len(second) == 1  # which its own handler deletes


async def test_who_is_alone_gets_its_handlers_as_they_are():
    store = response_store.ResponseStore(max_items=9, max_bytes=9999)
    shared = shared_responses.SharedResponses(store, peers.Peers(None, clock.SystemClock()))

    assert shared.wrap_continuing(echo) is echo
    assert shared.wrap_lookup("/", echo) is echo
