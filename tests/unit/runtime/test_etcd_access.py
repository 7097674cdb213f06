"""Endpoints and credentials of etcd are read as etcd's other users write them."""

import shutil
import ssl

import pytest

import members
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
    [
        *("ftp://etcd:1", "http://", "http://etcd:port", "http://etcd:70000", "http://etcd/kv"),
        *("http://[::1", "[::1:2379"),
    ],
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


def test_authority_is_read_from_its_file_and_read_anew_for_each_connection(tmp_path):
    ca = tmp_path / "ca.pem"
    members.make_certificates(tmp_path)
    shutil.copy(tmp_path / "authority.pem", ca)
    whereto = access.read(["https://etcd"], {"ETCD_AUTH_CA": str(ca)})
    (before,) = whereto.tls.get_ca_certs()
    shutil.copy(tmp_path / "other.pem", ca)
    (after,) = whereto.read_tls().get_ca_certs()
    ca.write_text("half a file")

    assert whereto.tls.verify_mode is ssl.CERT_REQUIRED
    assert whereto.tls.check_hostname
    assert before["serialNumber"] != after["serialNumber"]
    assert whereto.read_tls() is whereto.tls


def test_https_without_certificates_trusts_what_the_system_trusts():
    trusted = access.read(["https://etcd"], {}).tls
    system = ssl.create_default_context()

    assert trusted.verify_mode is ssl.CERT_REQUIRED
    assert trusted.cert_store_stats() == system.cert_store_stats()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (["ETCD_AUTH_CA"], "ETCD_AUTH_CA="),
        (["ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY"], "ETCD_AUTH_CLIENT_CERT="),
    ],
)
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_unreadable_certificate_is_refused_with_its_variable(tmp_path, variables, named, content):
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(errors.ConfigError, match=f"{named}.*expected a readable PEM file"):
        access.read(["etcd"], dict.fromkeys(variables, str(path)))
