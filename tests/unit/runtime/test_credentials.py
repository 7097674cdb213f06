"""When the certificates of a process expire."""

import pytest

import members
from dynamo.runtime import credentials

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Certificates that are valid for two days, and an expired one."""
    path = tmp_path_factory.mktemp("certificates")
    members.make_certificates(path)
    return path


@pytest.fixture
def expiry():
    return credentials.CertificateExpiry("the certificate")


@pytest.mark.parametrize(("name", "days"), [("member", 2.0), ("expired", -1.0)])
def test_remaining_time_is_that_of_the_certificate(folder, expiry, name, days):
    expiry.set(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))

    assert expiry.remaining_s == pytest.approx(days * DAY_S, abs=0.1 * DAY_S)


@pytest.mark.parametrize("key", ["stranger.key", "absent.key"])
def test_certificate_without_its_key_expires_at_no_known_time(folder, expiry, key):
    expiry.set(str(folder / "member.pem"), str(folder / key))
    expiry.check()

    assert expiry.remaining_s is None
