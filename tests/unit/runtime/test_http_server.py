"""The server over real sockets on loopback, spoken to in raw bytes, well and badly."""

import asyncio
import contextlib
import re
import socket
import ssl
import subprocess
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.runtime.http import exchange, parser, server
from waiting import PATIENT_S, until

QUICK = parser.HttpLimits(request_s=0.05, idle_s=0.05, linger_s=0.05, sweep_s=0.01)


@contextlib.asynccontextmanager
async def serving(handler, limit=None, **options):
    running = server.HttpServer(handler, limits=limit, **options)
    running.port = await running.start("127.0.0.1", 0)
    try:
        yield running
    finally:
        await running.close()


@contextlib.asynccontextmanager
async def connected(running, data=b""):
    """A connection on which the server finds `data` when it accepts it, however late this loop is."""
    to_server = socket.create_connection(("127.0.0.1", running.port))
    to_server.setblocking(False)
    num_sent = to_server.send(data)
    reader, writer = await asyncio.open_connection(sock=to_server)
    writer.write(data[num_sent:])
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def talk(running, data):
    """Everything the server says to `data` until it closes."""
    async with connected(running, data) as (reader, _), asyncio.timeout(PATIENT_S):
        return await reader.read()


def last(path="/", method="GET", head="", body=b""):
    """A request after which the server closes."""
    return f"{method} {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n{head}\r\n".encode() + body


def hello(exchange):
    exchange.respond(200, b"hello " + exchange.request.path.encode())


async def test_connection_is_reused_for_the_next_request():
    async with serving(hello) as running, connected(running) as (reader, writer):
        for path in (b"/1", b"/2"):
            writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: h\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(8)

            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert body == b"hello " + path


async def test_pipelined_requests_are_answered_in_order():
    gates = [asyncio.Event(), asyncio.Event(), asyncio.Event()]

    async def handle(exchange):
        number = int(exchange.request.path[1:])
        await gates[number].wait()
        exchange.respond(200, b"<%d>" % number)
        if number:
            gates[number - 1].set()

    async with serving(handle) as running:
        gates[0].set()
        gates[1].set()
        gates[2].set()
        data = b"GET /2 HTTP/1.1\r\nhost: h\r\n\r\nGET /1 HTTP/1.1\r\nhost: h\r\n\r\n" + last("/0")
        text = await talk(running, data)

    assert text.index(b"<2>") < text.index(b"<1>") < text.index(b"<0>")


async def test_thousand_requests_in_one_write_are_all_answered():
    async with serving(hello) as running:
        text = await talk(running, b"GET /x HTTP/1.1\r\nhost: h\r\n\r\n" * 999 + last("/end"))

    assert text.count(b"hello /x") == 999
    assert text.endswith(b"hello /end")


async def test_a_stream_written_from_callbacks_after_the_handler_returned():
    kept = []

    def handle(exchange):
        exchange.start_stream(200, content_type="text/event-stream")
        kept.append(exchange)

    async with serving(handle) as running, connected(running) as (reader, writer):
        writer.write(last())
        await until(lambda: kept)
        kept[0].write(b"one")
        first = await reader.readuntil(b"one\r\n")
        kept[0].end(b"two")
        rest = await reader.read()

    assert first.endswith(b"\r\n\r\n3\r\none\r\n")
    assert rest == b"3\r\ntwo\r\n0\r\n\r\n"


async def test_chunks_of_one_loop_turn_stay_in_order():
    async def handle(exchange):
        exchange.start_stream(200, content_type="text/plain")
        for piece in (b"1", b"2", b"3"):
            exchange.write(piece)
        await asyncio.sleep(0)
        exchange.write(b"4")
        exchange.end(b"5")

    async with serving(handle) as running:
        text = await talk(running, last())

    chunks = b"".join(b"1\r\n%d\r\n" % number for number in range(1, 6))

    assert text.endswith(b"\r\n\r\n" + chunks + b"0\r\n\r\n")


async def test_accepted_sockets_do_not_delay_small_writes():
    async with serving(hello) as running, connected(running):
        await until(lambda: running.connections)
        (connection,) = running.connections
        accepted = connection._transport.get_extra_info("socket")

        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_the_body_may_be_waited_for_with_continue():
    async with (
        serving(lambda x: x.respond(200, x.request.body)) as running,
        connected(running) as (reader, writer),
    ):
        writer.write(
            b"POST / HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\nconnection: close\r\ncontent-length: 2\r\n\r\n"
        )
        first = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"ok")
        rest = await reader.read()

    assert first == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert rest.endswith(b"\r\n\r\nok")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: h\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nhost: h\r\na: " + b"b" * 300_000, b"431"),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 209715200\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\nexpect: gold\r\n\r\n", b"417"),
    ],
)
async def test_refused_request_gets_a_status_and_closes_its_connection(data, status):
    async with serving(hello) as running:
        text = await talk(running, data)

    assert text.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in text


