"""LoRA adapters of a worker that are loaded and unloaded while it serves.

One change at a time. An adapter is loaded before others hear of it, and they hear that it goes before it is unloaded.
Frontends learn of both by the model card. A name stands for its blocks, too, here and at every router: whoever changes
an adapter should call the new one otherwise.
"""

import asyncio
import itertools
import logging
import os.path
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.protocols import model_errors

LOAD_S = 300.0
MAX_ADAPTERS = 512  # their names are on the card, which every frontend reads at each change
FILE = "adapter_config.json"
_logger = logging.getLogger(__name__)
Publish = Callable[[tuple[str, ...]], Awaitable[None]]


class Loras:
    """What can be told from `begin` on."""

    def __init__(
        self,
        engine: api.LoraAdapterStore,
        publish: Publish,
        serves: Callable[[], bool],
        *,
        load_s: float = LOAD_S,
    ) -> None:
        """`publish` tells others which there are; `serves` says whether the worker does now."""
        self._engine, self._publish, self._serves, self._load_s = engine, publish, serves, load_s
        self._numbers = itertools.count(1)
        self._number_by_name: dict[str, int] = {}
        self._directories: dict[str, Path] = {}  # of those that were loaded here
        self._model_name: str | None = None
        self._turn = asyncio.Lock()
        self._tasks = tasks.Tasks()

    def begin(self, model_name: str) -> None:
        """The worker serves."""
        self._model_name = model_name
        self._number_by_name = {name: next(self._numbers) for name in self._engine.lora_names}

    @property
    def numbers(self) -> Mapping[str, int]:
        """Of those that are there, by name."""
        return self._number_by_name

    async def settle(self) -> None:
        """Nothing changes when this returns, nor until the worker serves again. Bounded by the time of a load."""
        async with self._turn:
            return

    async def close(self) -> None:
        """A change that is under way ends now, wherever it is; the worker serves no more."""
        await self._tasks.close()

    async def load(self, name: str, directory: Path) -> int:
        """Serve it; gives its number. Idempotent. Raises InvalidRequest, Conflict, EngineFailed."""
        return await self._change(self._load(name, directory))

    async def unload(self, name: str) -> int:
        """Serve it no more; gives the number that it had. Raises ModelNotFound, Conflict, EngineFailed."""
        return await self._change(self._unload(name))

    async def _change(self, work: Coroutine[Any, Any, int]) -> int:
        """Goes on to its end though nobody waits for it any more."""
        task = self._tasks.start("change adapters", _caught(work))
        await asyncio.wait([task])
        if task.cancelled():
            work.close()  # it may not have begun
            raise errors.Conflict("the worker stops")
        result: int | errors.DynamoError = task.result()
        if isinstance(result, errors.DynamoError):
            raise result
        return result

    async def _load(self, name: str, directory: Path) -> int:
        async with self._turn:
            self._check_serves()
            if self._directories.get(name) == directory:
                return self._number_by_name[name]
            await self._check(name, directory)
            try:
                async with asyncio.timeout(self._load_s):
                    await self._engine.load_lora(name, directory)
            except TimeoutError as error:
                raise errors.EngineFailed(
                    f"{name!r}: not loaded within {self._load_s:g} s"
                ) from error
            await self._tell_or_unload(name)
            self._directories[name] = directory
            self._number_by_name[name] = next(self._numbers)
            _logger.info("serving the LoRA adapter %r from %s", name, directory)
            return self._number_by_name[name]

    async def _unload(self, name: str) -> int:
        async with self._turn:
            self._check_serves()
            if name not in self._number_by_name:
                known = ", ".join(self._number_by_name) or "none"
                raise model_errors.ModelNotFound(
                    f"there is no LoRA adapter {name!r} here, but {known}"
                )
            await self._publish(tuple(one for one in self._engine.lora_names if one != name))
            self._directories.pop(name, None)
            number = self._number_by_name.pop(name)
            await self._engine.unload_lora(name)
            _logger.info("the LoRA adapter %r is unloaded", name)
            return number

    def _check_serves(self) -> None:
        if not self._serves():
            raise errors.Conflict("the worker does not serve now: try again when it does")

    async def _check(self, name: str, directory: Path) -> None:
        if name == self._model_name:
            raise errors.Conflict(f"{name!r} is the model itself: give the adapter another name")
        if name in self._number_by_name:
            where = self._directories.get(name, "the start")
            raise errors.Conflict(f"the adapter {name!r} is there, from {where}: unload it first")
        if len(self._number_by_name) >= MAX_ADAPTERS:
            raise errors.Conflict(f"there are {MAX_ADAPTERS} LoRA adapters here: unload one first")
        if not await asyncio.to_thread(os.path.isfile, directory / FILE):
            raise errors.InvalidRequest(
                f"source.uri: expected a directory of this worker's host with {FILE}, got {directory}",
                param="source.uri",
            )

    async def _tell_or_unload(self, name: str) -> None:
        try:
            await self._publish(self._engine.lora_names)
        except BaseException:
            await self._engine.unload_lora(name)
            raise


async def _caught(work: Coroutine[Any, Any, int]) -> int | errors.DynamoError:
    try:
        return await work
    except errors.DynamoError as error:
        return error
