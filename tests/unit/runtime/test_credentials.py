"""When the certificates of a process expire."""

import shutil
import subprocess
import time

import pytest

import members
from dynamo.base import clock, membership
from dynamo.runtime import credentials

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Certificates that are valid for two days, an expired one, and one of an authority that is valid for longer."""
    path = tmp_path_factory.mktemp("certificates")
    members.make_certificates(path)
    for name, *signing in (
        ("long", "-days", "90"),
        ("of-long", "-days", "1", "-CA", "long.pem", "-CAkey", "long.key"),
    ):
        paths = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]
        argv = ["openssl", "req", "-x509", *members.KEY, *paths, *signing]
        subprocess.run(argv, cwd=path, check=True, capture_output=True)
    return path


def watch(folder, wall_time_s, **names):
    return credentials.CredentialWatch(
        members.with_tls(folder, **names), clock.SystemClock(), wall_time_s=lambda: wall_time_s
    )


@pytest.mark.parametrize(("name", "days"), [("member", 2.0), ("expired", -1.0)])
def test_remaining_time_is_that_of_the_certificate(folder, name, days):
    files = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    expiry = credentials.CertificateExpiry("the certificate", files)

    assert expiry.remaining_s == pytest.approx(days * DAY_S, abs=0.1 * DAY_S)


@pytest.mark.parametrize("key", ["stranger.key", "absent.key"])
def test_certificate_without_its_key_expires_at_no_known_time(folder, key):
    files = str(folder / "member.pem"), str(folder / key)
    expiry = credentials.CertificateExpiry("the certificate", files)
    expiry.check()

    assert expiry.remaining_s is None


def test_renewed_certificate_is_read_again_and_warned_of_anew(folder, tmp_path, caplog):
    files = tmp_path / "used.pem", tmp_path / "used.key"
    expiry = credentials.CertificateExpiry("the certificate", [str(path) for path in files])
    for name in ("expired", "member", "expired"):
        for path in files:
            shutil.copy(folder / f"{name}{path.suffix}", path)
        expiry.check()
        expiry.check()

    found = [record.message.partition(") ")[2].split()[0] for record in caplog.records]
    assert found == ["expired", "expires", "expired"]


def test_authority_is_the_one_that_signed_the_certificate(folder, tmp_path):
    both = tmp_path / "authorities.pem"
    both.write_bytes((folder / "long.pem").read_bytes() + (folder / "authority.pem").read_bytes())
    member = str(folder / "member.pem"), str(folder / "member.key")
    by_long = str(folder / "of-long.pem"), str(folder / "of-long.key")
    days = [
        (credentials.find_authority_expiry(str(both), *files) or 0) - time.time()
        for files in (member, by_long)
    ]

    assert [round(each / DAY_S) for each in days] == [2, 90]
    assert credentials.find_authority_expiry(str(folder / "other.pem"), *member) is None
    assert credentials.find_authority_expiry(str(folder / "absent.pem"), *member) is None


def test_certificate_and_authority_of_the_cluster_are_warned_of(folder, caplog):
    now = time.time()
    followed = watch(folder, now)
    followed.check()
    followed.check()

    assert sorted(followed.expiries) == ["cluster", "cluster-authority"]
    assert len(caplog.records) == 2
    assert "authority.pem) expires at" in caplog.text
    assert "member.pem) expires at" in caplog.text


def test_certificates_for_services_in_use_are_watched(folder):
    environ = {
        "ETCD_AUTH_CLIENT_CERT": str(folder / "member.pem"),
        "ETCD_AUTH_CLIENT_KEY": str(folder / "member.key"),
        "NATS_TLS_CLIENT_CERT_PATH": str(folder / "expired.pem"),
        "NATS_TLS_CLIENT_KEY_PATH": str(folder / "expired.key"),
    }
    shown = credentials.client_certificates({"etcd", "nats", "zmq"}, environ)
    followed = credentials.CredentialWatch(
        membership.NO_CREDENTIALS, clock.SystemClock(), client_certificates=shown
    )

    assert followed.has_files
    assert followed.expiries["etcd"].remaining_s > DAY_S
    assert followed.expiries["nats"].remaining_s < 0
    assert credentials.client_certificates({"file", "tcp", "zmq"}, environ) == {}
    assert credentials.client_certificates({"etcd", "nats"}, {}) == {}