async def test_client_that_sends_a_refused_body_still_reads_the_response():
    async with serving(hello, parser.HttpLimits(body_bytes=1000)) as running:
        data = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 4000000\r\n\r\n" + b"x" * 4_000_000
        text = await talk(running, data)

    assert text.startswith(b"HTTP/1.1 413 ")


async def test_room_for_bodies_is_bounded_over_all_connections_and_given_back():
    limit = parser.HttpLimits(kept_body_bytes=3 * parser.FREE_BODY_BYTES)
    size = 3 * parser.FREE_BODY_BYTES  # of which two thirds count
    head = f"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: {size}\r\n\r\n".encode()
    async with serving(hello, limit) as running:
        async with connected(running) as (reader, writer):
            writer.write(head + b"x" * (size - 1))
            await until(lambda: running._kept_body_bytes > parser.FREE_BODY_BYTES)
            answer = await talk(
                running, last("/", "POST", f"content-length: {size}\r\n", b"x" * size)
            )
            largest = await reader.read(4096)
        await until(lambda: not running._kept_body_bytes)

    assert largest.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1\r\n" in largest
    assert answer.startswith(b"HTTP/1.1 200")


async def test_body_that_finds_no_smaller_room_is_refused_itself():
    limit = parser.HttpLimits(kept_body_bytes=parser.FREE_BODY_BYTES)
    size = 3 * parser.FREE_BODY_BYTES
    async with serving(hello, limit) as running:
        answer = await talk(running, last("/", "POST", f"content-length: {size}\r\n", b"x" * size))
        kept = running._kept_body_bytes
        again = await talk(running, last("/", "POST", "content-length: 2\r\n", b"xx"))

    assert answer.startswith(b"HTTP/1.1 503")
    assert kept == 0
    assert again.startswith(b"HTTP/1.1 200")


async def test_refused_body_takes_no_memory_while_its_client_lingers():
    limit = parser.HttpLimits(kept_body_bytes=parser.FREE_BODY_BYTES)
    size = 3 * parser.FREE_BODY_BYTES
    head = f"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: {size}\r\n\r\n".encode()
    async with serving(hello, limit) as running, connected(running) as (reader, writer):
        writer.write(head + b"x" * size)
        answer = await reader.read(4096)
        (connection,) = running.connections

        assert answer.startswith(b"HTTP/1.1 503")
        assert connection._parser._body == b""


async def test_request_without_a_right_gets_no_continue_and_its_answer_at_once():
    def refuse(head):
        raise parser.RequestRefused(401, "no key", body=b"{}", headers=(("x-why", "key"),))

    async with serving(hello, check_head=refuse) as running:
        answer = await talk(
            running,
            b"POST / HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n",
        )

    assert answer.startswith(b"HTTP/1.1 401")
    assert b"x-why: key" in answer


async def test_large_body_is_decoded_beside_the_event_loop():
    body = b"x" * (exchange.SMALL_BODY_BYTES + 1)
    threads, kept = [], []

    async def handle(client):
        await client.decode_body(lambda body: threads.append(threading.current_thread()))
        kept.append(len(client.request.body))
        client.respond(200, b"")

    async with serving(handle) as running:
        for data in (b"small", body):
            await talk(running, last("/", "POST", f"content-length: {len(data)}\r\n", data))

    assert [thread is threading.main_thread() for thread in threads] == [True, False]
    assert kept == [5, 0]


async def test_valid_request_before_a_malformed_one_is_answered_first():
    async with serving(hello) as running:
        text = await talk(running, b"GET /a HTTP/1.1\r\nhost: h\r\n\r\nnonsense\r\n\r\n")

    assert text.index(b"hello /a") < text.index(b"HTTP/1.1 400 ")


async def test_application_formats_error_responses_of_the_server():
    def shaped(status, message, path):
        del message
        return f"<{status} {path}>".encode()

    async with serving(hello, error_body=shaped) as running:
        nonsense = await talk(running, b"nonsense\r\n\r\n")
        unmet = await talk(running, b"POST /a?b HTTP/1.1\r\nhost: h\r\nexpect: more\r\n\r\n")

    assert nonsense.endswith(b"\r\n\r\n<400 >")
    assert unmet.endswith(b"\r\n\r\n<417 /a>")


