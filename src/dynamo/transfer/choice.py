"""Which way to a peer: within a process directly, on a host by shared memory, else by NIXL or TCP.

NIXL goes before TCP because nobody has it by default: who asks for it has the network for it.
"""

from dynamo.base import errors
from dynamo.transfer.descriptors import Metadata


def choose_backend(local: Metadata, peer: Metadata) -> str:
    """The first backend that both have and that reaches. Raises TransferError if there is none.

    Local addresses begin with an id of their process, as those of shared memory count only on one host.
    """
    if _process(local) is not None and _process(local) == _process(peer):
        return "local"
    shared = local.addresses.keys() & peer.addresses.keys()
    if "shm" in shared and local.host == peer.host:
        return "shm"
    for name in ("nixl", "tcp"):
        if name in shared:
            return name
    raise errors.TransferError(
        f"no way to {peer.name}: it offers {', '.join(sorted(peer.addresses)) or 'nothing'}"
        f" {'on this host' if local.host == peer.host else 'on another host'}, we have"
        f" {', '.join(sorted(local.addresses)) or 'nothing'}; let both have tcp"
    )


def _process(metadata: Metadata) -> str | None:
    address = metadata.addresses.get("local")
    return address and address.partition("/")[0]
