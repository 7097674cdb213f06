"""Stored responses of several processes at one port: the process that gets a request may not be the one that stores it.

It asks its peers for a response that it does not have, and stores what they give, so that a conversation that moves to
another connection moves to its process once.
"""

from collections.abc import Awaitable
from urllib.parse import quote

import msgspec

from dynamo.frontend.processes import peers, response_store
from dynamo.runtime.http import exchange

PATH = "/kept/"
_encode = msgspec.msgpack.Encoder().encode
_decode_stored = msgspec.msgpack.Decoder(response_store.StoredResponse).decode


class _Continuation(msgspec.Struct, frozen=True):
    """The field of a request that names the response to continue from."""

    previous_response_id: str | None = None


_decode_continuation = msgspec.json.Decoder(_Continuation).decode


class SharedResponses:
    """The response store of this process and those of its peers."""

    def __init__(self, store: response_store.ResponseStore, other_processes: peers.Peers) -> None:
        self._store = store
        self._peers = other_processes
        self.routes: peers.PeerRoutes = {
            ("GET", PATH + "*"): self._respond_stored,
            ("DELETE", PATH + "*"): self._remove,
        }

    def wrap_continuing(self, handler: exchange.Handler) -> exchange.Handler:
        """Return a handler that first fetches the response from which a request continues."""
        if self._peers.name is None:
            return handler

        async def handle(client: exchange.Exchange) -> None:
            try:
                response_id = _decode_continuation(client.request.body).previous_response_id
            except (msgspec.DecodeError, UnicodeDecodeError):
                response_id = None  # the error is reported where the whole request is decoded
            if response_id is not None:
                await self._fetch(response_id)
            await _finish(handler(client))

        return handle

    def wrap_lookup(self, path: str, handler: exchange.Handler) -> exchange.Handler:
        """Return a handler for `path` and a response id that fetches it first; DELETE removes it from all processes."""
        if self._peers.name is None:
            return handler

        async def handle(client: exchange.Exchange) -> None:
            response_id = client.request.path.removeprefix(path)
            await self._fetch(response_id)
            if client.request.method == "DELETE":
                await self._peers.ask_all("DELETE", PATH + quote(response_id, safe=""))
            await _finish(handler(client))

        return handle

    async def _fetch(self, response_id: str) -> None:
        if self._store.find(response_id) is not None:
            return
        bodies = await self._peers.ask_all("GET", PATH + quote(response_id, safe=""))
        for body in bodies.values():
            self._store.put(response_id, _decode_stored(body))

    def _respond_stored(self, client: exchange.Exchange) -> None:
        stored = self._store.find(client.request.path.removeprefix(PATH))
        peers.respond_optional(client, None if stored is None else _encode(stored))

    def _remove(self, client: exchange.Exchange) -> None:
        was_stored = self._store.remove(client.request.path.removeprefix(PATH))
        peers.respond_optional(client, b"" if was_stored else None)


async def _finish(answering: Awaitable[None] | None) -> None:
    if answering is not None:
        await answering
