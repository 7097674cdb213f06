"""The addresses of NATS and the credentials for it, from the setting and from the variables that NATS's tools use.

Secrets come from the environment, or stand in the URL of a file, because every user of a machine can read flags.
"""

import os
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.base import addresses, errors, membership, tls

DEFAULT_PORT = 4222
_SCHEMES = ("nats", "tls")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsAccess:
    """The servers of one cluster, and at most one kind of credentials."""

    urls: tuple[str, ...] = field(repr=False)  # they may hold a password
    addresses: str  # the same for people: `host:port`, without secrets
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    nkey_seed: str | None = field(default=None, repr=False)
    credentials_file: str | None = None
    tls: ssl.SSLContext | None = None
    tls_files: tuple[str, ...] = ()  # the authority; the certificate and key, if there are any
    tls_stamp: object = None  # of these files before they were read

    def load_tls(self) -> None:
        """Read the files of TLS, for connections that begin from now on. Raises ConfigError."""
        assert self.tls is not None
        _load(self.tls, *self.tls_files)


def read(servers: Sequence[str], environ: Mapping[str, str]) -> NatsAccess:
    """Read servers (`nats://host:port` or `host:port`) and NATS_AUTH_* and NATS_TLS_* of the environment.

    Raises ConfigError.
    """
    if not servers:
        raise errors.ConfigError("NATS_SERVER: expected at least one nats://host:port, got none")
    urls = [_url(server) for server in servers]
    username, password = tls.read_pair(environ, "NATS_AUTH_USERNAME", "NATS_AUTH_PASSWORD")
    context, tls_files, tls_stamp = _tls(environ, any(url.scheme == "tls" for url in urls))
    access = NatsAccess(
        urls=tuple(url.geturl() for url in urls),
        addresses=", ".join(
            addresses.join(url.hostname or "", url.port or DEFAULT_PORT) for url in urls
        ),
        username=username,
        password=password,
        token=environ.get("NATS_AUTH_TOKEN") or None,
        nkey_seed=environ.get("NATS_AUTH_NKEY") or None,
        credentials_file=environ.get("NATS_AUTH_CREDENTIALS_FILE") or None,
        tls=context,
        tls_files=tls_files,
        tls_stamp=tls_stamp,
    )
    _check_credentials(access)
    return access


def _url(text: str) -> urllib.parse.SplitResult:
    shown = f"nats://…@{text.rpartition('@')[2]}" if "@" in text else text
    refusal = errors.ConfigError(f"NATS_SERVER: expected nats://host:port or tls://, got {shown!r}")
    try:
        url = urllib.parse.urlsplit(text if "://" in text else f"nats://{text}")
        is_port = url.port != 0
    except ValueError as error:  # a port, or brackets, of another kind
        raise refusal from error
    if url.scheme not in _SCHEMES or not url.hostname or not is_port or url.path not in ("", "/"):
        raise refusal
    addresses.plain_host(url.hostname, "NATS_SERVER")  # raises for an address of a single link
    return url


def _check_credentials(access: NatsAccess) -> None:
    kinds = {
        "NATS_AUTH_USERNAME": access.username,
        "NATS_AUTH_TOKEN": access.token,
        "NATS_AUTH_NKEY": access.nkey_seed,
        "NATS_AUTH_CREDENTIALS_FILE": access.credentials_file,
    }
    path = access.credentials_file
    if path is not None and not os.access(path, os.R_OK):
        raise errors.ConfigError(
            f"NATS_AUTH_CREDENTIALS_FILE={path}: expected a file that this process may read"
        )
    present = [name for name, value in kinds.items() if value is not None]
    if len(present) > 1:
        raise errors.ConfigError(f"expected one kind of credentials, got {' and '.join(present)}")


def _tls(
    environ: Mapping[str, str], is_required: bool
) -> tuple[ssl.SSLContext | None, tuple[str, ...], object]:
    ca = environ.get("NATS_TLS_CA_CERT_PATH") or None
    certificate, key = tls.read_pair(
        environ, "NATS_TLS_CLIENT_CERT_PATH", "NATS_TLS_CLIENT_KEY_PATH"
    )
    if not (is_required or ca or certificate):
        return None, (), None
    files = (ca or "", certificate or "", key or "")
    stamp = membership.stamp_files(files)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is None:
        context.load_default_certs()
    _load(context, *files)
    return context, files, stamp


def _load(context: ssl.SSLContext, ca: str, certificate: str, key: str) -> None:
    try:
        if ca:
            context.load_verify_locations(ca)
        if certificate:
            tls.load_certificate(context, certificate, key)
    except OSError as error:  # ssl's errors are of this class
        raise errors.ConfigError(
            f"NATS_TLS_*: expected readable PEM files, a key without a passphrase, got {ca} {certificate}: {error}"
        ) from error
