"""`dynamo.client` with answers that are cut off or are no HTTP."""

import http.client
import http.server
import io
import threading
import urllib.error
import urllib.request

import pytest

from dynamo import client
from dynamo.base import errors


class LiveHandler(http.server.BaseHTTPRequestHandler):
    """Answers one request."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"live")

    def log_message(self, *_):
        """Say nothing."""


class CutBody(io.BytesIO):
    """A body that ends before its length."""

    def read(self, *_):
        raise http.client.IncompleteRead(b"{", 99)


def refuse(reason):
    def refuse(*_, **__):
        raise reason

    return refuse


def test_process_of_this_machine_is_asked_without_the_proxy_of_the_environment(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with http.server.HTTPServer(("127.0.0.1", 0), LiveHandler) as server:
        answering = threading.Thread(target=server.handle_request, daemon=True)
        answering.start()
        answer = client.HttpClient(f"http://127.0.0.1:{server.server_port}").read("/live")
        answering.join()

    assert answer == "live"


@pytest.mark.parametrize(
    "open_url",
    [
        lambda *_, **__: CutBody(),
        refuse(urllib.error.HTTPError("http://worker", 500, "", None, CutBody())),
        refuse(http.client.BadStatusLine("no HTTP")),
    ],
    ids=["cut answer", "cut refusal", "another protocol"],
)
def test_answer_that_cannot_be_read_is_unavailable(monkeypatch, open_url):
    monkeypatch.setattr(urllib.request, "urlopen", open_url)
    worker = client.WorkerClient("http://worker")

    assert not worker.is_healthy()
    with pytest.raises(errors.Unavailable, match="http://worker does not answer"):
        worker.list_loras()


def test_refusal_is_raised_with_its_message_alone(monkeypatch):
    body = io.BytesIO(b'{"error":{"message":"expected an API key","code":"invalid_api_key"}}')
    failure = urllib.error.HTTPError("http://worker", 401, "", None, body)
    monkeypatch.setattr(urllib.request, "urlopen", refuse(failure))

    with pytest.raises(errors.Unauthenticated) as refusal:
        client.WorkerClient("http://worker").list_loras()
    assert str(refusal.value) == "GET http://worker/v1/loras: 401: expected an API key"
