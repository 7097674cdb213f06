"""The routing service of a process: the router with its file, metrics and log lines.

A changed file becomes a new router; a wrong one keeps the old in force. A change over HTTP holds until the next.

Frontend, gateway and classification API share the service. A log line names model, decision and
reasons, never the text.
"""

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import distribution, errors
from dynamo.observability import metrics as observed
from dynamo.protocols import encoders
from dynamo.runtime.http import exchange
from dynamo.semantic import (
    answer_usage,
    cache,
    cache_file,
    config,
    config_file,
    encoder_client,
    encoder_labels,
    encoder_scores,
    guards,
    metrics,
    model_choice,
    request_view,
    rewriting,
    routing_outcome,
    served_embeddings,
)
from dynamo.semantic import router as semantic_router
from dynamo.semantic.classifiers import profile

if TYPE_CHECKING:
    from dynamo.semantic import milvus_answers

_PART = 64  # texts that are embedded by one call, for a configuration
# Of a request that is read on the event loop, in some tens of milliseconds at most.
ROUTED_AT_ONCE_BYTES = 32 * 2**10
RELOAD_INTERVAL_S = 2.0  # between looks at the file
_logger = logging.getLogger(__name__)


class RouterLoader:
    """Owns the file of a router, and looks at those that it names. Raises ConfigError if the first file is wrong."""

    def __init__(
        self, path: Path, clock: clocks.Clock, served: model_choice.ServedModels | None = None
    ) -> None:
        self.path = path
        self._clock = clock
        self.on_reload: Callable[[], None] | None = None
        self.has_encoders = True  # else a file that needs their process is refused
        self._profile = profile.load_profile()
        self._stamp_by_path = {path: _read_stamp(path)}
        loaded = self._load()
        self._follow_files(loaded.settings)
        self.router = semantic_router.SemanticRouter(
            loaded, self._profile, clock, served, threading.RLock()
        )
        self.last_error = ""  # of the last file, if it was refused
        self.is_saved = True  # whether the file says what is in force
        self._log_notes()

    async def watch(self) -> None:
        """Reload the file whenever it, or one that it names, changes, until cancelled."""
        while True:
            await self._clock.sleep(RELOAD_INTERVAL_S)
            self.reload_if_changed()

    def reload_if_changed(self) -> bool:
        """Read a changed file, and return whether it is in force; a wrong one is logged and passed over."""
        stamps = {path: _read_stamp(path) for path in self._stamp_by_path}
        if stamps == self._stamp_by_path:
            return False
        self._stamp_by_path = stamps
        try:
            loaded = self._load()
        except errors.ConfigError as error:
            self.last_error = str(error)
            _logger.error("%s; the configuration from before stays in force", error)  # noqa: TRY400
            return False
        self.last_error = ""
        self._follow_files(loaded.settings)
        self._put_in_force(loaded)
        self.is_saved = True
        _logger.info("%s: reloaded, %d decisions", self.path, len(loaded.settings.decisions))
        return True

    def read_change(self, data: bytes) -> config_file.LoadedConfig:
        """Return the configuration in force with a change, a JSON merge patch. Raises ConfigError. For any thread."""
        settings, categories = self.router.settings, self._profile.categories
        return self._check(config_file.parse_change(data, settings, categories, self.path.parent))

    def apply_change(self, loaded: config_file.LoadedConfig) -> None:
        """Use a changed configuration until the file changes or the process ends; the file stays as it is."""
        self._put_in_force(loaded)
        self.is_saved = False
        _logger.warning(
            "the configuration was changed over HTTP, %d decisions; %s does not have the change",
            len(loaded.settings.decisions),
            self.path,
        )

    def _put_in_force(self, loaded: config_file.LoadedConfig) -> None:
        self.router = self.router.with_config(loaded)
        self._log_notes()
        if self.on_reload is not None:
            self.on_reload()

    def _load(self) -> config_file.LoadedConfig:
        return self._check(config_file.load(self.path, self._profile.categories))

    def _check(self, loaded: config_file.LoadedConfig) -> config_file.LoadedConfig:
        if loaded.uses_process and not self.has_encoders:
            raise errors.ConfigError(
                f"{self.path}: it names encoders, and this process was started without them: start it again"
            )
        return loaded

    def _log_notes(self) -> None:
        for note in self.router.loaded.notes:
            _logger.warning("%s: %s", self.path, note)

    def _follow_files(self, settings: config.SemanticConfig) -> None:
        """Look from now on at the files that a configuration names, and no longer at those of the former one."""
        others = [
            config.find_file(key, name, self.path.parent)
            for key, name in settings.other_files.items()
        ]
        self._stamp_by_path = {
            path: self._stamp_by_path.get(path) or _read_stamp(path)
            for path in (self.path, *others)
        }


