"""How one engine tells another where the keys and values of a prompt are: `kv_transfer_params`.

    to the engine that prefills       {"do_remote_decode": true, "do_first_token": true}
    back, with its only output        {"do_remote_prefill": true, "remote_block_ids": [1, 2], "remote_engine_id": ...}
    to the engine that decodes        the same
    to one that shall compute itself  {"do_remote_prefill": false, "do_remote_decode": false}

Between the two engines nobody looks into it: a foreign engine's connector has fields of its own, which travel as they
are (`handed_on`). The names are those of the original's connector. What is ours: `remote_hold_id` names what the reader
has to release, and `remote_hold_s` says for how long the blocks are certainly kept, counted from the moment the prefill
was asked for. So the reader judges by its own clock alone whether what it read was still what it meant.
`do_first_token` says that the prefill was asked for with the request's own options; only then the token that was drawn
with it comes along as `first_token`, and the answer may begin with it. An engine that knows of no such thing draws the
first token where it decodes.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from dynamo.base import errors
from dynamo.protocols import generate

ASK = {"do_remote_decode": True}
ASK_WITH_TOKEN = ASK | {"do_first_token": True}
HOLD_S = 60.0  # from the end of the prefill; longer than any reader waits
STAY = {
    "do_remote_prefill": False,
    "do_remote_decode": False,
}  # somebody has decided: compute it where it is
REPORT = "kv_transfer_report"  # annotation of a request: tell with the first output how its blocks came (`Report`)
METADATA = "kv_transfer_metadata"  # of an engine's agent, in a card's runtime data; base64


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """What the engine that computed the prompt says of the answer's first token."""

    token_id: Annotated[int, msgspec.Meta(ge=0)]
    logprobs: generate.TokenLogprobs | None = None  # if the request wanted them
    cached_tokens: int | None = None  # prompt tokens that it had not to compute


class RemoteBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt whose keys and values another engine has computed and holds, in the order of its blocks."""

    remote_block_ids: tuple[int, ...]
    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_hold_id: int
    remote_hold_s: float = HOLD_S
    tp_size: int = 1
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    first_token: FirstToken | None = None

    def as_params(self) -> dict[str, Any]:
        """As it travels."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the worker that answers can tell of a prompt that another has computed: `Output.kv_transfer_params`.

    Of the prefill only where it asked for it itself.
    """

    transfer_ms: float
    num_blocks: int  # that were copied; those that it knew were not
    prefill_worker_id: int | None = None
    prefill_ms: float | None = None  # from asking for it to the answer


def is_prefilled(params: Mapping[str, Any] | None) -> bool:
    """Has another engine computed this prompt, and holds its blocks?"""
    return params is not None and params.get("do_remote_prefill") is True


def wants_hold(params: Mapping[str, Any] | None) -> bool:
    """Is this prompt computed for another engine, so that its blocks are to be held?"""
    return params is not None and params.get("do_remote_decode") is True


def wants_token(params: Mapping[str, Any] | None) -> bool:
    """Is it drawn as its answer wants it, so that the answer may begin with it?"""
    return params is not None and params.get("do_first_token") is True


def read(params: Mapping[str, Any] | None) -> RemoteBlocks | None:
    """Where the prompt's blocks are, if another engine has them. Raises RemoteProtocolError for anything else."""
    if not is_prefilled(params):
        return None
    try:
        return msgspec.convert(params, RemoteBlocks)
    except msgspec.ValidationError as error:
        raise errors.RemoteProtocolError(f"kv_transfer_params: {error}") from error


def first_of(request: generate.Request, remote: RemoteBlocks | None) -> FirstToken | None:
    """The token with which its answer begins, if whoever computed its prompt has drawn it.

    Of several choices each has to be drawn, and a prompt that is to be scored must be computed here.
    """
    if remote is None or remote.first_token is None:
        return None
    wanted, has_logprobs = request.output_options, remote.first_token.logprobs is not None
    is_complete = has_logprobs == (wanted.logprobs is not None)
    is_alone = request.sampling_options.n == 1 and wanted.prompt_logprobs is None
    return remote.first_token if is_alone and is_complete else None


def handed_on(params: Mapping[str, Any], took_s: float) -> dict[str, Any] | None:
    """What the prefill's engine said, for the engine that decodes; None if the former holds nothing.

    `took_s` is how long ago the prefill was asked for. Only a promise of time (`remote_hold_s`) is touched.
    """
    if not is_prefilled(params):
        return None
    hold_s = params.get("remote_hold_s")
    told = {} if not isinstance(hold_s, int | float) else {"remote_hold_s": hold_s - took_s}
    return {**params, **told}
