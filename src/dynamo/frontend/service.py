"""A running frontend: every part of it is made here, and every long-lived task is started here."""

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Collection, Sequence
from types import TracebackType

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import distribution, errors, process_setup, tasks
from dynamo.disagg import config as prefill_config
from dynamo.disagg import prefill_route
from dynamo.frontend import (
    config,
    dispatch,
    http_certificate,
    metrics,
    migration,
    pipeline,
    request_records,
    waiting,
)
from dynamo.frontend.admission import authentication, busy_workers, controller, load_thresholds
from dynamo.frontend.admission import metrics as admission_metrics
from dynamo.frontend.apis import (
    chat,
    completions,
    description,
    embeddings,
    files,
    invocations,
    models,
    operation,
    scores,
    status,
)
from dynamo.frontend.apis import tokenize as token_counts
from dynamo.frontend.apis.kserve import api as kserve
from dynamo.frontend.apis.kserve import grpc_loading
from dynamo.frontend.apis.messages import api as messages
from dynamo.frontend.apis.ollama import api as ollama
from dynamo.frontend.apis.responses import api as responses
from dynamo.frontend.batches import journal, runner, upload
from dynamo.frontend.console import api as console
from dynamo.frontend.console import feed, recorder, views
from dynamo.frontend.delivery import delivery
from dynamo.frontend.model_registry import file_fetcher, registry
from dynamo.frontend.processes import peers, response_store
from dynamo.observability import metrics as observed
from dynamo.preprocess import tokenize, tokenizer_library
from dynamo.protocols import instances
from dynamo.router import config as router_config
from dynamo.router import retry_rules, route_factory
from dynamo.runtime import component
from dynamo.runtime.http import browsers, encodings, exchange, parser, server

