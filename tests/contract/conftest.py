"""The servers that the suites share."""

import pytest

import members
from dynamo.base import membership
from nats_server import NatsServer


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory):
    """One for all suites; who wants to harm it starts another."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """A directory with those of a cluster, and a stranger's."""
    folder = tmp_path_factory.mktemp("certificates")
    members.make_certificates(folder)
    return folder


@pytest.fixture(scope="session")
def credentials_by_name(certificates):
    """The ways in which processes of one cluster know each other."""
    return {
        "open": membership.NO_CREDENTIALS,
        "token": members.with_token(),
        "tls": members.with_tls(certificates),
        "both": members.with_tls(certificates, token=members.TOKEN),
    }
