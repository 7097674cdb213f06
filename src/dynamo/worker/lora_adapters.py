"""The LoRA adapters of a worker, loaded and unloaded by an operator while it serves.

One change runs at a time. An adapter is loaded before its name is published on the model card, and the name is
withdrawn before the adapter is unloaded. A load answers when discovery has the name: a frontend looks there before it
says that it does not know a model. KV blocks are cached under the adapter's name, here and at every router: a changed
adapter needs a new name.

Routes of the system port, named as in NVIDIA Dynamo (`/loras` means the same as `/v1/loras`):

POST /v1/loras      {"lora_name": "poet", "source": {"uri": "file:///adapters/poet"}}   200 when clients can use it
GET /v1/loras       the adapters that are loaded
DELETE /v1/loras/…  200 when no new request uses the adapter of this name
"""

import asyncio
import functools
import itertools
import logging
import os.path
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.protocols import model_errors
from dynamo.runtime.http import exchange, json_body
from dynamo.worker import health

LOAD_S = 300.0
MAX_ADAPTERS = 512  # every frontend reads their names at each change of the card
CONFIG_FILE = "adapter_config.json"
_PREFIXES = ("/v1/loras", "/loras")
_logger = logging.getLogger(__name__)
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_Command = Callable[[exchange.Exchange], Awaitable[Mapping[str, object]]]
Publish = Callable[[tuple[str, ...]], Awaitable[None]]


class AdapterSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an adapter's files are."""

    uri: _Text


class LoadAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/loras."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    source: AdapterSource


_decode_load = json_body.RequestDecoder(LoadAdapterRequest).decode


