"""Hostile or broken clients at a real frontend: their cost is bounded, and other clients are served."""

import contextlib
import json
import os
import pathlib
import resource
import socket
import threading

import httpx
import pytest
from deployment import MODEL, Deployment, chat, rss_bytes

from waiting import PATIENT_S, eventually

MB = 2**20
READ_TIMEOUT_S = 10.0  # in which a busy machine sends 30 MB
NUM_IDLE = 2000
COST_S = (
    10.0  # of processor time: an attack may cost the frontend as much, and so long others may wait
)
BIG = 200 * MB


def forget_peak(pid):
    """Restart the count of the largest resident size."""
    pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid):
    """Return the largest resident size since the restart of the count."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    (row,) = [row for row in status.splitlines() if row.startswith("VmHWM:")]
    return int(row.split()[1]) * 1024


def cpu_s(pid):
    """Return the seconds of processor time that a process has taken, which do not depend on other processes."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class Others:
    """Well-behaved clients that send one request after another during an attack."""

    def __init__(self, frontend):
        self._frontend = frontend
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.statuses = []

    def _ask(self):
        with httpx.Client(timeout=PATIENT_S) as client:
            while not (self.statuses and self._is_over.is_set()):
                body = chat("hi", max_tokens=2)
                url = f"{self._frontend.url}/v1/chat/completions"
                self.statuses.append(client.post(url, json=body).status_code)

    def __enter__(self):
        self.before = rss_bytes(self._frontend.pid)
        self.cpu_before_s = cpu_s(self._frontend.pid)
        forget_peak(self._frontend.pid)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def check(self, grown_mb):
        """Assert that all were answered, and that the attack cost bounded time and no more memory than this."""
        assert set(self.statuses) == {200}
        assert cpu_s(self._frontend.pid) - self.cpu_before_s < COST_S + 0.05 * len(self.statuses)
        grown = peak_bytes(self._frontend.pid) - self.before
        assert grown < grown_mb * MB


@pytest.fixture(scope="module")
def frontend(tmp_path_factory):
    deployment = Deployment(tmp_path_factory.mktemp("hostile"))
    frontend = deployment.frontend("--http-read-timeout-secs", str(READ_TIMEOUT_S))
    frontend.worker = deployment.mocker("--speedup-ratio", "1000000")
    frontend.others.append(frontend.worker)
    frontend.await_models([MODEL])
    frontend.chat()  # what is made once is there
    yield frontend
    deployment.end()


def connect(frontend, *, takes_bytes=None):
    """Open a connection with a small receive buffer."""
    made = socket.socket()
    if takes_bytes is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, takes_bytes)
    made.settimeout(PATIENT_S)
    made.connect(("127.0.0.1", int(frontend.url.rpartition(":")[2])))
    return made


def post(body, *heads, path="/v1/chat/completions"):
    """Return a request in bytes, with its length unless `heads` say otherwise."""
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *heads]
    if not heads:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def endless():
    """Return a request for a stream that is far larger than all buffers."""
    return json.dumps(chat("hi", n=64, max_tokens=1900, ignore_eos=True, stream=True)).encode()


def read_all(connection):
    """Read until the server closes or resets the connection."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            received += piece
    return bytes(received)


def pour(connection, pieces):
    """Send until the server takes no more."""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)


def test_client_that_never_reads_is_cut_off(frontend):
    with Others(frontend) as others, contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(connect(frontend, takes_bytes=4096))
            connection.sendall(post(endless()))
        eventually(
            lambda: frontend.log.read_text().count("reads its stream too slowly") == 3,
            what="they are cut off",
        )

    others.check(grown_mb=64)


def test_slow_reader_gets_a_short_stream_whole(frontend):
    body = json.dumps(chat("hi", n=4, max_tokens=200, ignore_eos=True, stream=True)).encode()
    received = bytearray()
    with connect(frontend, takes_bytes=4096) as connection:
        connection.sendall(post(body))
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(8192)
            assert frontend.chat("hi", max_tokens=1).status_code == 200  # between any two pieces

    assert received.count(b'"finish_reason":"length"') == 4
    assert b"data: [DONE]" in received


@pytest.mark.parametrize(
    "half",
    [b"POST /v1/chat", post(b"", "content-length: 1000") + b'{"model"', post(b"")[:-2]],
    ids=["line", "body", "head"],
)
def test_half_sent_requests_are_refused(frontend, half):
    with Others(frontend) as others, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(frontend)) for _ in range(50)]
        for connection in connections:
            connection.sendall(half)
        answers = [read_all(connection) for connection in connections]

    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
    others.check(grown_mb=16)


@pytest.fixture
def many_files():
    """Raise the limit of open files to the connections of the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NUM_IDLE + 500:
        pytest.skip(f"needs {NUM_IDLE} connections, and the system allows {hard} open files")
    if soft < NUM_IDLE + 500:
        resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_IDLE + 500, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_thousands_of_idle_connections_do_not_delay_other_clients(frontend, many_files):
    ask = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
    with contextlib.ExitStack() as stack:
        with Others(frontend) as others:
            connections = []
            for _ in range(NUM_IDLE):  # each has been served once, and then idles
                connections.append(stack.enter_context(connect(frontend)))
                connections[-1].sendall(ask)
            served = sum(
                connection.recv(4096).startswith(b"HTTP/1.1 200 ") for connection in connections
            )
        again = connections[-1]  # the server closes those that have idled for 75 s
        again.sendall(ask)

        assert served == NUM_IDLE
        assert again.recv(4096).startswith(b"HTTP/1.1 200 ")
        others.check(grown_mb=64)


