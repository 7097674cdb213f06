"""Gives the files on a worker's card to frontends of other hosts: by the object store, if the worker is connected to
one, and in any case to who asks for them over the request plane.

Only what the card names is given away, and never weights. What lies in the store is named by its content, so all
workers of a model share it, and it stays for as long as one of them lives and a while longer (`object_store.Bounds`).
"""

import asyncio
import logging
from pathlib import Path

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.protocols import instances, model_card
from dynamo.runtime import component, object_store, requests

_logger = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(model_card.FilePart).decode


class FileSharing:
    """For one worker: `share`, then `close`."""

    def __init__(self, runtime: component.DistributedRuntime, clock: clocks.Clock) -> None:
        self._runtime = runtime
        self._clock = clock
        self._card: model_card.ModelCard | None = None
        self._tasks = tasks.Tasks()

    async def share(
        self, card: model_card.ModelCard, beside: instances.EndpointName
    ) -> model_card.ModelCard:
        """Before the card is published: as it is then to be."""
        self._card = card
        await self._runtime.requests.serve(model_card.endpoint_of_files(beside), self._asked)
        store = self._runtime.services.object_store()
        if store is None or not card.files:
            return card
        shared = await _put(card, store)
        if shared is not card:
            self._tasks.start("keep model files in the store", self._keep(card, store))
        return shared

    async def close(self) -> None:
        """Give nothing more."""
        await self._tasks.close()

    async def _keep(self, card: model_card.ModelCard, store: object_store.ObjectStore) -> None:
        while True:
            await self._clock.sleep(object_store.Bounds().fresh_s)
            await _put(card, store)

    def _asked(self, call: requests.Call) -> None:
        self._tasks.start("give a model file", self._give(call))

    async def _give(self, call: requests.Call) -> None:
        try:
            part = await asyncio.to_thread(self._read, _decode(call.body))
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
            call.fail(errors.RemoteProtocolError(f"expected a part of a file on the card: {error}"))
        except OSError as error:
            call.fail(errors.Unavailable(f"the worker cannot read its own file: {error}"))
        else:
            call.reply(part)
            call.finish()

    def _read(self, part: model_card.FilePart) -> bytes:
        assert self._card is not None
        with Path(self._card.files[part.name].path).open("rb") as file:
            file.seek(part.offset)
            return file.read(model_card.PART_BYTES)


async def _put(card: model_card.ModelCard, store: object_store.ObjectStore) -> model_card.ModelCard:
    """The card that says where its files are in the store; the same card if they could not be put there."""
    try:
        files = {
            name: msgspec.structs.replace(file, url=await _put_one(file, store))
            for name, file in card.files.items()
        }
    except (errors.DynamoError, OSError) as error:
        _logger.warning("model files are not in the object store, and workers give them: %s", error)
        return card
    return msgspec.structs.replace(card, files=files)


async def _put_one(file: model_card.ModelFile, store: object_store.ObjectStore) -> str:
    content = await asyncio.to_thread(Path(file.path).read_bytes)
    return await store.put(file.checksum.replace(":", "-"), content)
