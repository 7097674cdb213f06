"""KV transfer parameters: how one engine tells another where the keys and values of a prompt are.

    to the engine that prefills       `PREFILL_WITH_TOKEN` (or `PREFILL_ONLY`)
    back, with its only output        do_remote_prefill, and `remote` (our engines) or `connector` (vLLM's)
    to the engine that decodes        the same
    to one that computes by itself    `COMPUTE_LOCALLY`

The names are those of vLLM's connectors. Ours in addition: `remote_hold_id` is the lease that the importing engine has
to release, and `remote_hold_s` is how many seconds the blocks are certainly kept, counted from when the prefill was
requested. So the importing engine judges by its own clock alone whether it read what it meant.
`do_first_token` says that the prefill was requested with the request's own options; only then the token that was drawn
with it comes along as `first_token`, and the answer may begin with it. An engine that does not support that draws the
first token where it decodes.

`do_cached_only` asks an engine for the leading blocks of a prompt that it has already: it computes nothing, and keeps
them under a lease. So a *peer prefix* (`PrefixSource`) comes from a worker that happens to have it.

The fields of a foreign engine's connector are one opaque member, `connector`: only that engine's adapter reads it.
"""

from typing import Annotated, Any

import msgspec

from dynamo.base import errors


class TopLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token that could have been chosen, and its natural-log probability."""

    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The chosen token's log probability, and the likeliest tokens, best first (the chosen one may be among them)."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()


LEASE_S = 60.0  # seconds from the end of the prefill; longer than any import waits
REPORT_ANNOTATION = "kv_transfer_report"  # of a request: send a `TransferReport` with its outputs
METADATA_KEY = "kv_transfer_metadata"  # of an engine's agent, in a card's runtime data; base64
LOCAL_LENGTH_KEY = "max_local_prefill_length"  # there too: the worker's own limit, in tokens
PREFIXES_KEY = "kv_prefixes"  # there too: true for a worker that exports cached prefixes to others
IMPORTS_KEY = "kv_transfer_imports"  # there too: true for a worker of no set role that can copy blocks from others
CHOICES_KEY = (
    "kv_transfer_choices"  # there too: false for a worker that copies no blocks for several choices
)
UNREACHABLE_KEY = (
    "kv_transfer_unreachable"  # there too: prefill workers from which a worker cannot copy now
)


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """The first token of the answer, drawn by the engine that computed the prompt."""

    token_id: Annotated[int, msgspec.Meta(ge=0)]
    logprobs: TokenLogprobs | None = None  # if the request asked for them
    cached_tokens: int | None = None  # prompt tokens found in the prefill engine's cache


class PrefixSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that has more of a prompt in its cache than the one that computes it."""

    endpoint: str  # the path of its endpoint
    instance_id: int
    dp_rank: int = 0
    metadata: bytes  # of its engine's agent, for `connect_peer`
    num_tokens: int  # leading tokens of the prompt that it was last known to have


class RemoteBlocks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Keys and values of a prompt that another engine keeps under a lease, in the order of its blocks."""

    remote_block_ids: tuple[int, ...]
    remote_hold_id: int
    remote_engine_id: str
    remote_host: str = ""
    remote_port: int = 0
    remote_hold_s: float = LEASE_S
    tp_size: int = 1
    first_token: FirstToken | None = None
    is_prefix: bool = False  # these are leading full blocks; the rest of the prompt is not computed
    copy_limit_s: float | None = None  # what computing the prompt, or the prefix, would take


class TransferReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the blocks of a prompt came to the worker that answers it."""

    transfer_ms: float
    num_blocks: int  # copied; blocks that the worker had already are not counted
    prefill_worker_id: int | None = None  # if the answering worker chose it
    prefill_ms: float | None = None  # from the request for the prefill to its output; likewise


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request or an output says of the blocks of its prompt. Without any field: compute the prompt locally."""

    do_remote_decode: bool = False  # compute the prompt, and keep its blocks for another engine
    do_cached_only: bool = False  # with `do_remote_decode`: compute nothing, keep what is cached
    do_first_token: bool = False  # draw the token with the request's own options
    do_remote_prefill: bool = False  # another engine has computed the prompt
    remote: RemoteBlocks | None = None  # where its blocks are, if that is one of our engines
    connector: dict[str, Any] | None = None  # the fields of a foreign engine's connector
    report: TransferReport | None = None  # in outputs to a caller that asked for it


PREFILL_ONLY = KvTransferParams(do_remote_decode=True)
PREFILL_WITH_TOKEN = KvTransferParams(do_remote_decode=True, do_first_token=True)
EXPORT_CACHED = KvTransferParams(do_remote_decode=True, do_cached_only=True)
COMPUTE_LOCALLY = KvTransferParams()


def is_prefilled(params: KvTransferParams | None) -> bool:
    """Return whether another engine has computed this prompt, and keeps its blocks."""
    return params is not None and params.do_remote_prefill


def is_prefill_only(params: KvTransferParams | None) -> bool:
    """Return whether this prompt is computed for another engine, so that its blocks are to be kept."""
    return params is not None and params.do_remote_decode


def is_cached_only(params: KvTransferParams | None) -> bool:
    """Return whether only the cached blocks of this prompt are to be kept for another engine."""
    return params is not None and params.do_cached_only


def remote_blocks(params: KvTransferParams | None) -> RemoteBlocks | None:
    """Return where the prompt's blocks are, None if no other engine has them.

    Raises RemoteProtocolError if they are at a foreign engine.
    """
    if params is None or not params.do_remote_prefill:
        return None
    if params.remote is None:
        fields = sorted(params.connector or ())
        raise errors.RemoteProtocolError(
            f"kv_transfer_params: expected the blocks of an engine of ours, got the fields {fields}"
        )
    return params.remote


def pass_on(
    params: KvTransferParams, elapsed_s: float, prompt_len: int, *, delivery_s: float = 0.0
) -> KvTransferParams | None:
    """Return the prefill engine's parameters for the engine that decodes; None if the former keeps no blocks.

    `elapsed_s` is how long ago the prefill was requested: the lease is shorter by that, and by the seconds in which the
    parameters may still be delivered. A copy need not take longer than computing the whole prompt would at that pace.
    """
    if not params.do_remote_prefill:
        return None
    if params.remote is None:
        return params
    lease_s = params.remote.remote_hold_s - elapsed_s - delivery_s
    first_token = params.remote.first_token
    limit_s = params.remote.copy_limit_s
    if first_token is not None and first_token.cached_tokens is not None:
        num_computed = max(1, prompt_len - first_token.cached_tokens)
        limit_s = elapsed_s * prompt_len / num_computed
    remote = msgspec.structs.replace(params.remote, remote_hold_s=lease_s, copy_limit_s=limit_s)
    return msgspec.structs.replace(params, remote=remote)


def to_log(params: KvTransferParams | None) -> dict[str, Any] | None:
    """Return the parameters as log lines show them."""
    fields: dict[str, Any] | None = msgspec.to_builtins(params)
    return fields