def test_body_with_a_too_large_length_is_refused_unread(frontend):
    with Others(frontend) as others, connect(frontend) as connection:
        connection.sendall(post(b"", f"content-length: {BIG}"))
        pour(connection, (b"x" * MB for _ in range(BIG // MB)))
        answer = read_all(connection)

    assert not answer or answer.startswith(b"HTTP/1.1 413 ")
    others.check(grown_mb=16)


def test_body_without_a_length_is_cut_off_at_the_limit(frontend):
    with Others(frontend) as others, connect(frontend) as connection:
        connection.sendall(post(b"", "transfer-encoding: chunked"))
        pour(connection, (b"100000\r\n" + b"x" * MB + b"\r\n" for _ in range(BIG // MB)))
        answer = read_all(connection)

    assert not answer or answer.startswith(b"HTTP/1.1 413 ")
    others.check(grown_mb=64)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * MB}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 200_000}),
        ("/v1/completions", {"prompt": "x" * 7 * MB}),
        ("/v1/completions", {"prompt": [7] * 3 * MB}),
        ("/v1/embeddings", {"input": ["hello " * MB] * 5}),
        ("/tokenize", {"prompt": "hello " * MB}),
        ("/detokenize", {"tokens": [7] * 3 * MB}),
    ],
    ids=["text", "messages", "prompt", "ids", "embeddings", "tokenize", "detokenize"],
)
def test_too_long_prompt_is_refused_before_it_costs_much(frontend, path, fields):
    # encoded before: it holds the interpreter, and the frontend closes connections that say nothing
    body = json.dumps({"model": MODEL, **fields}, separators=(",", ":"))
    headers = {"content-type": "application/json"}
    with Others(frontend) as others:
        answer = httpx.post(
            f"{frontend.url}{path}", content=body, headers=headers, timeout=PATIENT_S
        )

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))
    others.check(grown_mb=240)  # bodies of up to 30 MB and what they decode to, but no tokens


def test_lists_without_end_do_not_hold_up_others(frontend):
    lists = b'{"model":"m","messages":[' + b"[]," * (7 * MB // 3) + b"[]]}"
    with Others(frontend) as others, contextlib.ExitStack() as stack:
        connections = []
        for _ in range(8):
            connections.append(stack.enter_context(connect(frontend)))
            connections[-1].sendall(post(lists))
        answers = [connection.recv(4096) for connection in connections]

    assert all(answer.startswith(b"HTTP/1.1 400 ") for answer in answers)
    assert all(b"lists and objects" in answer for answer in answers)
    others.check(grown_mb=160)  # eight bodies, and none of them decoded


def test_idle_connection_keeps_no_memory_of_its_requests(frontend):
    body = json.dumps(chat("x" * 7 * MB)).encode()
    before = rss_bytes(frontend.pid)
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            connection = stack.enter_context(connect(frontend))
            connection.sendall(post(body))
            assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")

        eventually(
            lambda: rss_bytes(frontend.pid) - before < 50 * MB,
            what="they are forgotten",
        )


@pytest.mark.parametrize(
    "head",
    [
        b"x: " + b"y" * 300_000,
        b"x: y\r\n" * 100_000,
        b"\r\n".join(b"x%d: y" % number for number in range(10_000)),
    ],
    ids=["long", "endless", "many"],
)
def test_oversized_headers_are_refused(frontend, head):
    with Others(frontend) as others, connect(frontend) as connection:
        pour(connection, [b"GET /live HTTP/1.1\r\n", head])
        answer = read_all(connection)

    assert not answer or answer.startswith(b"HTTP/1.1 431 ")
    others.check(grown_mb=16)
