"""Where the token comes from, what TLS wants, and which addresses are refused."""

import os
import pathlib
import pty
import ssl
import subprocess
import sys
import tempfile

import pytest

import members
from dynamo.base import config, errors, membership
from waiting import PATIENT_S

ASK = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # now OpenSSL can ask
from dynamo.base import errors, membership
certificate, key = sys.argv[1:]
try:
    membership.read(
        membership.ClusterConfig(
            cluster_tls_cert_path=certificate, cluster_tls_key_path=key, cluster_tls_ca_cert_path=certificate
        ),
        {},
    )
except errors.ConfigError as error:
    print(error)
"""

TOKEN = "0123456789abcdef"
WITH_TOKEN = membership.Credentials(token=b"x" * 16)
INSECURE = membership.Credentials(is_insecure=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    members.make_certificates(folder)
    return folder


def read(environ=None, *, discovery_backend="mem", **settings):
    config = membership.ClusterConfig(discovery_backend=discovery_backend, **settings)
    return membership.read(config, environ or {})


def test_no_settings_give_no_credentials():
    assert read() == membership.NO_CREDENTIALS
    assert membership.NO_CREDENTIALS.derive_keys("transfer") == ()


def test_token_from_a_file_equals_token_from_the_environment(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    by_file = read(cluster_token_file=str(path))
    by_variable = read({"DYN_CLUSTER_TOKEN": TOKEN})

    assert by_file == by_variable
    assert by_file.derive_keys("transfer") == by_variable.derive_keys("transfer")
    assert by_file.derive_keys("transfer") != by_file.derive_keys("request plane")


def test_token_is_in_no_repr():
    shown = read({"DYN_CLUSTER_TOKEN": TOKEN})

    assert TOKEN not in repr(shown)


def test_no_flag_takes_the_token_itself():
    with pytest.raises(errors.ConfigError, match="unrecognized"):
        config.load(membership.ClusterConfig, prog="x", argv=["--cluster-token", TOKEN])


@pytest.mark.parametrize("token", ["tiny!", "x" * 15, "x" * 4097], ids=len)
def test_token_of_wrong_length_is_refused_without_printing_the_token(token, tmp_path):
    (tmp_path / "token").write_text(token)
    for ask in (
        {"environ": {"DYN_CLUSTER_TOKEN": token}},
        {"cluster_token_file": tmp_path / "token"},
    ):
        with pytest.raises(errors.ConfigError, match="openssl rand") as refused:
            read(**ask)

        assert token not in str(refused.value)


def test_empty_token_file_is_refused(tmp_path):
    (tmp_path / "token").write_text("\n")
    with pytest.raises(errors.ConfigError, match="got 0"):
        read(cluster_token_file=str(tmp_path / "token"))


def test_missing_token_file_is_named_in_the_error(tmp_path):
    with pytest.raises(
        errors.ConfigError, match=r"--cluster-token-file .*nothing: expected a file"
    ):
        read(cluster_token_file=str(tmp_path / "nothing"))


def test_two_token_sources_are_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match="got both"):
        read({"DYN_CLUSTER_TOKEN": TOKEN}, cluster_token_file=str(tmp_path))


def test_certificates_are_wanted_whole(certificates):
    paths = members.flags(certificates)
    for name in paths:
        with pytest.raises(errors.ConfigError, match="all three or none"):
            read(**{other: path for other, path in paths.items() if other != name})


def test_both_sides_show_certificates_by_tls_1_3_and_check_no_name(certificates):
    shown = members.with_tls(certificates).tls

    for context in (shown.client, shown.server):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert not context.check_hostname


def test_invalid_certificate_file_is_named_in_the_error(certificates, tmp_path):
    (tmp_path / "junk.pem").write_text("junk")
    paths = members.flags(certificates) | {"cluster_tls_ca_cert_path": str(tmp_path / "junk.pem")}

    with pytest.raises(errors.ConfigError, match=r"expected PEM files, .*, in .*junk\.pem"):
        read(**paths)


def test_passphrase_of_an_encrypted_key_is_not_asked_for_on_the_terminal(tmp_path):
    certificate, key = tmp_path / "it.pem", tmp_path / "it.key"
    options = ("-subj", "/CN=it", "-passout", "pass:hush", "-keyout", key, "-out", certificate)
    command = ("openssl", "req", "-x509", *members.KEY[:-3], *options)
    subprocess.run(command, check=True, capture_output=True)
    ours, theirs = pty.openpty()
    asked = subprocess.run(
        [sys.executable, "-c", ASK, certificate, key],
        stdin=theirs,
        stdout=subprocess.PIPE,
        start_new_session=True,
        timeout=PATIENT_S,
    )
    os.close(theirs)
    os.close(ours)

    assert b"a key without a passphrase" in asked.stdout


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_address_needs_no_credentials(host):
    membership.check_address(host, "it", membership.NO_CREDENTIALS)
    membership.check_token_address(host, "it", membership.NO_CREDENTIALS)

    assert membership.is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.7", "192.168.1.1", "fe80::1", "worker-0", "8.8.8.8"])
def test_other_addresses_are_refused_unless_protected_or_insisted_on(host, certificates):
    with pytest.raises(errors.ConfigError, match=r"it on .*--cluster-token-file.*--insecure"):
        membership.check_address(host, "it", membership.NO_CREDENTIALS)
    for shown in (WITH_TOKEN, members.with_tls(certificates), INSECURE):
        membership.check_address(host, "it", shown)

    assert not membership.is_loopback(host)


def test_where_tls_is_not_spoken_certificates_do_not_help(certificates):
    with pytest.raises(errors.ConfigError, match="certificates do not cover it"):
        membership.check_token_address("10.0.0.7", "it", members.with_tls(certificates))
    for shown in (WITH_TOKEN, INSECURE):
        membership.check_token_address("10.0.0.7", "it", shown)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DYN_FILE_KV": "/somewhere/kv", "XDG_RUNTIME_DIR": "{tmp}"}, "/somewhere/kv"),
        ({"DYN_FILE_KV": "", "XDG_RUNTIME_DIR": "{tmp}"}, "{tmp}/dynamo"),
        ({"XDG_RUNTIME_DIR": "{tmp}/none"}, "{system}/dynamo-{uid}"),
        ({}, "{system}/dynamo-{uid}"),
    ],
)
def test_discovery_directory_is_the_users_own(tmp_path, environ, expected):
    places = {"tmp": tmp_path, "system": tempfile.gettempdir(), "uid": os.getuid()}
    environ = {name: value.format(**places) for name, value in environ.items()}

    assert membership.discovery_directory(None, environ) == pathlib.Path(expected.format(**places))


def test_processes_with_one_discovery_directory_have_one_token(tmp_path):
    directory = str(tmp_path / "kv")
    first = read(discovery_backend="file", file_kv=directory)
    second = read({"DYN_FILE_KV": directory}, discovery_backend="file")

    assert first == second
    assert first.is_local
    assert len(first.token) == 64


def test_given_token_takes_the_place_of_the_local_one(tmp_path):
    given = read({"DYN_CLUSTER_TOKEN": TOKEN}, discovery_backend="file", file_kv=str(tmp_path))

    assert given.token == TOKEN.encode()
    assert not given.is_local
    assert not list(tmp_path.iterdir())


def test_insecure_process_has_no_local_token(tmp_path):
    assert read(discovery_backend="file", file_kv=str(tmp_path), insecure=True).token is None


def test_local_token_opens_no_address_off_loopback(tmp_path):
    local = read(discovery_backend="file", file_kv=str(tmp_path))
    for check in (membership.check_address, membership.check_token_address):
        check("127.0.0.1", "a service", local)
        with pytest.raises(errors.ConfigError, match="open to its whole network"):
            check("10.0.0.7", "a service", local)


def test_etcd_gives_no_local_token(tmp_path):
    assert read(discovery_backend="etcd", file_kv=str(tmp_path)).token is None


def test_problem_of_credential_files_ends_when_the_former_files_are_back(tmp_path, monkeypatch):
    monkeypatch.setattr(membership, "CHECK_S", 0.0)
    path, aside = tmp_path / "token", tmp_path / "aside"
    path.write_text(TOKEN)
    read_ = read(cluster_token_file=str(path))
    path.rename(aside)
    read_.current()
    problem = read_.files.problem
    aside.rename(path)
    read_.current()

    assert "expected a file" in problem
    assert read_.files.problem is None


def test_token_file_is_read_again_that_has_the_time_and_length_of_the_former(tmp_path, monkeypatch):
    monkeypatch.setattr(membership, "CHECK_S", 0.0)
    path = tmp_path / "token"
    path.write_text(TOKEN)
    former, status = read(cluster_token_file=str(path)), path.stat()
    path.write_text(TOKEN[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as `rsync -t` sets it

    assert former.token == TOKEN.encode()
    assert former.files.current().token == TOKEN[::-1].encode()
