"""The servers that the suites share."""

import pytest

from nats_server import NatsServer


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory):
    """One for all suites; who wants to harm it starts another."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()
