"""Endpoints and credentials of etcd are read as etcd's other users write them."""

import pytest

from dynamo.base import errors
from dynamo.runtime.backends.etcd import access


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("http://localhost:2379", "localhost:2379"),
        ("http://etcd", "etcd:2379"),
        ("etcd.example:5000", "etcd.example:5000"),
        ("http://[::1]:7/", "[::1]:7"),
    ],
)
def test_an_endpoint_is_read(endpoint, address):
    whereto = access.read([endpoint], {})

    assert whereto.addresses == (address,)
    assert whereto.tls is None


@pytest.mark.parametrize(
    "endpoint",
    ["ftp://etcd:1", "http://", "http://etcd:port", "http://etcd:70000", "http://etcd/kv"],
)
def test_malformed_endpoint_is_refused_with_its_variable(endpoint):
    with pytest.raises(errors.ConfigError, match="ETCD_ENDPOINTS: expected http://host:port"):
        access.read([endpoint], {})


def test_endpoint_of_a_single_link_is_refused_by_name():
    with pytest.raises(errors.ConfigError, match=r"ETCD_ENDPOINTS .*fe80::1%eth0.* single link"):
        access.read(["http://[fe80::1%eth0]:2379"], {})


def test_password_in_an_endpoint_is_refused_without_printing_the_password():
    with pytest.raises(errors.ConfigError, match="ETCD_AUTH_PASSWORD") as refused:
        access.read(["http://dynamo:s3cret@etcd:2379"], {})

    assert "s3cret" not in str(refused.value)


def test_no_endpoint_at_all_is_refused():
    with pytest.raises(errors.ConfigError, match="at least one"):
        access.read([], {})


def test_mixed_http_and_https_endpoints_are_refused():
    with pytest.raises(errors.ConfigError, match="got both"):
        access.read(["http://a", "https://b"], {})


def test_credentials_are_read_but_not_in_the_repr():
    environ = {"ETCD_AUTH_USERNAME": "dynamo", "ETCD_AUTH_PASSWORD": "s3cret"}
    whereto = access.read(["etcd"], environ)

    assert (whereto.username, whereto.password) == ("dynamo", "s3cret")
    assert "s3cret" not in repr(whereto)


@pytest.mark.parametrize(
    "variable",
    ["ETCD_AUTH_USERNAME", "ETCD_AUTH_PASSWORD", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY"],
)
def test_half_of_a_pair_is_refused(variable):
    with pytest.raises(errors.ConfigError, match="expected both or neither"):
        access.read(["etcd"], {variable: "x"})


def test_certificates_are_read_from_the_configured_files(tmp_path):
    environ = {}
    for name in ("CA", "CLIENT_CERT", "CLIENT_KEY"):
        (tmp_path / name).write_text(name)
        environ[f"ETCD_AUTH_{name}"] = str(tmp_path / name)
    whereto = access.read(["https://etcd"], environ)

    assert whereto.tls == access.EtcdTls(ca=b"CA", certificate=b"CLIENT_CERT", key=b"CLIENT_KEY")
    assert "CLIENT_KEY" not in repr(whereto)


def test_https_without_certificates_uses_the_system_trust_store():
    assert access.read(["https://etcd"], {}).tls == access.EtcdTls()


def test_unreadable_certificate_is_refused_with_its_variable(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"ETCD_AUTH_CA=.*expected a readable PEM file"):
        access.read(["etcd"], {"ETCD_AUTH_CA": str(tmp_path / "absent")})
