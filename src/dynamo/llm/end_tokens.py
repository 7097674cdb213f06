"""The tokens that end an answer of a model, by the files on its card, for services without a preprocessor."""

import asyncio
import logging

import msgspec

from dynamo.base import errors
from dynamo.frontend.model_registry import file_fetcher
from dynamo.preprocess import loading, options
from dynamo.protocols import instances, model_card
from dynamo.runtime import authentication, component

_FILES = ("generation_config.json", "config.json")
_logger = logging.getLogger(__name__)


class EndTokens:
    """Reads the end tokens of each model once."""

    def __init__(self, runtime: component.DistributedRuntime) -> None:
        self._runtime = runtime
        self._log = authentication.RefusalLog(_logger, runtime.clock.now)
        self._ids_by_checksums: dict[tuple[str, ...], tuple[int, ...]] = {}

    async def read(
        self, card: model_card.ModelCard, worker: instances.Instance | None
    ) -> tuple[int, ...]:
        """Return the end tokens of a model; `worker` gives its files, where they are not on this host.

        None, and a line in the log, if they cannot be had: an answer then ends by its length alone.
        """
        files = {name: card.files[name] for name in _FILES if name in card.files}
        key = tuple(file.checksum for file in files.values())
        if key not in self._ids_by_checksums:
            small_card = msgspec.structs.replace(card, files=files)
            try:
                self._ids_by_checksums[key] = await self._fetch(small_card, worker)
            except errors.ConfigError as error:
                name = card.display_name
                self._log.warning(name, "the end tokens of %r are not known: %s", name, error)
                return ()
        return self._ids_by_checksums[key]

    async def _fetch(
        self, card: model_card.ModelCard, worker: instances.Instance | None
    ) -> tuple[int, ...]:
        plane = self._runtime.requests
        provider = worker and file_fetcher.FileProvider.of(worker, plane.name)
        fetcher = file_fetcher.FileFetcher(
            plane, self._runtime.services, file_fetcher.cache_directory(None), self._runtime.clock
        )
        files = loading.ModelFiles(await fetcher.fetch_files(card, (provider,) if provider else ()))
        configs = [await asyncio.to_thread(files.read_json, name) for name in _FILES]
        return options.collect_eos_token_ids(configs, None)
