"""What ssl and asyncio lack: certificates of one's own, and alerts of failed handshakes.

A process makes certificates for itself by openssl: self-signed, so clients trust the certificate itself. Of a failed
handshake asyncio drops the alert, so that the peer would never learn the reason; here it is sent.
"""

import asyncio
import contextlib
import contextvars
import ssl
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.base import addresses, errors

_OPENSSL = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-subj", "/CN=dynamo", "-addext", "keyUsage=critical,digitalSignature,keyCertSign",
            "-addext", "extendedKeyUsage=serverAuth")  # fmt: skip

NO_PASSPHRASE = ""  # without it OpenSSL would ask for the passphrase of an encrypted key on the terminal, and wait


def load_certificate(context: ssl.SSLContext, certificate: Path | str, key: Path | str) -> None:
    """Show a certificate from now on; a context in use keeps its own if these files cannot be used. Raises OSError."""
    for loading in (ssl.SSLContext(context.protocol), context):  # a failure leaves it without any
        loading.load_cert_chain(certificate, key, NO_PASSPHRASE)


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """A certificate, which clients trust, and its key, both in PEM."""

    certificate: bytes
    key: bytes

    def load_into(self, context: ssl.SSLContext) -> None:
        """Let a server present this certificate on connections from now on. Raises ConfigError."""
        with tempfile.TemporaryDirectory(prefix="dynamo-tls-") as folder:
            chain, key = Path(folder, "chain.pem"), Path(folder, "key.pem")
            chain.write_bytes(self.certificate)
            key.write_bytes(self.key)
            try:
                load_certificate(context, chain, key)
            except ssl.SSLError as error:
                raise errors.ConfigError(f"the certificate cannot be used: {error}") from error

    def open_context(self) -> ssl.SSLContext:
        """Return what a server listens with. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.load_into(context)
        return context


async def make_certificate(names: Iterable[str], *, days: int = 365) -> ServerCertificate:
    """Make a key and a certificate for IP addresses and host names. Raises ConfigError."""
    kinds = ",".join(f"{'IP' if addresses.is_address(name) else 'DNS'}:{name}" for name in names)
    with tempfile.TemporaryDirectory(prefix="dynamo-tls-") as folder:
        key, chain = Path(folder, "key.pem"), Path(folder, "chain.pem")
        alternatives = ("-addext", f"subjectAltName={kinds}")
        try:
            process = await asyncio.create_subprocess_exec(
                *_OPENSSL, "-days", str(days), *alternatives, "-keyout", key, "-out", chain,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise errors.ConfigError(
                "certificates are made by openssl, which is not installed: install it"
            ) from error
        _, message = await process.communicate()
        if process.returncode:
            text = " ".join(message.decode("utf-8", "replace").split())[-500:]
            raise errors.ConfigError(f"openssl made no certificate for {kinds}: {text}")
        return ServerCertificate(
            await asyncio.to_thread(chain.read_bytes), await asyncio.to_thread(key.read_bytes)
        )


_transport: contextvars.ContextVar[asyncio.WriteTransport | None] = contextvars.ContextVar(
    "transport", default=None
)


@contextlib.contextmanager
def written_to(transport: asyncio.WriteTransport) -> Iterator[None]:
    """Have the alert of a handshake that begins in this block written to the transport below TLS."""
    token = _transport.set(transport)
    try:
        yield
    finally:
        _transport.reset(token)


class AlertingHandshake(ssl.SSLObject):
    """One side of a connection with TLS."""

    outgoing: ssl.MemoryBIO
    transport: asyncio.WriteTransport | None

    def do_handshake(self) -> None:
        """Take a step of the handshake; if it fails, the peer is told why. Raises SSLError."""
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if self.transport is not None and not isinstance(error, ssl.SSLWantReadError):
                self.transport.write(self.outgoing.read())
            raise


class AlertingContext(ssl.SSLContext):
    """A context of TLS that sends the alerts of its handshakes."""

    sslobject_class = AlertingHandshake

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *rest: Any, **named: Any
    ) -> ssl.SSLObject:
        """Wrap the buffers as the base class does, and remember where an alert goes."""
        handshake = super().wrap_bio(incoming, outgoing, *rest, **named)
        assert isinstance(handshake, AlertingHandshake)
        handshake.outgoing, handshake.transport = outgoing, _transport.get()
        return handshake


def read_pair(environ: Mapping[str, str], first: str, second: str) -> tuple[str | None, str | None]:
    """Return two variables that belong together, None for unset ones. Raises ConfigError if only one is set."""
    values = environ.get(first) or None, environ.get(second) or None
    if (values[0] is None) != (values[1] is None):
        raise errors.ConfigError(f"{first} and {second}: expected both or neither, got one")
    return values
