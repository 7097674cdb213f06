"""Who may call the API server: those who have its token. They know it by a certificate that is made at each start."""

import asyncio
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dynamo.base import errors

_OPENSSL = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "365", "-subj", "/CN=dynamo kube", "-addext", "keyUsage=critical,digitalSignature,keyCertSign",
            "-addext", "extendedKeyUsage=serverAuth")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """A self-signed certificate: `pem` is what clients trust, `context` what the server listens with."""

    pem: bytes
    context: ssl.SSLContext


async def make_certificate(address: str) -> ServerCertificate:
    """Make a key and a certificate for an IP address, by openssl; the key stays in memory. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="dynamo-kube-") as folder:
        key, chain = Path(folder, "key.pem"), Path(folder, "chain.pem")
        names = ("-addext", f"subjectAltName=IP:{address}")
        try:
            process = await asyncio.create_subprocess_exec(
                *_OPENSSL, *names, "-keyout", key, "-out", chain,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise errors.ConfigError(
                "dynamo kube up makes its certificate by openssl, which is not installed: install it"
            ) from error
        _, message = await process.communicate()
        if process.returncode:
            text = " ".join(message.decode("utf-8", "replace").split())[-500:]
            raise errors.ConfigError(f"openssl made no certificate for {address}: {text}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain, key)
        return ServerCertificate(await asyncio.to_thread(chain.read_bytes), context)