def _read_stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes with a file: time, size and number; zeros if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ctime_ns, status.st_size, status.st_ino


def load_config(
    path: Path, find_hub_model: encoder_labels.FindHubModel = encoder_labels.find_in_hub_cache
) -> config_file.LoadedConfig:
    """Return the configuration in a file. Raises ConfigError, which names the key."""
    return config_file.load(path, profile.load_profile().categories, find_hub_model)


class RoutingService:
    """Routes requests and records what became of them.

    Raises ConfigError for a wrong file, for a directory of cached answers that it cannot have, or for Milvus without
    its client.
    """

    def __init__(
        self,
        path: Path,
        registry: observed.Registry,
        clock: clocks.Clock,
        served: model_choice.ServedModels | None = None,
    ) -> None:
        self.loader = RouterLoader(path, clock, served)
        self.loader.has_encoders = False  # until they are connected
        self._encoders: encoder_client.EncoderClient | None = None
        self._references: asyncio.Task[None] | None = None
        self.metrics = metrics.SemanticMetrics(registry)
        self._clock = clock
        self._cache_file: cache_file.CacheFile | None = None
        self._milvus: milvus_answers.MilvusAnswers | None = None
        self._local_s: float | None = None  # that answers stay here, if others may delete them
        self._open_storage()
        self.loader.on_reload = self._reopen_storage

    def close(self) -> None:
        """Close the file of the cached answers, so that another process may use its directory, or leave Milvus."""
        if self._cache_file is not None:
            self._cache_file.close()
            self._cache_file = None
        if self._milvus is not None:
            self._milvus.close()
            self._milvus = self._local_s = None

    def _open_storage(self) -> None:
        """Read the cached answers from their directory, or connect to Milvus, if one is named. Raises ConfigError."""
        settings = self.router.settings
        if not settings.semantic_cache.enabled:
            return
        if settings.semantic_cache.backend_type == "milvus":
            backend = distribution.load_extra(
                "dynamo.semantic.milvus_answers",
                feature="semantic_cache.backend_type: milvus",
                extra="milvus",
            )
            # routers of other addresses or bounds share the answers all the same
            shared = msgspec.structs.replace(settings, semantic_cache=config.CacheSettings())
            self._local_s = backend.LOCAL_S
            self._milvus = backend.MilvusAnswers(
                settings.semantic_cache,
                cache_file.make_origin(shared),
                self._clock,
                self.metrics.record_milvus,
            )
        if not settings.semantic_cache.directory:
            return
        try:
            named = settings.semantic_cache.directory
            directory = config.find_file("semantic_cache.directory", named)
            self._cache_file = cache_file.CacheFile(directory, self._clock)
        except errors.ConfigError as error:
            raise errors.ConfigError(self.router.loaded.name_key(str(error))) from error
        self._cache_file.follow(self.router.cache, cache_file.make_origin(settings))

    def _reopen_storage(self) -> None:
        """Write the answers of a reloaded configuration where it says."""
        self.close()
        try:
            self._open_storage()
        except errors.ConfigError as error:
            _logger.error("%s; answers are cached in memory only", error)  # noqa: TRY400

    @property
    def router(self) -> semantic_router.SemanticRouter:
        """Return the router with the configuration that is in force."""
        return self.loader.router

    def connect_encoders(self, encoders: encoder_client.EncoderClient) -> None:
        """Ask this process for what the configuration's encoders say, from now on."""
        self._encoders = encoders
        self.loader.has_encoders = True

    async def recall(self, body: bytes, headers: Mapping[str, str], tenant: str) -> None:
        """Fetch what Milvus has for a chat completion, before it is routed, if this process has no answer itself.

        What the request asks to delete is deleted first.
        """
        milvus = self._milvus
        if milvus is None or not self.router.caches_answers:
            return
        names = cache.names_to_delete(headers)
        try:
            if names:
                await self.delete_answers(names, tenant)
            view = await exchange.decode_apart(body, request_view.RequestView)
            key = cache.make_key(view, headers, tenant)
        except errors.InvalidRequest:
            return  # `route` refuses the request
        except errors.Unavailable as error:
            _logger.warning("%s: %s", cache.DELETE_HEADER, error)
            return
        answers = self.router.cache
        if key is None or view.has_tools or answers.has(key):
            return
        found = await milvus.find(key)
        if found is not None:
            left_s = found.expires_at - self._clock.now()
            answers.store(found.key, found.body, min(left_s, self._local_s or left_s))

    async def delete_answers(self, names: Sequence[str], tenant: str) -> int:
        """Delete the cached answers of names that a tenant was given, and return how many there were.

        Raises Unavailable if Milvus has not confirmed it.
        """
        digests = {digest for name in names if (digest := cache.read_name(name)) is not None}
        deleted = {digest for digest in digests if self.router.cache.delete(digest.hex(), tenant)}
        if self._milvus is not None:
            deleted |= await self._milvus.delete(digests, tenant)
        return len(deleted)

    async def invalidate_answers(self, tenant: str | None = None) -> int:
        """Delete all cached answers of a tenant, or of all, and return their number. Raises Unavailable."""
        number = self.router.cache.invalidate(tenant)
        if self._milvus is not None:
            number = max(number, await self._milvus.invalidate(tenant))
        return number

    async def ask_encoders(
        self, body: bytes, api: rewriting.RequestApi = "chat"
    ) -> guards.RequestClassifiers | None:
        """Return the classifiers for a request, once the encoders have read its texts; None: the shipped ones."""
        if not self.router.loaded.uses_encoders:
            return None
        try:
            inputs = await exchange.decode_apart(
                body,
                lambda data: self.router.list_inputs(request_view.RequestView(data, api)),
                ROUTED_AT_ONCE_BYTES,
            )
        except errors.InvalidRequest:
            return None  # `route` refuses the request
        return await self.ask_encoders_for(inputs)

    async def ask_encoders_for(
        self, inputs: Sequence[encoders.ClassifierInput]
    ) -> guards.RequestClassifiers:
        """Return the classifiers with what the encoders answer for these texts."""
        router = self.router
        await self._embed_references()
        start = self._clock.now()
        answers = await self._classify(router, inputs)
        self.metrics.record_classification("encoders", self._clock.now() - start)
        return router.use_answers(answers)

    async def _classify(
        self, router: semantic_router.SemanticRouter, inputs: Sequence[encoders.ClassifierInput]
    ) -> encoder_scores.Answers:
        """Return the answers of the encoders' process and of the server of embeddings, asked at once."""
        settings = router.settings.encoders
        served = [
            one.text
            for one in inputs
            if one.classifier == encoder_labels.EMBEDDING and settings.embeddings_url
        ]
        others = [
            one
            for one in inputs
            if one.classifier != encoder_labels.EMBEDDING or not settings.embeddings_url
        ]
        answers = [served_embeddings.embed_texts(served, settings)]
        if self._encoders is not None:
            answers.append(self._encoders.classify(others, settings.timeout_seconds))
        return {key: one for part in await asyncio.gather(*answers) for key, one in part.items()}

    async def _embed_references(self) -> None:
        """Have the texts embedded that requests are compared with, once for a configuration.

        A request that comes meanwhile waits for the same answer; the next request asks for what was not answered.
        """
        router = self.router
        if not router.references.missing():
            return
        if self._references is None or self._references.done():
            self._references = asyncio.create_task(self._embed_missing(router))
        await asyncio.shield(self._references)

    async def _embed_missing(self, router: semantic_router.SemanticRouter) -> None:
        """Ask for the vectors in parts, until all are there or the encoder does not answer."""
        references = router.references
        while part := references.missing()[:_PART]:
            references.add(await self._classify(router, router.list_embedding_inputs(part)))
            if part[0] in references.missing():
                return

    def route(
        self,
        body: bytes,
        headers: Mapping[str, str],
        tenant: str = "",
        failed: Mapping[str, str] | None = None,
        classifiers: guards.RequestClassifiers | None = None,
        barred: Mapping[str, str] | None = None,
        api: rewriting.RequestApi = "chat",
    ) -> routing_outcome.RoutedRequest:
        """Return the outcome of a request, without models that `failed` or are `barred` to its caller.

        Raises InvalidRequest and NoWorkers.

        `classifiers` are those of `ask_encoders`.
        """
        start = self._clock.now()
        try:
            outcome = self.router.route(body, headers, tenant, failed, classifiers, barred, api)
        except (errors.InvalidRequest, errors.NoWorkers) as error:
            if errors.NoWorkers not in (type(error), type(error.__cause__)):
                self.metrics.record_refusal("unknown", "parse_error")
                raise
            self.metrics.record_refusal("none", "no_model")
            _logger.warning("routing_decision: %s", error)
            raise
        seconds = self._clock.now() - start
        explanation = outcome.explanation
        outcome.routed_at = self._clock.now()
        self.metrics.record_outcome(
            outcome,
            self._label_of(explanation.model or explanation.requested_model),
            self._label_of(explanation.requested_model),
            seconds,
            len(self.router.cache),
        )
        self._log(outcome, seconds)
        return outcome

    def _label_of(self, model: str) -> str:
        """Return the label of a model; names that only a client knows have one, or they would fill the memory."""
        return model if self.router.knows(model) else metrics.UNKNOWN_MODEL

    def record_first_piece(self, outcome: routing_outcome.RoutedRequest, data: bytes) -> None:
        """Record when an answer began, and note the id of its response; `data` is its first piece."""
        outcome.begun_at = self._clock.now()
        model = self._label_of(outcome.explanation.model)
        self.metrics.record_first_piece(model, outcome.begun_at - outcome.routed_at)
        self.router.remember_response(outcome, data)

    def record_failure(self, outcome: routing_outcome.RoutedRequest, status: int) -> None:
        """Count an answer of the model's server that is an error."""
        reason = "upstream_5xx" if status >= 500 else "upstream_4xx"
        self.metrics.record_refusal(self._label_of(outcome.explanation.model), reason)

    def record_answer(self, outcome: routing_outcome.RoutedRequest, body: bytes | None) -> None:
        """Count the time and usage of a complete answer, and store it where the request's decision caches."""
        try:
            usage = {} if body is None else answer_usage.read_body(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            usage = {}
        self._record_end(outcome, body, usage)

    def record_stream(
        self, outcome: routing_outcome.RoutedRequest, recorder: cache.StreamRecorder | None
    ) -> None:
        """Do the same for a stream that has ended; None if nothing of it was read."""
        if recorder is None:
            self._record_end(outcome, None, {})
        else:
            self._record_end(outcome, recorder.body(), recorder.usage, is_stream=True)

    def _record_end(
        self,
        outcome: routing_outcome.RoutedRequest,
        body: bytes | None,
        usage: Mapping[str, Any],
        *,
        is_stream: bool = False,
    ) -> None:
        model, ended_at = self._label_of(outcome.explanation.model), self._clock.now()
        self.metrics.record_end(model, ended_at - outcome.routed_at)
        # the cache of a changed configuration has no answers by the former one
        is_current = outcome.settings == self.router.settings
        if body is not None and outcome.cache_key is not None and is_current:
            is_stored = self.router.cache.store(outcome.cache_key, body, self._local_s)
            if is_stored and self._milvus is not None:
                self._milvus.put(outcome.cache_key, body)
        if (counted := answer_usage.count(usage)) is None:
            _logger.debug("an answer without usage")
            return
        num_prompt, num_written = counted
        self.metrics.record_usage(model, num_prompt, num_written)
        if is_stream and num_written > 1 and outcome.begun_at is not None:
            seconds = (ended_at - outcome.begun_at) / (num_written - 1)
            self.metrics.record_token_time(model, seconds)
        entry = self.router.settings.find_model(outcome.explanation.model)
        if entry is not None and (price := entry.pricing) is not None:
            cost = num_prompt * price.prompt_per_1m + num_written * price.completion_per_1m
            self.metrics.record_cost(model, cost / 1e6, price.currency)

    def _log(self, outcome: routing_outcome.RoutedRequest, seconds: float) -> None:
        explanation = outcome.explanation
        for verdict in explanation.verdicts:
            if verdict.action != "none" or guards.FAILURE in verdict.labels:
                _logger.warning(
                    "security_block: guard %s, action %s, decision %r, labels %s, %s",
                    verdict.guard,
                    verdict.action,
                    explanation.decision,
                    ",".join(verdict.labels),
                    verdict.reason,
                )
        if explanation.observed:
            _logger.info("observed_decision: %r would apply", explanation.observed)
        if explanation.signals.missing_embedding:
            _logger.warning("no embedding rule holds: %s", explanation.signals.missing_embedding)
        if explanation.tools is not None and explanation.tools.missing:
            _logger.warning("no tools were selected: %s", explanation.tools.missing)
        if explanation.path == "cache":
            _logger.info("cache_hit: decision %r", explanation.decision)
        elif outcome.answer is None:
            _logger.info(
                "routing_decision: model %r asked, %r chosen, decision %r (%s), category %r, reasoning %s, %.2f ms",
                explanation.requested_model[:100],
                explanation.model,
                explanation.decision,
                ", ".join(explanation.reasons),
                explanation.category,
                explanation.reasoning,
                seconds * 1000,
            )


def tenant_of(headers: Mapping[str, str]) -> str:
    """Return what tells callers apart in cache and conversations: a hash of their key, or nothing.

    All headers of keys count: the `authorization` of a proxy is the same for all, and their keys are in another.
    """
    keys = (headers.get(name) for name in ("authorization", "x-api-key", "api-key"))
    key = "\n".join(filter(None, keys))
    return hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""
