"""A running frontend: every part of it is made here, every long-lived task started here."""

import asyncio
import logging
import ssl
import time
from types import TracebackType

from dynamo.base import clock, errors, tasks
from dynamo.frontend import (
    app,
    clearing,
    config,
    embeddings,
    metrics,
    models,
    pipeline,
    response_store,
    responses,
)
from dynamo.frontend.kserve import loading
from dynamo.observability import metrics as observed
from dynamo.runtime import component
from dynamo.runtime.http import limits, server

_logger = logging.getLogger(__name__)


class Frontend:
    """Use as `async with`: enters listening, leaves with everything stopped."""

    def __init__(
        self, settings: config.FrontendConfig, runtime: component.DistributedRuntime
    ) -> None:
        settings.check()
        registry = observed.Registry(settings.metrics_prefix)
        counted = metrics.FrontendMetrics(registry, time.monotonic)
        now = clock.SystemClock()
        self.models = models.Models(
            runtime.discovery, runtime.client, counted, now, namespace=settings.namespace
        )
        answers = pipeline.Pipeline(
            self.models,
            counted,
            now,
            settings.router_mode,
            settings.request_timeout_secs or None,
        )
        vectors = embeddings.Embeddings(
            self.models, counted, settings.router_mode, settings.request_timeout_secs or None
        )
        store = response_store.ResponseStore(
            max_items=settings.response_store_items,
            max_bytes=settings.response_store_mb * 2**20,
        )
        caches = clearing.CacheClearing(self.models, runtime.requests, runtime.client)
        remembered = responses.Responses(store)
        self._app = app.App(answers, vectors, self.models, remembered, caches, registry)
        self._settings = settings
        self._server = server.HttpServer(
            self._app.routes,
            limits=limits.Limits(body_bytes=settings.http_body_limit_mb * 2**20),
            tls=_tls(settings),
            error_body=app.error_body,
        )
        self._grpc = loading.build(settings, answers, self.models)
        self._tasks = tasks.Tasks()
        self.port = 0
        self.grpc_port = 0

    async def __aenter__(self) -> "Frontend":
        host, port = self._settings.http_host, self._settings.http_port
        self.port = await self._server.start(host, port)
        try:
            self.grpc_port = await self._grpc.start(host, self._settings.kserve_grpc_port)
        except errors.ConfigError:
            await self._server.close()
            raise
        self._tasks.start("watch models", self.models.watch())
        _logger.info("listening on %s", self.url)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._grpc.stop(0)
        await self._server.close()
        await self._tasks.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        scheme = "https" if self._settings.tls_cert_path else "http"
        host = self._settings.http_host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then take nothing new and let what runs finish. Raises what a task died of."""
        await self._tasks.run_until(stop)
        await self.drain()

    async def drain(self) -> None:
        """Take nothing new, and let what runs finish, as long as the settings allow."""
        self._app.is_draining = True
        limit_s = self._settings.http_graceful_shutdown_timeout_secs
        _logger.info("stopping: running answers may take %g s to finish", limit_s)
        has_finished, _ = await asyncio.gather(
            self._server.drain(limit_s), self._grpc.stop(limit_s)
        )
        if not has_finished:
            _logger.warning("answers still running after %g s are cut off", limit_s)


def _tls(settings: config.FrontendConfig) -> ssl.SSLContext | None:
    if settings.tls_cert_path is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert_path, settings.tls_key_path)
    except (OSError, ssl.SSLError) as error:
        raise errors.ConfigError(
            "--tls-cert-path, --tls-key-path: expected a PEM certificate and its key in "
            f"{settings.tls_cert_path} and {settings.tls_key_path}: {error}"
        ) from error
    return context