_logger = logging.getLogger(__name__)
_THRESHOLDS = "/busy_threshold"


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
        routing = routing or router_config.RoutingConfig()
        self._settings = settings
        self._clock = clocks.SystemClock()
        self._tasks = tasks.Tasks()
        metrics_registry = observed.Registry(settings.metrics_prefix)
        self._loop_delay = observed.LoopDelay(metrics_registry, self._clock)
        self._records = request_records.RequestRecords(settings, metrics_registry, self._clock)
        self._recorder = recorder.ConsoleRecorder(self._clock, settings.usage_file)
        migration_policy = migration.MigrationPolicy(
            limit=settings.migration_limit,
            max_seq_len=settings.migration_max_seq_len,
        )
        self._metrics = metrics.FrontendMetrics(
            metrics_registry,
            self._clock.now,
            (*self._records.observers, self._recorder),
            migration_policy,
        )
        self._metrics.follow(runtime)

        for note in routing.find_mode_notes():
            _logger.warning("%s", note)
        self._routes = route_factory.RouteFactory(routing, runtime, self._clock, metrics_registry)
        self._prefill_route = self._make_prefill_route(
            routing, prefill or prefill_config.PrefillRoutingConfig(), runtime, metrics_registry
        )
        self.models = self._make_model_registry(runtime)

        self._admission = self._make_admission(runtime, metrics_registry)
        waiting_metrics = waiting.WaitingMetrics(metrics_registry)
        self._expected_workers = waiting.ExpectedWorkers(
            runtime.discovery,
            namespace=settings.namespace,
            wakeable=waiting_metrics.wakeable,
        )
        worker_wait = waiting.WorkerWait(
            retry_rules.WaitPolicy(
                wait_s=settings.worker_wait_secs,
                max_waiting=settings.worker_wait_limit,
                outage_s=settings.request_plane_outage_secs,
            ),
            self._clock,
            self._expected_workers,
            waiting_metrics.waiting,
            lambda: runtime.requests.is_away,
        )
        timeout_s = settings.request_timeout_secs or None
        self._dispatcher = dispatch.Dispatcher(
            self.models.find,
            migration_policy,
            self._clock,
            timeout_s,
            self._admission.busy_workers.of_model,
            worker_wait,
        )
        self._semantic = None
        if settings.semantic_router is not None:
            self._semantic = distribution.load_extra(
                "dynamo.frontend.semantic_routing", feature="--semantic-router", extra="semantic"
            ).SemanticRouting(
                settings.semantic_router,
                self.models,
                metrics_registry,
                self._clock,
                self._admission.rights,
                self._expected_workers.find_wakeable,
                worker_wait,
                runtime,
            )
        request_pipeline = pipeline.Pipeline(
            self.models,
            self._metrics,
            self._clock,
            self._dispatcher,
            worker_wait,
            self._admission,
            pipeline.UnknownParameters(
                metrics_registry, refuses=settings.unknown_parameters == "refuse"
            ),
            self._records.enter_trace,
            self._records.make_watch(self._admission.rights.key_name_of),
            self._semantic,
            self._recorder.wants_explanation,
        )

        self._peers = peers.Peers(settings.http_worker_socket)
        self._usage_of_keys = peers.SharedUsage(
            lambda: self._admission.rights.accounts, self._peers, self._clock
        )
        self._batches = runner.BatchRunner(
            journal.BatchJournal(
                settings.files_folder,
                self._clock,
                max_bytes=int(settings.files_limit_gb * 10**9),
            ),
            self._clock,
            concurrency=settings.batch_concurrency,
            max_body_bytes=settings.http_body_limit_mb * 2**20,
        )
        self._runtime, self._router_mode = runtime, routing.router_mode
        self._console = self._make_console(runtime, routing.router_mode)
        self._handlers = operation.RequestHandlers(request_pipeline)
        shared_responses = peers.SharedResponses(
            response_store.ResponseStore(
                max_items=settings.response_store_items,
                max_bytes=settings.response_store_mb * 2**20,
            ),
            self._peers,
            self._admission.rights.tenant_of,
        )
        self._sibling_routes: peers.PeerRoutes = {
            ("GET", "/metrics"): status.metrics_handler(metrics_registry),
            ("GET", _THRESHOLDS): self._admission.busy_workers.show_changed,
            ("POST", _THRESHOLDS): self._handlers.compute(
                load_thresholds.decode_change, self._admission.busy_workers.change_thresholds
            ),
            ("GET", console.USAGE): functools.partial(console.answer_usage, self._console),
            **shared_responses.routes,
            **self._usage_of_keys.routes,
        }
        vectors = embeddings.EmbeddingPipeline(request_pipeline, self._dispatcher)
        cache_clearer = status.CacheClearer(self.models, runtime.client)
        self._app = operation.App(
            self._declare_operations(
                runtime, vectors, shared_responses, cache_clearer, metrics_registry
            )
        )

        self._certificate = http_certificate.HttpCertificate(settings, self._metrics.certificates)
        self._server, self._grpc = self._make_servers()

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

    def _make_model_registry(self, runtime: component.DistributedRuntime) -> registry.ModelRegistry:
        settings = self._settings
        if self._prefill_route is None:
            factories = registry.RouteFactories(self._routes.make_route)
        else:
            factories = registry.RouteFactories(
                self._prefill_route.make, self._prefill_route.make_prefill_router
            )
        return registry.ModelRegistry(
            runtime.discovery,
            runtime.client,
            factories,
            self._metrics,
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
                tokenizer_library.FindingsDirectory.of_user(),
            ),
        )

    def _make_admission(
        self, runtime: component.DistributedRuntime, metrics_registry: observed.Registry
    ) -> controller.AdmissionController:
        settings, own_metrics = self._settings, admission_metrics.AdmissionMetrics(metrics_registry)
        return controller.AdmissionController(
            settings,
            authentication.ClientRights(settings, own_metrics, self._clock, runtime.credentials),
            load_thresholds.BusyWorkers(
                self.models,
                busy_workers.BusyThresholds(
                    active_decode_blocks_threshold=settings.active_decode_blocks_threshold,
                    active_prefill_tokens_threshold=settings.active_prefill_tokens_threshold,
                    active_prefill_tokens_threshold_frac=settings.active_prefill_tokens_threshold_frac,
                ),
                runtime.events,
                self._clock,
                self._tasks,
            ),
            own_metrics,
            self._clock,
        )

    def _make_console(self, runtime: component.DistributedRuntime, mode: str) -> feed.Console:
        processes = feed.OtherProcesses(runtime, self.models, lambda: self._record)
        console_views = views.Views(
            self.models,
            self._metrics,
            self._recorder,
            router_mode=mode,
            sources=views.ViewSources(
                find_matches=self._routes.find_matches,
                list_tiers=self._routes.tiers_by_worker,
                list_starting=lambda: self._expected_workers.starts,
                list_sleeping=lambda: self._expected_workers.sleeping,
                list_on_demand=lambda: self._expected_workers.on_demand,
                list_processes=processes.list_all,
            ),
        )
        return feed.Console(
            recorder=self._recorder,
            views=console_views,
            feed=feed.Feed(console_views, self.models, runtime.events, processes),
            planners=feed.Planners(runtime, self.models, self._settings.namespace),
            processes=processes,
        )

    def _declare_operations(
        self,
        runtime: component.DistributedRuntime,
        vectors: embeddings.EmbeddingPipeline,
        shared_responses: peers.SharedResponses,
        cache_clearer: status.CacheClearer,
        metrics_registry: observed.Registry,
    ) -> Sequence[operation.Operation]:
        """Return the operations of all APIs in the order in which they are described; a new API is a line here."""
        handlers = self._handlers

        def list_on_demand() -> Collection[instances.WorkerStart]:
            return self._expected_workers.on_demand

        apis = (
            *chat.operations(handlers, self._settings.reasoning_field_name),
            *completions.operations(handlers),
            *responses.operations(handlers, shared_responses),
            *models.operations(handlers, list_on_demand, runtime.client),
            *messages.operations(handlers),
            *embeddings.operations(handlers, vectors),
            *scores.operations(handlers, vectors),
            *files.operations(handlers, self._batches),
            *kserve.operations(handlers, self._expected_workers.can_wake),
            *ollama.operations(handlers, vectors, list_on_demand),
            *token_counts.operations(handlers),
            *status.state_operations(
                handlers, self._peers, metrics_registry, self._expected_workers.can_wake
            ),
            *status.administration_operations(
                handlers, cache_clearer, self._admission.busy_workers, self._peers
            ),
            *console.operations(self._console, handlers.rights, self._peers),
        )
        apis = (*apis, *invocations.operations(apis))
        return (*apis, *description.operations(handlers, apis))

    def _make_servers(self) -> tuple[server.HttpServer, grpc_loading.KserveServer]:
        """Return the servers of HTTP and gRPC, which check browsers and keys before the application gets a request."""
        settings = self._settings
        routes = encodings.BodyInflater(
            self._app.routes, self._max_body_bytes, self._app.error_body
        )
        authenticator = self._admission.rights.make_authenticator(routes, self._app.dialect_of)
        handler = authenticator or authentication.LocalAdministration(routes, self._app.dialect_of)
        policy = browsers.BrowserPolicy(
            frozenset(settings.cors_allow_origin),
            None
            if settings.api_keys_file
            else frozenset(settings.allowed_hosts) | browsers.own_names(),
        )

        def refuse(client: exchange.Exchange, error: errors.Forbidden) -> None:
            delivery.respond_error(client, error, self._app.dialect_of(client.request.path))

        def check_head(request: exchange.Request) -> int:
            """Return how many bytes a request's body may have. Raises RequestRefused without a valid key."""
            if browsers.is_preflight(request):
                return 0  # it has no key, and needs no body
            if authenticator is not None:
                authenticator.check_head(request)
            return self._max_body_bytes(request)

        http_server = server.HttpServer(
            browsers.BrowserGuard(handler, policy, refuse),
            limits=parser.HttpLimits(
                kept_body_bytes=settings.http_body_memory_mb * 2**20,
                request_s=settings.http_read_timeout_secs,
                num_connections=process_setup.reserve_open_files(parser.NUM_CONNECTIONS),
            ),
            tls=self._certificate.tls,
            error_body=self._app.error_body,
            check_head=check_head,
            open_sink=self._open_sink,
            cors_headers=policy.cors_headers,
        )
        return http_server, grpc_loading.make_server(settings, handler, check_head)

    def _max_body_bytes(self, request: exchange.Request) -> int:
        """Return how many bytes the body of a request may have, compressed or inflated."""
        return self._app.body_factor_of(request.path) * self._settings.http_body_limit_mb * 2**20

    def _open_sink(self, request: exchange.Request) -> exchange.BodySink | None:
        """Return what writes an uploaded file to disk while it arrives. Raises RequestRefused."""
        if (request.method, request.path) != ("POST", files.PATH):
            return None
        return upload.FileUpload(request, self._batches.journal)

    async def __aenter__(self) -> "Frontend":
        await self._routes.start()
        self._admission.rights.load_keys()
        host, port = self._settings.http_host, self._settings.http_port
        self.port = await self._server.start(host, port, shares_port=self._peers.name is not None)
        try:
            self.grpc_port = await self._grpc.start(host, self._settings.kserve_grpc_port)
        except errors.ConfigError:
            await self._server.close()
            raise
        await self._peers.start(self._sibling_routes)
        self._admission.rights.start(self._tasks)
        self._admission.busy_workers.start()
        self._tasks.start("take over thresholds", self._take_over_thresholds())
        self._tasks.start("share the usage of API keys", self._usage_of_keys.run())
        self._tasks.start("watch the certificate", self._certificate.follow(self._clock))
        self._tasks.start("watch models", self.models.watch())
        self._tasks.start("watch starting workers", self._expected_workers.watch())
        batches = self._batches.run(self._app.routes, self._admission.rights.headers_of)
        self._tasks.start("run the batches", batches)
        if self._semantic is not None:
            self._tasks.start("watch the semantic router's file", self._semantic.watch())
        self._tasks.start("watch the event loop", self._loop_delay.watch())
        self._tasks.start("keep the console's history", self._recorder.watch(self._metrics))
        self._recorder.start_log()
        self._tasks.start("publish the record", self._publish_record())
        _logger.info("listening on %s", self.url)
        return self

    async def _take_over_thresholds(self) -> None:
        """After a restart of this process alone, its siblings know what was changed before."""
        self._admission.busy_workers.take_over(
            (await self._peers.ask_all("GET", _THRESHOLDS)).values()
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._console.feed.close()
        await self._grpc.stop(0)
        await self._server.close()
        await self._dispatcher.close()
        await self._peers.close()
        await self._tasks.close()
        with contextlib.suppress(errors.Unavailable):  # the record ends with the lease
            await self._runtime.discovery.delete(self._record.key)
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

    @property
    def _record(self) -> instances.FrontendRecord:
        return instances.FrontendRecord(
            instance_id=self._runtime.instance_id,
            namespace=self._settings.namespace,
            host=socket.gethostname(),
            url=self.url,
            router_mode=self._router_mode,
            is_draining=self._handlers.is_leaving,
        )

    async def _publish_record(self) -> None:
        """Have other frontends' consoles show this one, once discovery is there: requests do not wait for that."""
        with contextlib.suppress(errors.DynamoError):
            await self._runtime.discovery.put(self._record.key, msgspec.json.encode(self._record))

    def reload_keys(self) -> None:
        """Have the file of API keys read again at once."""
        self._admission.rights.reload_keys()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain. Raises the error of a long-lived task that failed."""
        await self._tasks.run_until(stop)
        await self.drain()

    async def drain(self) -> None:
        """Refuse new requests and let running responses finish, within the times that the settings allow."""
        self._handlers.is_leaving = True
        self._tasks.start("publish that it drains", self._publish_record())
        if grace_s := self._settings.grace_period_s:
            _logger.info("stopping: new requests are taken for another %g s", grace_s)
            await self._runtime.clock.sleep(grace_s)
        self._handlers.is_draining = True
        self._console.feed.end_all()
        limit_s = self._settings.http_graceful_shutdown_timeout_secs
        has_finished, _ = await asyncio.gather(
            self._server.drain(limit_s), self._grpc.stop(limit_s)
        )
        if not has_finished:
            _logger.warning("answers still running after %g s are cut off", limit_s)