async def test_a_half_sent_request_is_refused_after_a_while():
    async with serving(hello, QUICK) as running:
        text = await talk(running, b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\nhalf")

    assert text.startswith(b"HTTP/1.1 408 ")


async def test_a_request_that_trickles_is_refused_too():
    head = b"GET / HTTP/1.1\r\nhost: h\r\n"
    async with serving(hello, QUICK) as running, connected(running, head) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                writer.write(b"a: b\r\n")
                await asyncio.sleep(0.01)
                if not running.connections:
                    break

        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def test_an_idle_connection_is_closed_after_a_while():
    request = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
    async with serving(hello, QUICK) as running, connected(running, request) as (reader, _):
        async with asyncio.timeout(PATIENT_S):
            text = await reader.read()

    assert text.endswith(b"hello /")


async def test_a_connection_that_never_speaks_is_closed_after_a_while():
    async with serving(hello, QUICK) as running, connected(running) as (reader, _):
        async with asyncio.timeout(PATIENT_S):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        await until(lambda: not running.connections)


async def test_a_slow_answer_is_not_cut_off_by_the_limits_for_requests():
    async def handle(exchange):
        await asyncio.sleep(0.08)  # past both limits
        exchange.respond(200, b"late")

    async with serving(handle, QUICK) as running:
        text = await talk(running, last())

    assert text.endswith(b"late")


async def test_client_that_does_not_read_its_stream_is_disconnected():
    gone, kept = [], []

    def handle(exchange):
        exchange.start_stream(200, content_type="text/plain")
        exchange.on_disconnect(lambda: gone.append(1))
        kept.append(exchange)

    limit = parser.HttpLimits(write_buffer_bytes=100_000)
    async with serving(handle, limit) as running, connected(running) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        await until(lambda: kept)
        for _ in range(2000):
            kept[0].write(b"x" * 10_000)
            await asyncio.sleep(0)
            if kept[0].is_closed:
                break

        assert gone == [1]
        await until(lambda: not running.connections)


async def test_requests_behind_an_answer_that_is_not_read_are_not_taken_in():
    big = b"x" * 20_000_000
    async with (
        serving(lambda x: x.respond(200, big)) as running,
        connected(running, b"GET / HTTP/1.1\r\nhost: h\r\n\r\n") as (reader, writer),
    ):
        await until(lambda: running.connections)
        (connection,) = running.connections
        await until(lambda: connection._write_paused)
        writer.write(last())
        await until(lambda: connection._pending)
        is_reading = connection._transport.is_reading()
        text = await reader.read()

    assert not is_reading
    assert text.count(b"HTTP/1.1 200 OK") == 2


async def test_client_that_sends_and_reads_no_more_is_cut_off():
    begun = []

    def handle(client):
        client.start_stream(200, content_type="text/plain")
        client.write(b"x" * 20_000_000)
        begun.append(client)

    limit = parser.HttpLimits(request_s=0.05, sweep_s=0.01, write_buffer_bytes=2**25)
    request = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
    async with serving(handle, limit) as running, connected(running, request) as (_, writer):
        await until(lambda: begun)
        writer.write_eof()
        await until(lambda: begun[0].is_closed)
        await until(lambda: not running.connections)


async def test_a_large_answer_reaches_a_slow_reader_whole():
    big = b"x" * 20_000_000
    async with serving(lambda x: x.respond(200, big)) as running:
        text = await talk(running, b"GET / HTTP/1.1\r\nhost: h\r\n\r\n" + last())

    assert text.count(b"HTTP/1.1 200 OK") == 2
    assert len(text) > 40_000_000


@pytest.mark.parametrize("write_buffer_bytes", [2**23, 2**25])  # less and more than the answer
async def test_a_large_answer_reaches_a_reader_that_takes_longer_than_connections_idle(
    write_buffer_bytes,
):
    limit = parser.HttpLimits(
        request_s=1.0, idle_s=1.0, sweep_s=0.01, write_buffer_bytes=write_buffer_bytes
    )
    big, num_read, loop = b"x" * 20_000_000, 0, asyncio.get_running_loop()
    async with (
        serving(lambda x: x.respond(200, big), limit) as running,
        connected(running) as (reader, writer),
    ):
        began_at = loop.time()
        writer.write(last())
        while piece := await reader.read(100_000):
            num_read += len(piece)
            await asyncio.sleep(began_at + num_read / 8e6 - loop.time())  # 8 MB/s

    assert num_read > len(big)


async def test_a_client_that_goes_away_is_noticed_at_once():
    gone, kept = asyncio.Event(), []

    def handle(exchange):
        exchange.on_disconnect(gone.set)
        kept.append(exchange)

    async with serving(handle) as running:
        async with connected(running) as (_, writer):
            writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
            await until(lambda: kept)
        async with asyncio.timeout(PATIENT_S):
            await gone.wait()

        assert kept[0].is_closed


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_exception_in_a_handler_is_a_500_and_is_logged(kind, caplog):
    def broken(exchange):
        raise RuntimeError("secret")

    async def broken_later(exchange):
        broken(exchange)

    async with serving(broken if kind == "sync" else broken_later) as running:
        text = await talk(running, last())

    assert text.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in text
    assert "secret" in caplog.text


async def test_handler_that_waits_for_what_is_cancelled_answers_500(caplog):
    async def wait(exchange):
        awaited = asyncio.get_running_loop().create_future()
        awaited.cancel()
        await awaited

    async with serving(wait) as running:
        text = await talk(running, last())

    assert text.startswith(b"HTTP/1.1 500 ")
    assert "GET / failed" in caplog.text


async def test_handler_that_is_cancelled_because_its_client_went_away_is_not_logged(caplog):
    waits = []

    async def wait(exchange):
        exchange.on_disconnect(asyncio.current_task().cancel)
        waits.append(exchange)
        await asyncio.Event().wait()

    async with serving(wait) as running:
        async with connected(running, last()):
            await until(lambda: waits)
        await until(lambda: not running.answering)

    assert not caplog.text


async def test_exception_in_a_stream_leaves_the_response_incomplete(caplog):
    def broken(exchange):
        exchange.start_stream(200, content_type="text/plain")
        exchange.write(b"x")
        raise RuntimeError("secret")

    async with serving(broken) as running, connected(running) as (reader, writer):
        writer.write(last())
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read()).endswith(b"0\r\n\r\n")

    assert "secret" in caplog.text


