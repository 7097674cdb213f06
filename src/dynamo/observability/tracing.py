"""What an operator decides of traces: whether they are told, to whom, and how many of them.

The variables are OpenTelemetry's own, and the original's switch before them. OpenTelemetry's packages are an extra,
and are not even imported unless it is on.
"""

from dataclasses import dataclass

from dynamo.base import config, distribution, errors
from dynamo.observability import spans


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Traces."""

    otel_export_enabled: bool = config.option(
        False, env="OTEL_EXPORT_ENABLED", help="tell a collector of the stages of requests"
    )
    otel_exporter_otlp_traces_endpoint: str = config.option(
        "http://localhost:4318/v1/traces",
        env="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        help="the collector (OTLP over HTTP)",
    )
    otel_service_name: str = config.option(
        "dynamo", env="OTEL_SERVICE_NAME", help="our name in traces"
    )
    otel_traces_sampler_arg: float = config.option(
        1.0,
        env="OTEL_TRACES_SAMPLER_ARG",
        help="the share of traces that begin here to be told; those that come from elsewhere keep their mark",
        least=0,
        most=1,
    )


def exporter(settings: TracingConfig) -> spans.Exporter | None:
    """None if traces are not told. Raises ConfigError."""
    if not settings.otel_export_enabled:
        return None
    endpoint = settings.otel_exporter_otlp_traces_endpoint
    if not endpoint.startswith(("http://", "https://")):
        raise errors.ConfigError(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: expected the URL of a collector that takes OTLP over HTTP, "
            f"like http://localhost:4318/v1/traces, got {endpoint!r}"
        )
    otlp = distribution.load_extra(
        "dynamo.observability.otlp", feature="OTEL_EXPORT_ENABLED", extra="otel"
    )
    span_exporter: spans.Exporter = otlp.OtlpExporter(endpoint, settings.otel_service_name)
    return span_exporter
