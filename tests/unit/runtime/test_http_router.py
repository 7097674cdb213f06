"""Which handler gets a request, and what the others are told."""

import msgspec
import pytest

from dynamo.runtime.http import exchange, server
from dynamo.runtime.http.exchange import Exchange, Request


class Wire:
    def __init__(self):
        self.text = b""

    def write(self, data):
        self.text += data

    def write_soon(self, data):
        self.text += data


def ask(method, path):
    """The name of the handler that was called, and what was written."""
    called = []
    table = {
        ("GET", "/models"): lambda _: called.append("list"),
        ("POST", "/models"): lambda _: called.append("add"),
        ("GET", "/models/**"): lambda _: called.append("one"),
        ("GET", "/answers/*"): lambda _: called.append("answer"),
        ("GET", "/answers/*/items"): lambda _: called.append("items"),
        ("GET", "/models/deep/*"): lambda _: called.append("deep"),
    }
    wire = Wire()
    request = Request(method=method, path=path, query="", headers={}, body=b"", peer="")
    exchange.HttpRouter(table, error_body=server.plain_error)(Exchange(request, wire, lambda: None))
    return called, wire.text


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", "/models", "list"),
        ("HEAD", "/models", "list"),
        ("POST", "/models", "add"),
        ("GET", "/models/a/b", "one"),
        ("GET", "/models/deep/b", "deep"),
        ("GET", "/answers/a", "answer"),
        ("GET", "/answers/a/items", "items"),
    ],
)
def test_router_calls_the_handler_of_method_and_path(method, path, name):
    called, text = ask(method, path)

    assert called == [name]
    assert text == b""


@pytest.mark.parametrize("path", ["/answers/a/b", "/answers/a/b/items", "/answers/a/items/x"])
def test_path_below_an_id_is_never_read_as_one(path):
    called, text = ask("GET", path)

    assert called == []
    assert text.startswith(b"HTTP/1.1 404 ")


def test_an_unknown_path_is_named():
    called, text = ask("GET", "/nope")

    assert called == []
    assert text.startswith(b"HTTP/1.1 404 ")
    assert msgspec.json.decode(text.partition(b"\r\n\r\n")[2]) == {
        "error": {"message": "no such path: GET /nope", "code": 404}
    }


def test_wrong_method_gets_405_with_the_allowed_methods():
    called, text = ask("DELETE", "/models")

    assert called == []
    assert text.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nallow: GET, HEAD, OPTIONS, POST\r\n" in text


def test_options_of_the_whole_server_names_all_methods():
    called, text = ask("OPTIONS", "*")

    assert called == []
    assert text.startswith(b"HTTP/1.1 204 ")
    assert b"\r\nallow: GET, HEAD, OPTIONS, POST\r\n" in text


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_only_options_may_ask_the_whole_server(method):
    assert ask(method, "*")[1].startswith(b"HTTP/1.1 404 ")