async def test_request_is_answered_beside_300_idle_connections():
    async with serving(hello) as running, contextlib.AsyncExitStack() as stack:
        for _ in range(300):
            await stack.enter_async_context(connected(running))
        text = await talk(running, last())

    assert text.endswith(b"hello /")


async def test_connection_over_the_limit_gets_a_503():
    async with serving(hello, parser.HttpLimits(num_connections=1)) as running, connected(running):
        await until(lambda: running.connections)
        async with connected(running) as (reader, _):
            text = await reader.read()

    assert text.startswith(b"HTTP/1.1 503 ")


async def test_flood_of_connections_takes_no_more_files_than_are_in_reserve(monkeypatch):
    monkeypatch.setattr(server, "_MAX_REFUSED", 2)
    async with serving(hello, parser.HttpLimits(num_connections=1)) as running:
        flood = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(20)]
        async with asyncio.timeout(PATIENT_S):
            last = [await reader.read() for reader, _ in flood[1:]]

        assert last == [last[0]] * 2 + [b""] * 17
        assert last[0].startswith(b"HTTP/1.1 503 ")
        assert len(running.connections) == 3
    for _, writer in flood:
        writer.close()


async def test_drain_waits_for_running_responses_which_say_that_their_connection_closes():
    kept = []
    async with serving(kept.append) as running, connected(running) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        await until(lambda: kept)
        draining = asyncio.ensure_future(running.drain(PATIENT_S))
        await asyncio.sleep(0)
        was_done = draining.done()
        kept[0].respond(200, b"done")
        text = await reader.read()

        assert not was_done
        assert await draining
        assert b"connection: close" in text
        assert text.endswith(b"done")


async def test_drain_returns_false_at_its_time_limit():
    kept = []
    async with serving(kept.append) as running, connected(running) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        await until(lambda: kept)

        assert not await running.drain(0.01)


async def test_drain_of_an_idle_server_succeeds():
    async with serving(hello) as running:
        assert await running.drain(PATIENT_S)


