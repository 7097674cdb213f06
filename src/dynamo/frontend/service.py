"""A running frontend: every part of it is made here, every long-lived task started here."""

import asyncio
import logging
import ssl
import time
from types import TracebackType

from dynamo.base import clock, errors, process_setup, tasks
from dynamo.disagg import prefill_routes
from dynamo.disagg import settings as prefill_settings
from dynamo.frontend import (
    app,
    cache_clearing,
    config,
    dispatch,
    embeddings,
    metrics,
    migration,
    pipeline,
    request_records,
    responses,
    roads,
)
from dynamo.frontend.admission import controller
from dynamo.frontend.kserve import loading
from dynamo.frontend.model_registry import file_fetcher, registry
from dynamo.frontend.processes import peers, response_store, shared_responses
from dynamo.observability import loop_delay
from dynamo.observability import metrics as observed
from dynamo.router import config as router_config
from dynamo.router import route_factory
from dynamo.runtime import component
from dynamo.runtime.http import limits, server

_logger = logging.getLogger(__name__)


class Frontend:
    """Use as `async with`: enters listening, leaves with everything stopped."""

    def __init__(
        self,
        settings: config.FrontendConfig,
        runtime: component.DistributedRuntime,
        routing: router_config.RoutingConfig | None = None,
        prefill: prefill_settings.PrefillRoutingConfig | None = None,
    ) -> None:
        settings.check()
        metrics_registry = observed.Registry(settings.metrics_prefix)
        now = clock.SystemClock()
        routing = routing or router_config.RoutingConfig()
        self._routes = route_factory.RouteFactory(routing, runtime, now, metrics_registry)
        prefill = prefill or prefill_settings.PrefillRoutingConfig()
        prefill.check(routing.router_mode, routing.router_queue_threshold)
        self._prefill: prefill_routes.PrefillRoutes | None = None
        if routing.router_mode == "kv":
            self._prefill = prefill_routes.PrefillRoutes(
                self._routes,
                prefill,
                runtime.discovery,
                metrics_registry,
                now,
                routing.router_queue_threshold,
            )
        self._records = request_records.RequestRecords(settings, metrics_registry, now)
        rules = _migration_rules(settings)
        counted = metrics.FrontendMetrics(
            metrics_registry, time.monotonic, self._records.observers, rules
        )
        self.models = registry.ModelRegistry(
            runtime.discovery,
            runtime.client,
            self._routes.make if self._prefill is None else self._prefill.make,
            counted,
            now,
            file_fetcher.FileFetcher(
                runtime.requests,
                runtime.services,
                file_fetcher.cache_directory(settings.model_cache),
            ),
            namespace=settings.namespace,
            tokenizer_cache_bytes=settings.tokenizer_cache_mb * 2**20,
        )
        if self._prefill is not None:
            self.models.prefill_by(self._prefill.make_prefill)
        timeout_s = settings.request_timeout_secs or None
        self._dispatcher = dispatch.Dispatcher(self.models.find, rules, now, timeout_s)
        answers = roads.Roads(
            pipeline.Pipeline(
                self.models,
                counted,
                now,
                self._dispatcher,
                self._records.enter_trace,
                self._records.watch,
            ),
            embeddings.Embeddings(self.models, counted, timeout_s, self._records.enter_trace),
        )
        store = response_store.ResponseStore(
            max_items=settings.response_store_items,
            max_bytes=settings.response_store_mb * 2**20,
        )
        caches = cache_clearing.CacheClearer(self.models, runtime.requests, runtime.client)
        remembered = responses.Responses(store)
        self._admission = controller.Control(
            settings, self.models, runtime.events, metrics_registry, now, answers.admit_by
        )
        self._siblings = peers.Peers(settings.http_worker_socket)
        self._app = app.App(
            answers,
            self.models,
            remembered,
            caches,
            metrics_registry,
            self._admission.desk,
            self._siblings,
            shared_responses.SharedResponses(store, self._siblings),
        )
        self._loop_delay = loop_delay.LoopDelay(metrics_registry, now)
        self._settings = settings
        handler = self._admission.around(self._app.routes, app.dialect_of)
        self._server = server.HttpServer(
            handler,
            limits=limits.Limits(
                body_bytes=settings.http_body_limit_mb * 2**20,
                request_s=settings.http_read_timeout_secs,
                num_connections=process_setup.reserve_open_files(limits.NUM_CONNECTIONS),
            ),
            tls=_tls(settings),
            error_body=app.error_body,
        )
        self._grpc = loading.build(settings, handler)
        self._tasks = tasks.Tasks()
        self.port = 0
        self.grpc_port = 0

    async def __aenter__(self) -> "Frontend":
        self._admission.load()
        host, port = self._settings.http_host, self._settings.http_port
        self.port = await self._server.start(
            host, port, shares_port=self._siblings.name is not None
        )
        try:
            self.grpc_port = await self._grpc.start(host, self._settings.kserve_grpc_port)
        except errors.ConfigError:
            await self._server.close()
            raise
        await self._siblings.start(self._app.sibling_routes)
        self._admission.start(self._tasks)
        self._tasks.start("watch models", self.models.watch())
        self._tasks.start("watch the event loop", self._loop_delay.watch())
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
        await self._dispatcher.close()
        await self._siblings.close()
        await self._tasks.close()
        if self._prefill is not None:
            await self._prefill.close()
        await self._routes.close()
        await self._records.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        scheme = "https" if self._settings.tls_cert_path else "http"
        host = self._settings.http_host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def reload_keys(self) -> None:
        """Look at the file of API keys now."""
        self._admission.reload_keys()

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


def _migration_rules(settings: config.FrontendConfig) -> migration.MigrationPolicy:
    return migration.MigrationPolicy(
        limit=settings.migration_limit,
        max_seq_len=settings.migration_max_seq_len,
        wait_s=settings.migration_wait_secs,
    )


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
    if settings.tls_client_ca_cert_path is not None:
        _ask_for_certificates(context, settings.tls_client_ca_cert_path)
    return context


def _ask_for_certificates(context: ssl.SSLContext, authority: str) -> None:
    """Nobody comes in who cannot show one of this authority."""
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise errors.ConfigError(
            f"--tls-client-ca-cert-path: expected PEM certificates in {authority}: {error}"
        ) from error
    context.verify_mode = ssl.CERT_REQUIRED
