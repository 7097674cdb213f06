"""The native embedder as the worker sees it: its methods run on the event loop, its work in a thread of its own."""

import asyncio
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.native.settings import NativeConfig
from dynamo.engine.native.text_embedding import TextEmbedding


class NativeEmbedder:
    """An `api.Embedder`. `start` comes first."""

    def __init__(self, model_path: Path, settings: NativeConfig) -> None:
        self._model_path = model_path
        self._settings = settings
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedder")
        self._model: TextEmbedding | None = None

    async def start(self) -> api.EmbedderFacts:
        """Load, in the thread that will compute."""
        loop = asyncio.get_running_loop()
        try:
            self._model = await loop.run_in_executor(self._thread, self._load)
        except errors.ConfigError:
            raise
        except Exception as error:
            raise _failure("the model could not be loaded", error) from error
        return self._model.facts

    async def embed(self, batch: Sequence[api.EmbedInput]) -> list[bytes]:
        """In the thread. Raises EngineFailed."""
        assert self._model is not None, "the embedder is used before start() has returned"
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._model.embed, batch)
        except Exception as error:
            raise _failure(f"a batch of {len(batch)} texts failed", error) from error

    async def stop(self) -> None:
        """Returns when the thread has ended."""
        await asyncio.to_thread(self._thread.shutdown)

    def _load(self) -> TextEmbedding:
        return TextEmbedding(self._model_path, self._settings)


def _failure(what: str, error: Exception) -> errors.EngineFailed:
    return errors.EngineFailed(f"{what}: {type(error).__name__}: {error}")