async def test_connection_closes_after_its_response_during_a_drain():
    async with serving(hello) as running:
        await running.drain(PATIENT_S)
        text = await talk(running, b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")

    assert b"connection: close" in text


async def test_error_for_a_port_in_use_says_what_to_do():
    async with serving(hello) as running:
        with pytest.raises(errors.ConfigError) as caught:
            await server.HttpServer(hello).start("127.0.0.1", running.port)

    assert str(caught.value) == (
        f"port {running.port} is in use: stop the other process or choose --http-port"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b", ".local"])
async def test_an_address_of_another_machine_is_refused_by_name(host):
    with pytest.raises(errors.ConfigError, match=re.escape(host)):
        await server.HttpServer(hello).start(host, 0)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-days", "2", "-subj", "/CN=localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


async def test_server_answers_over_tls(certificate):
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    trust = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    async with serving(hello, tls=tls) as running:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", running.port, ssl=trust, server_hostname="localhost"
        )
        writer.write(last("/secure"))
        text = await reader.read()
        writer.close()
        await writer.wait_closed()

    assert text.endswith(b"hello /secure")


async def test_request_that_comes_with_the_end_of_the_handshake_is_answered(certificate):
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    trust = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    received, to_send, text, is_done = ssl.MemoryBIO(), ssl.MemoryBIO(), b"", False
    client = trust.wrap_bio(received, to_send, server_hostname="localhost")
    async with (
        serving(hello, tls=tls) as running,
        connected(running) as (reader, writer),
        asyncio.timeout(PATIENT_S),
    ):
        while not is_done:
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
                is_done = True
            if not is_done:
                writer.write(to_send.read())
                received.write(await reader.read(2**16))
        client.write(last("/early"))
        writer.write(to_send.read())
        while b"hello /early" not in text:
            received.write(await reader.read(2**16))
            with contextlib.suppress(ssl.SSLWantReadError):
                text += client.read()


async def test_connections_in_a_handshake_of_tls_count_towards_the_limit(certificate):
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    limit = parser.HttpLimits(num_connections=3)
    async with serving(hello, limit, tls=tls) as running, contextlib.AsyncExitStack() as stack:
        most = limit.num_connections + server._MAX_REFUSED
        silent = [await stack.enter_async_context(connected(running)) for _ in range(most)]
        await until(lambda: len(running.arriving) == most)
        reader, _ = await stack.enter_async_context(connected(running))
        async with asyncio.timeout(PATIENT_S):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        for _, writer in silent:
            writer.close()
        await until(lambda: not running.arriving)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.binary(min_size=1, max_size=200), max_size=4))
async def test_server_still_answers_after_malformed_input(pieces):
    async with serving(hello, QUICK) as running:
        with contextlib.suppress(ConnectionError):
            await talk(running, b"".join(pieces))
        text = await talk(running, last("/still"))

    assert text.endswith(b"hello /still")