class LoraAdapters:
    """Loads and unloads the adapters of one worker, from `begin` on."""

    def __init__(
        self,
        store: api.LoraAdapterStore,
        publish: Publish,
        is_serving: Callable[[], bool],
        clock: clocks.Clock,
        *,
        load_s: float = LOAD_S,
    ) -> None:
        """Use `publish` to put the names of all adapters on the model card.

        An engine may take `load_s` seconds for an adapter.
        """
        self._store, self._publish, self._is_serving = store, publish, is_serving
        self._clock = clock
        self._load_s = load_s
        self._numbers = itertools.count(1)
        self._number_by_name: dict[str, int] = {}
        # of those that clients can use; None: from the command line
        self._directory_by_name: dict[str, Path | None] = {}
        self._model_name: str | None = None
        self._change_lock = asyncio.Lock()
        self._tasks = tasks.Tasks()

    def begin(self, model_name: str) -> None:
        """Accept commands: the worker serves now, under this name."""
        self._model_name = model_name
        self._number_by_name = {name: next(self._numbers) for name in self._store.lora_names}
        self._directory_by_name = dict.fromkeys(self._number_by_name)

    @property
    def number_by_name(self) -> Mapping[str, int]:
        """The number of each adapter that is loaded."""
        return self._number_by_name

    @property
    def is_changing(self) -> bool:
        """Whether an adapter is being loaded or unloaded: vLLM computes nothing while it reads one."""
        return self._change_lock.locked()

    async def settle(self) -> None:
        """Wait for the change that is under way; none begins until the worker serves again. Takes `load_s` at most."""
        async with self._change_lock:
            return

    async def close(self) -> None:
        """Cancel the change that is under way."""
        await self._tasks.close()

    async def load(self, name: str, directory: Path) -> int:
        """Load an adapter, publish it and return its number; returns at once if the same one is loaded.

        Raises InvalidRequest, Conflict or EngineFailed.
        """
        return await self._run_to_end(self._load(name, directory))

    async def unload(self, name: str) -> int:
        """Unload an adapter and return the number that it had. Raises ModelNotFound, Conflict or EngineFailed."""
        return await self._run_to_end(self._unload(name))

    def routes(self) -> Mapping[tuple[str, str], exchange.Handler]:
        """Return the routes of the system port for all three commands."""

        async def load(request: exchange.Exchange) -> Mapping[str, object]:
            body = _decode_load(request.request.body)
            number = await self.load(body.lora_name, parse_directory(body.source.uri))
            return _success(body.lora_name, number, "is loaded")

        async def show(_: exchange.Exchange) -> Mapping[str, object]:
            adapters = self.number_by_name
            return {"status": "success", "loras": adapters, "count": len(adapters)}

        async def unload(request: exchange.Exchange) -> Mapping[str, object]:
            name = request.request.path.partition("/loras/")[2]
            return _success(name, await self.unload(name), "is unloaded")

        async def respond(command: _Command, request: exchange.Exchange) -> None:
            await health.respond(request, command(request))

        commands = {("POST", ""): load, ("GET", ""): show, ("DELETE", "/**"): unload}
        return {
            (method, prefix + suffix): functools.partial(respond, command)
            for prefix in _PREFIXES
            for (method, suffix), command in commands.items()
        }

    async def _run_to_end(self, work: Coroutine[Any, Any, int]) -> int:
        """Run a change to its end, even if the caller is cancelled meanwhile."""

        async def caught() -> int | errors.DynamoError:
            try:
                return await work
            except errors.DynamoError as error:
                return error

        task = self._tasks.start("change adapters", caught())
        await asyncio.wait([task])
        if task.cancelled():
            work.close()  # it may not have begun
            raise errors.Conflict("the worker stops")
        result: int | errors.DynamoError = task.result()
        if isinstance(result, errors.DynamoError):
            raise result
        return result

    async def _load(self, name: str, directory: Path) -> int:
        async with self._change_lock:
            self._check_serving()
            if self._directory_by_name.get(name) == directory:
                return self._number_by_name[name]
            await self._check_new_adapter(name, directory)
            try:
                async with self._clock.timeout(self._load_s):
                    await self._store.load_lora(name, directory)
            except TimeoutError as error:
                raise errors.EngineFailed(
                    f"{name!r}: not loaded within {self._load_s:g} s"
                ) from error
            try:
                await self._publish((*self._directory_by_name, name))
            except BaseException:
                await self._store.unload_lora(name)
                raise
            self._directory_by_name[name] = directory
            self._number_by_name[name] = next(self._numbers)
            _logger.info("serving the LoRA adapter %r from %s", name, directory)
            return self._number_by_name[name]

    async def _unload(self, name: str) -> int:
        async with self._change_lock:
            self._check_serving()
            if name not in self._number_by_name:
                loaded = ", ".join(self._number_by_name) or "none"
                raise model_errors.ModelNotFound(
                    f"there is no LoRA adapter {name!r} here, but {loaded}"
                )
            await self._publish(tuple(n for n in self._directory_by_name if n != name))
            self._directory_by_name.pop(name, None)
            await self._store.unload_lora(name)
            _logger.info("the LoRA adapter %r is unloaded", name)
            return self._number_by_name.pop(name)

    def _check_serving(self) -> None:
        if not self._is_serving():
            raise errors.Conflict("the worker does not serve now: try again when it does")

    async def _check_new_adapter(self, name: str, directory: Path) -> None:
        if name == self._model_name:
            raise errors.Conflict(f"{name!r} is the model itself: give the adapter another name")
        if name in self._number_by_name:
            origin = self._directory_by_name.get(name, "an unload that failed") or "the start"
            raise errors.Conflict(f"the adapter {name!r} is there, from {origin}: unload it first")
        if len(self._number_by_name) >= MAX_ADAPTERS:
            raise errors.Conflict(f"there are {MAX_ADAPTERS} LoRA adapters here: unload one first")
        if not await asyncio.to_thread(os.path.isfile, directory / CONFIG_FILE):
            raise errors.InvalidRequest.of_param(
                "source.uri",
                f"expected a directory of this worker's host with {CONFIG_FILE}, got {directory}",
            )


def parse_directory(uri: str) -> Path:
    """Return the directory of `file:///directory` or of an absolute path. Raises InvalidRequest for anything else."""
    if uri.startswith("/") and not uri.startswith("//"):
        return Path(uri)
    refusal = errors.InvalidRequest.of_param(
        "source.uri", f"expected file:///directory on this worker's host, got {uri!r}"
    )
    try:
        scheme, host, path, *extra_parts = urllib.parse.urlsplit(uri)
    except ValueError as error:
        raise refusal from error
    if (
        scheme != "file"
        or host not in ("", "localhost")
        or any(extra_parts)
        or not path.startswith("/")
    ):
        raise refusal
    return Path(urllib.parse.unquote(path))


def _success(name: str, number: int, outcome: str) -> Mapping[str, object]:
    message = f"LoRA adapter {name!r} {outcome}"
    return {"status": "success", "message": message, "lora_name": name, "lora_id": number}
