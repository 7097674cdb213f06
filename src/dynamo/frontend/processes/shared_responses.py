"""Answers of the Responses API where several processes share the port: who is asked may not be who keeps it.

It asks its siblings for what it does not have, and keeps what they give, so a conversation that moves to another
connection moves to its process once.
"""

from collections.abc import Awaitable
from urllib.parse import quote

import msgspec

from dynamo.frontend.processes import peers, response_store
from dynamo.runtime.http import exchange, router

PATH = "/kept/"
_encode = msgspec.msgpack.Encoder().encode
_decode_kept = msgspec.msgpack.Decoder(response_store.StoredResponse).decode


class _Continued(msgspec.Struct, frozen=True):
    """Of a request, what tells which answer it goes on from."""

    previous_response_id: str | None = None


_decode_request = msgspec.json.Decoder(_Continued).decode


class SharedResponses:
    """The store of this process and those of its siblings."""

    def __init__(self, store: response_store.ResponseStore, others: peers.Peers) -> None:
        self._store = store
        self._siblings = others
        self.routes: peers.PeerRoutes = {
            ("GET", PATH + "*"): self._tell,
            ("DELETE", PATH + "*"): self._forget,
        }

    def fetching(self, handler: router.Handler) -> router.Handler:
        """`handler` for requests that may go on from an answer; what that is, is here when it is called."""
        if self._siblings.name is None:
            return handler

        async def handle(caller: exchange.Exchange) -> None:
            response_id = _previous(caller.request.body)
            if response_id is not None:
                await self._fetch(response_id)
            await _finish(handler(caller))

        return handle

    def finding(self, path: str, handler: router.Handler) -> router.Handler:
        """`handler` for `path` and an answer's id. One that deletes, deletes everywhere."""
        if self._siblings.name is None:
            return handler

        async def handle(caller: exchange.Exchange) -> None:
            response_id = caller.request.path.removeprefix(path)
            await self._fetch(response_id)
            if caller.request.method == "DELETE":
                await self._siblings.ask("DELETE", PATH + quote(response_id, safe=""))
            await _finish(handler(caller))

        return handle

    async def _fetch(self, response_id: str) -> None:
        if self._store.find(response_id) is not None:
            return
        answers = await self._siblings.ask("GET", PATH + quote(response_id, safe=""))
        for found in answers.values():
            self._store.keep(response_id, _decode_kept(found))

    def _tell(self, caller: exchange.Exchange) -> None:
        kept = self._store.find(caller.request.path.removeprefix(PATH))
        peers.respond_optional(caller, None if kept is None else _encode(kept))

    def _forget(self, caller: exchange.Exchange) -> None:
        was_here = self._store.forget(caller.request.path.removeprefix(PATH))
        peers.respond_optional(caller, b"" if was_here else None)


async def _finish(answering: Awaitable[None] | None) -> None:
    if answering is not None:
        await answering


def _previous(body: bytes) -> str | None:
    try:
        return _decode_request(body).previous_response_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # whoever reads the whole request says what is wrong with it
