"""Processes that ask each other, here as objects of one process over real sockets; their merged metrics."""

import asyncio
import contextlib
import os

import pytest
from prometheus_client import parser

from dynamo.base import local_users
from dynamo.frontend.processes import peers, response_store
from dynamo.observability import metrics
from dynamo.runtime.http import exchange


def echo(caller):
    caller.respond(200, caller.request.method.encode() + b" " + caller.request.body)


def refuse(caller):
    caller.respond(404, b"")


@pytest.fixture
async def three(tmp_path):
    """Peers by name, each with its routes."""
    async with contextlib.AsyncExitStack() as stack:
        made = {}
        for name in "123":
            made[name] = peers.Peers(str(tmp_path / f"{name}.sock"))
            handler = refuse if name == "3" else echo
            await made[name].start({("POST", "/x"): handler, ("GET", "/x"): handler})
            stack.push_async_callback(made[name].close)
        yield made


@pytest.mark.usefixtures("three")
async def test_process_of_another_user_is_cut_off_without_a_trace(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(local_users, "is_own_user", lambda transport: False)
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "1.sock"))
    assert await reader.read() == b""
    writer.close()

    assert caplog.text == ""


async def test_peers_that_answer_are_collected(three):
    assert await three["1"].ask_all("POST", "/x", b"body") == {"2": b"POST body"}
    assert await three["2"].ask_all("GET", "/x") == {"1": b"GET "}


async def test_process_of_another_user_gets_no_answer(three, tmp_path, monkeypatch):
    monkeypatch.setattr(local_users, "peer_uid", lambda sock: os.getuid() + 1)
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "1.sock"))
    writer.write(b"GET /x HTTP/1.0\r\nhost: peer\r\n\r\n")
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        answer = await reader.read()
    writer.close()

    assert answer == b""


async def test_socket_of_another_user_is_not_asked(three, tmp_path, monkeypatch):
    requests = []

    async def listen(reader, writer):
        requests.append(await reader.read())
        writer.close()

    async with await asyncio.start_unix_server(listen, str(tmp_path / "0.sock")):
        monkeypatch.setattr(local_users, "peer_uid", lambda sock: os.getuid() + 1)
        answers = await three["1"].ask_all("GET", "/x")

    assert answers == {}
    assert requests in ([], [b""])


async def test_closed_peer_is_left_out(three):
    await three["2"].close()

    assert await three["1"].ask_all("POST", "/x") == {}
    assert await three["3"].ask_all("POST", "/x") == {"1": b"POST "}


async def test_silent_peer_is_left_out_after_the_timeout(three, tmp_path, monkeypatch):
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


async def test_peer_that_does_not_speak_http_is_left_out(three, tmp_path):
    def talk(_, writer):
        writer.write(b"nonsense")
        writer.close()

    async with await asyncio.start_unix_server(talk, str(tmp_path / "0.sock")):
        assert await three["1"].ask_all("POST", "/x") == {"2": b"POST "}


async def test_endless_response_of_a_peer_is_given_up(three, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "_MAX_BYTES", 1000)

    def talk(_, writer):
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + bytes(10_000))
        writer.close()

    async with await asyncio.start_unix_server(talk, str(tmp_path / "0.sock")):
        assert await three["1"].ask_all("POST", "/x") == {"2": b"POST "}


async def test_peer_that_ends_within_its_response_is_left_out(three, tmp_path):
    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        writer.close()

    async with await asyncio.start_unix_server(talk, str(tmp_path / "0.sock")):
        assert await three["1"].ask_all("POST", "/x") == {"2": b"POST "}


async def test_restarted_process_takes_the_socket_of_the_dead_one(three, tmp_path):
    await three["2"].close()
    reborn = peers.Peers(str(tmp_path / "2.sock"))
    await reborn.start({("POST", "/x"): echo})

    assert await three["1"].ask_all("POST", "/x") == {"2": b"POST "}
    await reborn.close()


async def test_process_without_peers_gets_no_responses():
    alone = peers.Peers(None)
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
            others = peers.Peers(str(tmp_path / f"{name}.sock"))
            store = response_store.ResponseStore(max_items=9, max_bytes=9999)
            shared = peers.SharedResponses(store, others, lambda _: "")
            await others.start(shared.routes)
            stack.push_async_callback(others.close)
            made.append((store, shared))
        yield made


