"""The addresses of etcd and the credentials for it, from the settings and from the variables that etcd's tools use.

Secrets come from the environment only, because every user of a machine can read the flags of a process.
"""

import contextlib
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.base import addresses, errors, tls

DEFAULT_PORT = 2379
_SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAccess:
    """Addresses (`host:port`) in the order in which they are tried, and credentials."""

    addresses: tuple[str, ...]
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)  # names the files of TLS

    def read_tls(self) -> ssl.SSLContext | None:
        """Return TLS with its files as they are now; as they were, while they cannot be read."""
        if self.tls is None:
            return None
        try:
            return _tls(self.environ) or self.tls
        except errors.ConfigError:
            return self.tls


def read(endpoints: Sequence[str], environ: Mapping[str, str]) -> EtcdAccess:
    """Read endpoints (`http://host:port` or `host:port`) and ETCD_AUTH_* of the environment. Raises ConfigError."""
    if not endpoints:
        raise errors.ConfigError("ETCD_ENDPOINTS: expected at least one http://host:port, got none")
    parsed = [_endpoint(endpoint) for endpoint in endpoints]
    username, password = tls.read_pair(environ, "ETCD_AUTH_USERNAME", "ETCD_AUTH_PASSWORD")
    context = _tls(environ)
    are_tls = {scheme == "https" or context is not None for scheme, _ in parsed}
    if len(are_tls) > 1:
        raise errors.ConfigError("ETCD_ENDPOINTS: expected all http or all https, got both")
    return EtcdAccess(
        addresses=tuple(address for _, address in parsed),
        username=username,
        password=password,
        tls=(context or _trusting(None)) if True in are_tls else None,
        environ=environ,
    )


def _endpoint(text: str) -> tuple[str, str]:
    """Split an endpoint into scheme and address. Raises ConfigError."""
    if "@" in text:  # and what is there is not repeated
        raise errors.ConfigError(
            "ETCD_ENDPOINTS: expected no user in an address: set ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD"
        )
    refusal = errors.ConfigError(
        f"ETCD_ENDPOINTS: expected http://host:port, or https://, got {text!r}"
    )
    try:
        url = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
        port = url.port or DEFAULT_PORT
    except ValueError as error:  # a port, or brackets, of another kind
        raise refusal from error
    if url.scheme not in _SCHEMES or not url.hostname or url.path not in ("", "/"):
        raise refusal
    return url.scheme, addresses.join(addresses.plain_host(url.hostname, "ETCD_ENDPOINTS"), port)


def _tls(environ: Mapping[str, str]) -> ssl.SSLContext | None:
    certificate, key = tls.read_pair(environ, "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY")
    ca = environ.get("ETCD_AUTH_CA") or None
    if not ca and not certificate:
        return None
    context = _trusting(ca)
    if certificate:
        with _reading(f"ETCD_AUTH_CLIENT_CERT={certificate}, ETCD_AUTH_CLIENT_KEY={key}"):
            context.load_cert_chain(certificate, key, tls.NO_PASSPHRASE)
    return context


def _trusting(ca: str | None) -> ssl.SSLContext:
    """Return a context that trusts the authorities in this file; without a file those of the system."""
    with _reading(f"ETCD_AUTH_CA={ca}"):
        context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    return context


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # ssl's errors are of this class
        raise errors.ConfigError(f"{what}: expected a readable PEM file: {error}") from error
