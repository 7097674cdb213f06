"""The port that a parent holds for its children. The system tests run the processes."""

import socket

import pytest

from dynamo.base import errors
from dynamo.frontend import config
from dynamo.frontend.processes import http_workers


def listen(port, *, shares):
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        made.bind(("127.0.0.1", port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def test_children_share_the_port_and_the_parent_accepts_none():
    with (
        http_workers._bind_port("127.0.0.1", 0) as port,
        listen(port, shares=True) as one,
        listen(port, shares=True) as two,
    ):
        two.close()
        for _ in range(8):
            socket.create_connection(("127.0.0.1", port)).close()
            one.accept()[0].close()  # waits for ever, if the connection went elsewhere


def test_port_of_listening_children_cannot_be_bound():
    with http_workers._bind_port("127.0.0.1", 0) as port, listen(port, shares=True):
        with pytest.raises(OSError, match="in use"):
            listen(port, shares=False)
        with pytest.raises(errors.ConfigError, match=f"port {port} is in use"):
            http_workers._bind_port("127.0.0.1", port).__enter__()


def test_shared_port_of_another_process_is_not_taken_over():
    with listen(0, shares=True) as other:
        port = other.getsockname()[1]
        with pytest.raises(errors.ConfigError, match=f"port {port} is in use"):
            http_workers._bind_port("127.0.0.1", port).__enter__()


@pytest.mark.parametrize(
    ("host", "words"),
    [("192.0.2.1", "cannot listen"), ("no such", "no address"), ("a..b", "no address")],
)
def test_address_of_another_machine_is_a_config_error(host, words):
    with pytest.raises(errors.ConfigError, match=words):
        http_workers._bind_port(host, 0).__enter__()


def test_settings_are_checked_before_anything_starts():
    settings = config.FrontendConfig(http_workers=2, tls_cert_path="x")

    with pytest.raises(errors.ConfigError, match="both or neither"):
        http_workers.serve(settings, [])


def test_children_may_drain_for_as_long_as_they_are_told_to():
    settings = config.FrontendConfig(grace_period_s=30.0, http_graceful_shutdown_timeout_secs=20.0)

    assert http_workers._stop_timeout_s(settings) > 30.0 + 20.0
