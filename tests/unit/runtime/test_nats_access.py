"""Where NATS is, and who we are to it; what is wrong is named, and secrets are not shown."""

import pytest

from dynamo.base import errors
from dynamo.runtime.backends.nats import access


def test_servers_may_be_short():
    read = access.read(("one", "nats://two:5", "nats://[::1]:6"), {})

    assert read.urls == ("nats://one", "nats://two:5", "nats://[::1]:6")
    assert read.addresses == "one:4222, two:5, [::1]:6"
    assert read.tls is None


def test_secrets_are_not_shown():
    environ = {"NATS_AUTH_USERNAME": "u", "NATS_AUTH_PASSWORD": "hush"}
    read = access.read(("nats://me:quiet@host:1",), environ)

    assert (read.username, read.password) == ("u", "hush")
    assert "hush" not in repr(read)
    assert "quiet" not in repr(read) + read.addresses


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("http://host:1", "nats://host:port.*http://host:1"),
        ("nats://", "nats://host:port"),
        ("host:many", "nats://host:port"),
        ("host:0", "nats://host:port"),
        ("nats://host/path", "nats://host:port"),
        ("nats://me:hush@host:many", "got 'nats://…@host:many'"),
        ("nats://me:hush@[fe80::1%eth0]:4222", "fe80::1%eth0.* single link"),
        ("nats://me:hush@[::1", r"got 'nats://…@\[::1'"),
    ],
)
def test_malformed_server_address_is_refused(server, says):
    with pytest.raises(errors.ConfigError, match=f"NATS_SERVER.*{says}") as info:
        access.read((server,), {})

    assert "hush" not in str(info.value)


def test_no_server_at_all_is_refused():
    with pytest.raises(errors.ConfigError, match="at least one"):
        access.read((), {})


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"NATS_AUTH_USERNAME": "u"}, "NATS_AUTH_USERNAME and NATS_AUTH_PASSWORD.*both"),
        ({"NATS_AUTH_TOKEN": "t", "NATS_AUTH_NKEY": "n"}, "NATS_AUTH_TOKEN and NATS_AUTH_NKEY"),
        ({"NATS_TLS_CLIENT_CERT_PATH": "c"}, "NATS_TLS_CLIENT_KEY_PATH.*both"),
        ({"NATS_TLS_CA_CERT_PATH": "/nowhere"}, "PEM.*/nowhere"),
        ({"NATS_AUTH_CREDENTIALS_FILE": "/nowhere"}, "NATS_AUTH_CREDENTIALS_FILE=/nowhere"),
    ],
)
def test_credentials_that_do_not_fit_are_named(environ, says):
    with pytest.raises(errors.ConfigError, match=says):
        access.read(("host",), environ)


def test_a_scheme_asks_for_tls():
    assert access.read(("tls://host",), {}).tls is not None