async def test_request_without_a_host_is_refused():
    async with serving(hello) as running:
        missing = await talk(running, b"GET / HTTP/1.1\r\n\r\n")
        twice = await talk(running, b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n")
        old = await talk(running, b"GET / HTTP/1.0\r\n\r\n")

    assert missing.startswith(b"HTTP/1.1 400 ")
    assert b"Host once, got 'none'" in missing
    assert twice.startswith(b"HTTP/1.1 400 ")
    assert old.startswith(b"HTTP/1.1 200 ")


@pytest.mark.skipif(
    not socket.has_dualstack_ipv6(), reason="this host has no sockets of both families"
)
async def test_double_colon_listens_on_both_families():
    peers = []

    def note(exchange):
        peers.append(exchange.request.peer.rpartition(":")[0])
        exchange.respond(200, b"")

    running = server.HttpServer(note)
    running.port = await running.start("::", 0)
    try:
        for host in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(host, running.port)
            writer.write(last())
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
    finally:
        await running.close()

    assert peers == ["127.0.0.1", "::1"]


async def test_handler_switches_to_another_protocol_where_the_server_takes_offers():
    offer = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: echo/1\r\n\r\n"

    def switch(client):
        client.switch_protocol([("upgrade", "echo/1")], lambda data: client.end(data.upper()))

    async with serving(switch, takes_upgrades=True) as running, connected(running) as streams:
        streams[1].write(offer)
        head = await streams[0].readuntil(b"\r\n\r\n")
        streams[1].write(b"hello")
        rest = await streams[0].read()
    async with serving(hello) as running:
        ignored = await talk(running, offer.replace(b"Upgrade\r", b"Upgrade, close\r"))

    assert head == b"HTTP/1.1 101 Switching Protocols\r\nupgrade: echo/1\r\n\r\n"
    assert rest == b"HELLO"
    assert ignored.startswith(b"HTTP/1.1 200")


class Sink:
    """Keeps the body of a request; refuses what has more than ten bytes, as a full disk would."""

    max_bytes = 1000

    def __init__(self):
        self.body, self.is_closed = b"", False

    def write(self, piece):
        self.body += piece
        if len(self.body) > 10:
            raise parser.RequestRefused(503, "the disk is full")

    def close(self):
        self.is_closed = True


@contextlib.asynccontextmanager
async def sinking(handler=hello):
    """A server whose bodies go to sinks, which it has opened."""
    opened = []

    def open_sink(request):
        opened.append(Sink())
        return opened[-1]

    limits = parser.HttpLimits(body_bytes=5, linger_s=0.05, sweep_s=0.01)
    async with serving(handler, limits, open_sink=open_sink) as running:
        running.sinks = opened
        yield running


async def test_sink_takes_a_body_that_is_larger_than_others_may_be():
    taken = []

    def handle(client):
        taken.append((client.request.body, client.request.sink.body, client.request.sink.is_closed))
        hello(client)

    async with sinking(handle) as running:
        head = "content-length: 10\r\n"
        answered = await talk(running, last(method="POST", head=head, body=b"0123456789"))

        assert answered.startswith(b"HTTP/1.1 200 ")
        assert taken == [(b"", b"0123456789", False)]
        await until(lambda: running.sinks[0].is_closed)


async def test_sink_that_is_full_refuses_the_rest():
    async with sinking() as running:
        head = "content-length: 900\r\n"
        answered = await talk(running, last(method="POST", head=head, body=b"x" * 11))

        assert answered.startswith(b"HTTP/1.1 503 ")
        assert b"the disk is full" in answered
        assert running.sinks[0].is_closed


async def test_sink_is_closed_when_its_client_goes_midway():
    async with sinking() as running:
        async with connected(running) as (_, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nhalf")
            await until(lambda: running.sinks and running.sinks[0].body == b"half")

        await until(lambda: running.sinks[0].is_closed)


async def test_sink_of_a_request_behind_another_is_closed_when_the_client_goes():
    answering = []
    async with sinking(answering.append) as running:
        async with connected(running) as (_, writer):
            one = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\nhi"
            writer.write(one + one)
            await until(lambda: len(running.sinks) == 2 and answering)

        await until(lambda: all(sink.is_closed for sink in running.sinks))


PIECE, NUM_PIECES = b"x" * 2**18, 200  # 50 MB, six times what may wait for a client


async def send_all(client, sent=None):
    client.start_stream(200, content_type="text/plain")
    for _ in range(NUM_PIECES):
        await client.send(PIECE)
        if sent is not None:
            sent.append(1)
    client.end()


async def test_long_stream_is_sent_as_fast_as_its_client_reads():
    sent = []
    async with (
        serving(lambda client: send_all(client, sent)) as running,
        connected(running) as (reader, writer),
    ):
        writer.write(last())
        await until(lambda: len(sent) >= 4)
        num_sent = len(sent)
        answered = await reader.read()

    assert num_sent < NUM_PIECES / 2
    assert answered.count(PIECE) == NUM_PIECES


async def test_client_that_stops_reading_a_long_stream_is_cut_off():
    ended = asyncio.Event()

    async def handle(client):
        await send_all(client)
        ended.set()

    async with serving(handle, QUICK) as running, connected(running, last()):
        async with asyncio.timeout(PATIENT_S):
            await ended.wait()
        await until(lambda: not running.connections)


async def test_half_a_request_behind_a_long_stream_that_is_not_read_adds_nothing_to_it():
    requests = b"GET /1 HTTP/1.1\r\nhost: h\r\n\r\nGET /2"
    async with serving(send_all, QUICK) as running, connected(running, requests) as (reader, _):
        await until(lambda: running.connections)
        (connection,) = running.connections
        await until(lambda: not running.connections or connection._lingering)
        with contextlib.suppress(ConnectionError):
            assert b"408" not in await reader.read()


async def test_client_that_goes_ends_the_wait_of_a_long_stream():
    sending, ended = asyncio.Event(), asyncio.Event()

    async def handle(client):
        sending.set()
        await send_all(client)
        ended.set()

    async with serving(handle) as running:
        async with connected(running) as (_, writer):
            writer.write(last())
            await sending.wait()
        async with asyncio.timeout(PATIENT_S):
            await ended.wait()