KEPT = response_store.StoredResponse(b'{"id": "resp_1"}', b"[]")


async def test_response_to_continue_from_is_fetched_before_the_handler_runs(stores):
    (first, _), (second, shared) = stores
    first.put("resp_1", KEPT)
    seen = []
    handler = shared.wrap_continuing(lambda _: seen.append(second.find("resp_1", "")))
    await handler(caller(body=b'{"previous_response_id": "resp_1", "model": "m"}'))

    assert seen == [KEPT]


@pytest.mark.parametrize(
    ("part_bytes", "num_questions"), [(999, 2), (1, 9)], ids=["one part", "a part for each"]
)
async def test_responses_whose_items_are_named_are_fetched_before_the_handler_runs(
    stores, monkeypatch, part_bytes, num_questions
):
    monkeypatch.setattr(peers, "_PART_BYTES", part_bytes)
    (first, _), (second, shared) = stores
    questions, ask = [], shared._peers.ask_all
    monkeypatch.setattr(
        shared._peers, "ask_all", lambda *all_: questions.append(all_) or ask(*all_)
    )
    digits = "0" * 31
    for last in range(1, 9):
        first.put(f"resp_{digits}{last}", KEPT)
    seen = []
    handler = shared.wrap_continuing(lambda _: seen.append(len(second)))
    # each twice, and one that no process has
    items = [
        f'{{"type": "item_reference", "id": "msg_{digits}{last}00"}}'
        for last in (*range(10), *range(10))
    ]
    await handler(caller(body=f'{{"input": [{", ".join(items)}]}}'.encode()))

    assert seen == [8]
    assert len(questions) == num_questions


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"{}", b'{"previous_response_id": 3}', b'{"previous_response_id": "../x?y z"}',
             pytest.param(b'{"input": ' + b"[" * 9999 + b"]" * 9999 + b"}", id="nested too deeply")]
)  # fmt: skip
async def test_any_other_body_reaches_its_handler(stores, body):
    seen = []
    await stores[0][1].wrap_continuing(lambda one: seen.append(one.request.body))(caller(body=body))

    assert seen == [body]


async def test_deleted_response_is_deleted_in_all_processes(stores):
    (first, _), (second, shared) = stores
    for store in (first, second):
        store.put("resp_1", KEPT)
    seen = []
    handler = shared.wrap_lookup(
        lambda caller: caller.request.path.removeprefix("/v1/responses/"),
        lambda _: seen.append(len(first)),
    )
    await handler(caller("DELETE", "/v1/responses/resp_1"))

    assert seen == [0]
    assert len(second) == 1  # which its own handler deletes


async def test_single_process_gets_its_handlers_unchanged():
    store = response_store.ResponseStore(max_items=9, max_bytes=9999)
    shared = peers.SharedResponses(store, peers.Peers(None), lambda _: "")

    assert shared.wrap_continuing(echo) is echo
    assert shared.wrap_lookup(lambda _: "", echo) is echo


def page(value):
    """Of one process: every kind of family, with and without labels, and a value that looks like labels."""
    registry = metrics.Registry("f")
    registry.counter("requests_total", "Requests", ("model",)).labels('a{b="c"} d').inc(value)
    registry.gauge("clients", "Clients").set(value)
    registry.fast_histogram("wait_seconds", "Wait", ("model",), buckets=(1,)).labels("m").observe(
        value
    )
    registry.gauge("unused", "Nothing yet", ("model",))
    return registry.render().decode()


def rows(text):
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert (sample.name, labels) not in found, "a sample came twice"
            found[sample.name, labels] = (family.type, family.documentation, sample.value)
    return found


def test_merged_metrics_have_each_sample_once_with_its_process():
    merged = rows(peers.merge_metrics({"1": page(1), "2": page(5)}))
    expected = {
        (name, tuple(sorted((*labels, ("http_worker", worker))))): row
        for worker, value in (("1", 1), ("2", 5))
        for (name, labels), row in rows(page(value)).items()
    }

    assert merged == expected


def test_merged_metrics_describe_each_family_once():
    text = peers.merge_metrics({"1": page(1), "2": page(5)})
    introductions = [line for line in text.splitlines() if line.startswith("#")]

    assert len(introductions) == len(set(introductions)) == 8


def test_merged_metrics_of_no_process_are_empty():
    assert peers.merge_metrics({}) == ""
