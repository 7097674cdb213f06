"""The handshake of two agents: each proves that it knows the cluster's token, then the client names its server.

The proof is that of `runtime.authentication`. What follows is neither encrypted nor signed, unless the link uses TLS.
Without a token the same steps run with an empty key: they then prove nothing, and `backends.tcp` stays on loopback.
"""

from dynamo.base import errors, membership
from dynamo.runtime import authentication
from dynamo.transfer import messages
from dynamo.transfer.job import TimeLimit
from dynamo.transfer.link import Link


def new_authenticator(
    credentials: membership.Credentials,
) -> authentication.ConnectionAuthenticator:
    """Return the authenticator of transfers; it runs the proof even without a token."""
    return authentication.ConnectionAuthenticator(
        credentials, authentication.TRANSFER, always_proves=True
    )


def enter(
    link: Link,
    *,
    name: str,
    epoch: str,
    authenticator: authentication.ConnectionAuthenticator,
    limit: TimeLimit,
) -> None:
    """Authenticate as a client. Raises TransferError if the server is another one, or refuses us."""
    link.secure(limit)
    try:
        authenticator.authenticate_server(
            lambda output: link.send_bytes(output, limit),
            lambda size: link.receive_bytes(size, limit),
        )
    except errors.RemoteProtocolError as error:
        raise errors.TransferError(f"the peer {error}") from error
    link.send(messages.AgentHello(name, epoch), limit)
    link.receive(messages.AgentWelcome, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)


def admit(
    link: Link, *, authenticator: authentication.ConnectionAuthenticator, limit: TimeLimit
) -> None:
    """Authenticate a client of our cluster, as a server. Raises RemoteProtocolError or TransferError."""
    link.secure(limit)
    authenticator.authenticate_client(
        lambda output: link.send_bytes(output, limit), lambda size: link.receive_bytes(size, limit)
    )


def welcome(link: Link, *, epoch: str, limit: TimeLimit) -> str:
    """Check that an authenticated client expects this server; return its name. Raises RemoteProtocolError if not."""
    hello = link.receive(messages.AgentHello, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)
    if hello.epoch != epoch:
        raise errors.RemoteProtocolError(
            "the worker has restarted since it gave out its metadata; ask for its new one"
        )
    link.send(messages.AgentWelcome(), limit)
    return hello.name
