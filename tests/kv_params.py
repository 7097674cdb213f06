"""KV transfer parameters as tests need them."""

import msgspec

from dynamo.protocols import kv_transfer


def at_remote(**fields):
    """Return parameters of a prompt whose blocks an engine of ours keeps."""
    usual = {
        "remote_block_ids": (1, 2),
        "remote_hold_id": 7,
        "remote_engine_id": "e",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
    }
    remote = kv_transfer.RemoteBlocks(**(usual | fields))
    return kv_transfer.KvTransferParams(do_remote_prefill=True, remote=remote)


def with_remote(params, **fields):
    """Return the parameters with other fields of the remote blocks."""
    remote = msgspec.structs.replace(params.remote, **fields)
    return msgspec.structs.replace(params, remote=remote)


def of_connector(**fields):
    """Return parameters of a prompt whose blocks a foreign engine keeps."""
    return kv_transfer.KvTransferParams(do_remote_prefill=True, connector=fields)


def with_connector(params, **fields):
    """Return the parameters with other fields of the foreign connector."""
    return msgspec.structs.replace(params, connector=params.connector | fields)
