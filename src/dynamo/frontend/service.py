"""A running frontend: every part of it is made here, and every long-lived task is started here."""

import asyncio
import logging
from types import TracebackType

from dynamo.base import clock as clocks
from dynamo.base import distribution, errors, process_setup, tasks
from dynamo.disagg import config as prefill_config
from dynamo.disagg import prefill_route
from dynamo.frontend import (
    app,
    browsers,
    config,
    dispatch,
    http_certificate,
    metrics,
    migration,
    pipeline,
    request_records,
    waiting,
)
from dynamo.frontend.admission import authentication, controller
from dynamo.frontend.apis import files, operation
from dynamo.frontend.apis.kserve import grpc_loading
from dynamo.frontend.batches import journal, runner, upload
from dynamo.frontend.console import feed, recorder, views
from dynamo.frontend.model_registry import file_fetcher, registry
from dynamo.frontend.processes import peers, response_store
from dynamo.observability import metrics as observed
from dynamo.preprocess import tokenize, tokenizer_findings
from dynamo.router import config as router_config
from dynamo.router import retry_rules, route_factory
from dynamo.runtime import component
from dynamo.runtime.http import encodings, exchange, parser, server

_logger = logging.getLogger(__name__)


class Frontend:
    """A frontend of one process, for `async with`: it listens inside, and everything is stopped after it.

    Reads as the story of the frontend: records and metrics of requests, the models and the routes to their workers,
    admission, dispatch and the APIs in front of it, and the servers in front of these. Raises ConfigError.
    """

    port = grpc_port = 0  # the real ones once it listens

    def __init__(
        self,
        settings: config.FrontendConfig,
        runtime: component.DistributedRuntime,
        routing: router_config.RoutingConfig | None = None,
        prefill: prefill_config.PrefillRoutingConfig | None = None,
    ) -> None:
        settings.check()
        self._settings = settings
        self._clock = clocks.SystemClock()
        self._tasks = tasks.Tasks()
        metrics_registry = observed.Registry(settings.metrics_prefix)
        self._loop_delay = observed.LoopDelay(metrics_registry, self._clock)
        self._records = request_records.RequestRecords(settings, metrics_registry, self._clock)
        migration_policy = migration.MigrationPolicy(
            limit=settings.migration_limit,
            max_seq_len=settings.migration_max_seq_len,
        )
        self._recorder = recorder.ConsoleRecorder(self._clock, settings.usage_file)
        self._metrics = frontend_metrics = metrics.FrontendMetrics(
            metrics_registry,
            self._clock.now,
            (*self._records.observers, self._recorder),
            migration_policy,
        )

        self._routes = route_factory.RouteFactory(
            routing or router_config.RoutingConfig(), runtime, self._clock, metrics_registry
        )
        self._prefill_route = self._make_prefill_route(
            routing or router_config.RoutingConfig(),
            prefill or prefill_config.PrefillRoutingConfig(),
            runtime,
            metrics_registry,
        )
        self.models = registry.ModelRegistry(
            runtime.discovery,
            runtime.client,
            registry.RouteFactories(self._routes.make_route)
            if self._prefill_route is None
            else registry.RouteFactories(
                self._prefill_route.make, self._prefill_route.make_prefill_router
            ),
            frontend_metrics,
            self._clock,
            file_fetcher.FileFetcher(
                runtime.requests,
                runtime.services,
                file_fetcher.cache_directory(settings.model_cache),
                self._clock,
            ),
            namespace=settings.namespace,
            tokenizer_options=tokenize.TokenizerOptions(
                settings.tokenizer,
                settings.tokenizer_cache_mb * 2**20,
                tokenizer_findings.FindingsDirectory.of_user(),
            ),
        )

        self._admission = controller.AdmissionController(
            settings, self.models, runtime.events, metrics_registry, self._clock, self._tasks
        )
        timeout_s = settings.request_timeout_secs or None
        self._expected_workers = waiting.ExpectedWorkers(
            runtime.discovery, namespace=settings.namespace
        )
        worker_wait = waiting.WorkerWait(
            retry_rules.WaitPolicy(
                wait_s=settings.worker_wait_secs,
                max_waiting=settings.worker_wait_limit,
                outage_s=settings.request_plane_outage_secs,
            ),
            self._clock,
            self._expected_workers,
            frontend_metrics.waiting_for_worker,
            lambda: runtime.requests.is_away,
        )
        self._dispatcher = dispatch.Dispatcher(
            self.models.find,
            migration_policy,
            self._clock,
            timeout_s,
            self._admission.busy_workers,
            worker_wait,
        )
        store = response_store.ResponseStore(
            max_items=settings.response_store_items,
            max_bytes=settings.response_store_mb * 2**20,
        )
        self._peers = peers.Peers(settings.http_worker_socket, self._clock)
        self._semantic = None
        if settings.semantic_router is not None:
            self._semantic = distribution.load_extra(
                "dynamo.frontend.semantic_routing", feature="--semantic-router", extra="semantic"
            ).SemanticRouting(
                settings.semantic_router,
                self.models,
                metrics_registry,
                self._clock,
                runtime,
            )
        console_views = views.Views(
            self.models,
            frontend_metrics,
            self._recorder,
            router_mode=(routing or router_config.RoutingConfig()).router_mode,
            find_matches=self._routes.find_matches,
            list_starting=lambda: self._expected_workers.starts,
        )
        self._batches = runner.BatchRunner(
            journal.BatchJournal(
                settings.files_folder, max_bytes=int(settings.files_limit_gb * 10**9)
            ),
            self._clock,
            concurrency=settings.batch_concurrency,
            max_body_bytes=settings.http_body_limit_mb * 2**20,
        )
        self._feed = feed.Feed(console_views, self.models, runtime.events)
        self._app = app.App(
            operation.ApiContext(
                models=self.models,
                pipeline=pipeline.Pipeline(
                    self.models,
                    frontend_metrics,
                    self._clock,
                    self._dispatcher,
                    worker_wait,
                    self._admission,
                    pipeline.UnknownParameters(
                        metrics_registry, refuses=settings.unknown_parameters == "refuse"
                    ),
                    self._records.enter_trace,
                    self._records.watch,
                    self._semantic,
                    self._recorder.wants_explanation,
                ),
                metrics=frontend_metrics,
                admission=self._admission,
                connect=runtime.client,
                response_store=store,
                shared_responses=peers.SharedResponses(
                    store, self._peers, self._admission.tenant_of
                ),
                peers=self._peers,
                batches=self._batches,
                list_on_demand=lambda: self._expected_workers.on_demand,
                metrics_registry=metrics_registry,
                console=feed.Console(
                    recorder=self._recorder,
                    views=console_views,
                    feed=self._feed,
                    planners=feed.Planners(runtime, self.models, settings.namespace),
                ),
                start_trace=self._records.enter_trace,
                request_timeout_s=timeout_s,
            )
        )

        routes = encodings.BodyInflater(
            self._app.routes, self._max_body_bytes, self._app.error_body
        )
        authenticator = self._admission.make_authenticator(routes, self._app.dialect_of)
        handler = authenticator or authentication.LocalAdministration(routes, self._app.dialect_of)
        policy = browsers.BrowserPolicy(
            frozenset(settings.cors_allow_origin),
            None
            if settings.api_keys_file
            else frozenset(settings.allowed_hosts) | browsers.own_names(),
        )

        def check_head(request: exchange.Request) -> int:
            """Return how many bytes a request's body may have. Raises RequestRefused without a valid key."""
            if browsers.is_preflight(request):
                return 0  # it has no key, and needs no body
            if authenticator is not None:
                authenticator.check_head(request)
            return self._max_body_bytes(request)

        self._certificate = http_certificate.HttpCertificate(
            settings, frontend_metrics.certificates
        )
        frontend_metrics.follow(runtime)
        self._server = server.HttpServer(
            browsers.BrowserGuard(handler, policy, self._app.dialect_of),
            limits=parser.HttpLimits(
                kept_body_bytes=settings.http_body_memory_mb * 2**20,
                request_s=settings.http_read_timeout_secs,
                num_connections=process_setup.reserve_open_files(parser.NUM_CONNECTIONS),
            ),
            tls=self._certificate.tls,
            error_body=self._app.error_body,
            check_head=check_head,
            open_sink=self._open_sink,
        )
        self._grpc = grpc_loading.make_server(settings, handler, check_head)

    def _max_body_bytes(self, request: exchange.Request) -> int:
        """Return how many bytes the body of a request may have, compressed or inflated."""
        factor = self._app.body_factor_of(request.path)
        return factor * self._settings.http_body_limit_mb * 2**20

    def _open_sink(self, request: exchange.Request) -> exchange.BodySink | None:
        """Return what writes an uploaded file to disk while it arrives. Raises RequestRefused."""
        if (request.method, request.path) != ("POST", files.PATH):
            return None
        return upload.FileUpload(request, self._batches.journal)

    def _make_prefill_route(
        self,
        routing: router_config.RoutingConfig,
        prefill: prefill_config.PrefillRoutingConfig,
        runtime: component.DistributedRuntime,
        metrics_registry: observed.Registry,
    ) -> prefill_route.PrefillRouteFactory | None:
        """Return the routes by way of prefill workers, which the router mode `kv` alone knows. Raises ConfigError."""
        prefill.check(routing.router_mode, routing.router_queue_threshold)
        if routing.router_mode != "kv":
            return None
        return prefill_route.PrefillRouteFactory(
            self._routes,
            prefill,
            runtime.discovery,
            metrics_registry,
            self._clock,
            routing.router_queue_threshold,
        )

    async def __aenter__(self) -> "Frontend":
        await self._routes.start()
        self._admission.load_keys()
        host, port = self._settings.http_host, self._settings.http_port
        self.port = await self._server.start(host, port, shares_port=self._peers.name is not None)
        try:
            self.grpc_port = await self._grpc.start(host, self._settings.kserve_grpc_port)
        except errors.ConfigError:
            await self._server.close()
            raise
        await self._peers.start(self._app.sibling_routes)
        self._admission.start()
        self._tasks.start("watch the certificate", self._certificate.follow(self._clock))
        self._tasks.start("watch models", self.models.watch())
        self._tasks.start("watch starting workers", self._expected_workers.watch())
        batches = self._batches.run(self._app.routes, self._admission.headers_of)
        self._tasks.start("run the batches", batches)
        if self._semantic is not None:
            self._tasks.start("watch the semantic router's file", self._semantic.watch())
        self._tasks.start("watch the event loop", self._loop_delay.watch())
        self._tasks.start("keep the console's history", self._recorder.watch(self._metrics))
        self._recorder.start_log()
        _logger.info("listening on %s", self.url)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._feed.close()
        await self._grpc.stop(0)
        await self._server.close()
        await self._dispatcher.close()
        await self._peers.close()
        await self._tasks.close()
        if self._prefill_route is not None:
            await self._prefill_route.close()
        await self._routes.close()
        await self._records.close()
        await self._recorder.close()

    @property
    def url(self) -> str:
        """Return the address at which the frontend listens."""
        scheme = "https" if self._settings.tls_cert_path else "http"
        host = self._settings.http_host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def reload_keys(self) -> None:
        """Have the file of API keys read again at once."""
        self._admission.reload_keys()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain. Raises the error of a long-lived task that failed."""
        await self._tasks.run_until(stop)
        await self.drain()

    async def drain(self) -> None:
        """Refuse new requests and let running responses finish, within the time that the settings allow."""
        self._app.start_draining()
        limit_s = self._settings.http_graceful_shutdown_timeout_secs
        _logger.info("stopping: running answers may take %g s to finish", limit_s)
        has_finished, _ = await asyncio.gather(
            self._server.drain(limit_s), self._grpc.stop(limit_s)
        )
        if not has_finished:
            _logger.warning("answers still running after %g s are cut off", limit_s)
