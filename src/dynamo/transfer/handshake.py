"""The greeting of two agents: both prove that they know the cluster's token, then name the agent that they expect.

The proof is that of `runtime.authentication`. What follows is neither hidden nor signed, unless the link speaks TLS.
Without a token the same steps run with an empty key: they then prove nothing, and `backends.tcp` stays on loopback.
"""

from dynamo.base import errors, membership
from dynamo.runtime import authentication
from dynamo.transfer import messages
from dynamo.transfer.limit import Limit
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
    limit: Limit,
) -> None:
    """The client's side. Raises TransferError if the server is not who we expect, or does not want us."""
    link.secure(limit)
    try:
        authenticator.authenticate_server(
            lambda output: link.send_bytes(output, limit),
            lambda size: link.receive_bytes(size, limit),
        )
    except errors.RemoteProtocolError as error:
        raise errors.TransferError(f"the peer {error}") from error
    link.send(messages.Hello(name, epoch), limit)
    link.receive(messages.Welcome, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)


def admit(
    link: Link, *, authenticator: authentication.ConnectionAuthenticator, limit: Limit
) -> None:
    """The server's side: one of us is at the other end. Raises RemoteProtocolError, TransferError."""
    link.secure(limit)
    authenticator.authenticate_client(
        lambda output: link.send_bytes(output, limit), lambda size: link.receive_bytes(size, limit)
    )


def welcome(link: Link, *, epoch: str, limit: Limit) -> str:
    """Whom the admitted client expects; gives the name that it claims. Raises RemoteProtocolError."""
    hello = link.receive(messages.Hello, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)
    if hello.epoch != epoch:
        raise errors.RemoteProtocolError(
            "the worker has restarted since it gave out its metadata; ask for its new one"
        )
    link.send(messages.Welcome(), limit)
    return hello.name
