"""How an operator loads and unloads LoRA adapters: routes of the system port, by the names of the original.

POST /v1/loras      {"lora_name": "poet", "source": {"uri": "file:///adapters/poet"}}   200 when it can be asked for
GET /v1/loras       those that there are
DELETE /v1/loras/…  200 when nothing more is taken for the one of this name

`/loras` is the same. What is there from that place already is no error.
"""

import functools
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from dynamo.base import errors
from dynamo.protocols import openai_decode
from dynamo.runtime.http import exchange, router
from dynamo.worker import loras, replies

_PREFIXES = ("/v1/loras", "/loras")
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_Handle = Callable[[exchange.Exchange], Awaitable[Mapping[str, object]]]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an adapter lies."""

    uri: _Text


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST`."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    source: Source


_decode = openai_decode.RequestDecoder(Load).decode


def table(asked: loras.Loras) -> Mapping[tuple[str, str], router.Handler]:
    """For the system port of the worker that is asked."""

    async def load(request: exchange.Exchange) -> Mapping[str, object]:
        body = _decode(request.request.body)
        number = await asked.load(body.lora_name, directory(body.source.uri))
        return _done(body.lora_name, number, "is loaded")

    async def show(_: exchange.Exchange) -> Mapping[str, object]:
        return {"status": "success", "loras": asked.numbers, "count": len(asked.numbers)}

    async def unload(request: exchange.Exchange) -> Mapping[str, object]:
        name = request.request.path.partition("/loras/")[2]
        return _done(name, await asked.unload(name), "is unloaded")

    handled = {("POST", ""): load, ("GET", ""): show, ("DELETE", "/*"): unload}
    return {
        (method, prefix + rest): functools.partial(_answer, handle)
        for prefix in _PREFIXES
        for (method, rest), handle in handled.items()
    }


def directory(uri: str) -> Path:
    """Of `file:///directory`, or of a path from the root. Raises InvalidRequest for anything else."""
    if uri.startswith("/") and not uri.startswith("//"):
        return Path(uri)
    refused = errors.InvalidRequest(
        f"source.uri: expected file:///directory on this worker's host, got {uri!r}",
        param="source.uri",
    )
    try:
        scheme, host, path, *more = urllib.parse.urlsplit(uri)
    except ValueError as error:
        raise refused from error
    if scheme != "file" or host not in ("", "localhost") or any(more) or not path.startswith("/"):
        raise refused
    return Path(urllib.parse.unquote(path))


async def _answer(handle: _Handle, request: exchange.Exchange) -> None:
    await replies.reply(request, handle(request))


def _done(name: str, number: int, what: str) -> Mapping[str, object]:
    message = f"LoRA adapter {name!r} {what}"
    return {"status": "success", "message": message, "lora_name": name, "lora_id": number}
