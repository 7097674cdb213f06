"""`python -m dynamo.semantic_router`: Envoy's external processing, the classification API and the metrics."""

import asyncio
import contextlib
import functools
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import config, distribution, errors, process_setup, tasks
from dynamo.observability import logs, metrics
from dynamo.runtime import component
from dynamo.runtime.http import exchange, parser
from dynamo.runtime.http import server as http

_logger = logging.getLogger(__name__)
_PROG = "python -m dynamo.semantic_router"
_GRACE_S = 30.0  # for running requests, after a signal: workers finish their answers for as long


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(component.RuntimeConfig):
    """The semantic router of its own process, for Envoy and for programs that classify."""

    router_config: str | None = config.option(
        None,
        env="DYN_SEMANTIC_ROUTER",
        help="configuration (YAML) of the semantic router; --config is the same",
    )
    host: str = config.option("127.0.0.1", env="DYN_SEMANTIC_HOST", help="address to listen on")
    port: int = config.option(
        50051, help="port of Envoy's external processing (gRPC); 0: any", least=0, most=65535
    )
    api_port: int = config.option(
        8080, help="port of the classification API; 0: any", least=0, most=65535
    )
    metrics_port: int = config.option(9190, help="port of the metrics; 0: any", least=0, most=65535)
    enable_api: bool = config.option(True, help="serve the classification API")
    enable_system_prompt_api: bool = config.option(
        False, help="let administrators see and change system prompts over the classification API"
    )
    admin_key_file: str | None = config.option(
        None,
        env="DYN_SEMANTIC_ADMIN_KEY_FILE",
        help="file of the key with which administrators change the configuration over the classification API and "
        "empty the cache; without it only requests from this host may",
    )
    secure: bool = config.option(False, help="serve gRPC with TLS")
    cert_path: str | None = config.option(
        None, help="directory of tls.crt and tls.key, for --secure"
    )
    body_limit_mb: int = config.option(64, help="largest body of a request, in MiB", least=1)


def main() -> int:
    """Run the process and return its exit status."""
    return process_setup.run_command(_PROG, _run)


def _run() -> None:
    logs.configure()
    settings = config.load(GatewayConfig, prog=_PROG, argv=translate_flags(sys.argv[1:]))
    asyncio.run(serve(settings))


def translate_flags(argv: Sequence[str]) -> list[str]:
    """Return the original's flags in our words: `--config FILE` is its YAML file, and flags may be `=true`.

    As every program in Go, it takes them with one hyphen as well: its own makefile starts it with `-config=FILE`.
    """
    words = []
    for word in argv:
        word = re.sub(r"^-(?=[a-z][a-z-]+(?:=|$))", "--", word)
        word = re.sub(r"^--config(?==|$)", "--router-config", word)
        if word.startswith("--") and word.endswith("=true"):
            word = word.removesuffix("=true")
        elif word.startswith("--") and word.endswith("=false"):
            word = "--no-" + word.removesuffix("=false").removeprefix("--")
        words.append(word)
    return words


async def serve(settings: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError."""
    if settings.router_config is None:
        raise errors.ConfigError("--config: expected the configuration of the router, got none")
    api = distribution.load_extra("dynamo.gateway.api", feature=_PROG, extra="gateway")
    grpc_server = distribution.load_extra("dynamo.gateway.server", feature=_PROG, extra="gateway")
    clock = clocks.SystemClock()
    registry = metrics.Registry("llm")
    routing = api.service.RoutingService(Path(settings.router_config), registry, clock)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(routing.close)
        if routing.router.loaded.uses_process:
            runtime = await component.DistributedRuntime.open(settings)
            await stack.enter_async_context(runtime)
            routing.connect_encoders(api.service.encoder_client.make_client(runtime))
        await _serve_routing(settings, routing, registry, clock, api, grpc_server)


async def _serve_routing(
    settings: GatewayConfig,
    routing: Any,
    registry: metrics.Registry,
    clock: clocks.Clock,
    api: Any,
    grpc_server: Any,
) -> None:
    """Serve until SIGTERM or SIGINT; `api` and `grpc_server` are modules that need an extra."""
    read_certificates = functools.partial(
        grpc_server.read_certificates, is_secure=settings.secure, directory=settings.cert_path
    )
    process_setup.collect_garbage_rarely()
    stop = process_setup.stop_on_signals()
    limits = parser.HttpLimits(body_bytes=settings.body_limit_mb * 2**20)
    max_bytes = settings.body_limit_mb * 2**20
    ext_proc = grpc_server.ExtProcServer(
        lambda: grpc_server.processor.StreamProcessor(routing, max_bytes), max_bytes
    )
    admin_key = None
    if settings.admin_key_file is not None:
        admin_key = api.administration.read_key(Path(settings.admin_key_file))
    routes = api.make_routes(
        routing, clock, admin_key, has_system_prompts=settings.enable_system_prompt_api
    )
    classification = http.HttpServer(routes, limits=limits)
    exposition = http.HttpServer(_metrics_routes(registry))
    running = tasks.Tasks()
    try:
        ports = [await ext_proc.start(settings.host, settings.port, read_certificates)]
        if settings.enable_api:
            ports.append(
                await classification.start(settings.host, settings.api_port, port_flag="--api-port")
            )
        ports.append(
            await exposition.start(settings.host, settings.metrics_port, port_flag="--metrics-port")
        )
        _logger.info("ready on ports %s", ", ".join(map(str, ports)))
        running.start("watch the configuration", routing.loader.watch())
        await running.run_until(stop)
    finally:
        await ext_proc.stop(_GRACE_S)
        await classification.close()
        await exposition.close()
        await running.close()


def _metrics_routes(registry: metrics.Registry) -> exchange.HttpRouter:
    def respond(client: exchange.Exchange) -> None:
        client.respond(200, registry.render(), content_type=metrics.CONTENT_TYPE)

    return exchange.HttpRouter({("GET", "/metrics"): respond}, error_body=http.plain_error)
