"""TLS alerts of failed handshakes under asyncio, which drops them, so that the peer would never learn the reason."""

import asyncio
import contextlib
import contextvars
import ssl
from collections.abc import Iterator
from typing import Any

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
