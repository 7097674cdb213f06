"""The times of the stages of requests, with the original's names and buckets: prompt, route, request plane."""

from dynamo.observability import metrics
from dynamo.runtime import requests

STAGE_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5)
_TEMPLATE = (1e-05, 5e-05, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05)
_TOKENIZE = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1)
_TOKENIZE_MS = (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_PLANE_TTFT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class StageMetrics:
    """The times of the stages of requests, of all models together."""

    def __init__(self, registry: metrics.Registry) -> None:
        stages = registry.fast_histogram(
            "stage_duration_seconds", "Of the stages of a request", ("stage",), buckets=STAGE_S
        )
        self.preprocess = stages.labels("preprocess")
        self.route = stages.labels("route")
        self.roundtrip = stages.labels("transport_roundtrip")
        self.template = registry.fast_histogram(
            "template_seconds", "From a conversation to its text", (), buckets=_TEMPLATE
        ).labels()
        self.tokenize = registry.fast_histogram(
            "tokenize_seconds", "From the text of a prompt to its tokens", (), buckets=_TOKENIZE
        ).labels()
        self.tokenizer_ms = registry.fast_histogram(
            "tokenizer_latency_ms",
            "Milliseconds of the tokenizer for a prompt",
            ("operation",),
            buckets=_TOKENIZE_MS,
        ).labels("tokenize")
        transport = registry.with_prefix("dynamo_transport_tcp")
        self._sent = transport.fast_counter("bytes_sent_total", "Bytes sent to workers", ())
        self._received = transport.fast_counter(
            "bytes_received_total", "Bytes received from workers", ()
        )
        plane = registry.with_prefix("dynamo_request_plane")
        self.plane_inflight = plane.fast_gauge(
            "inflight_requests", "Requests that workers have", ()
        ).labels()
        self.plane_queue = plane.fast_histogram(
            "queue_seconds",
            "From a prepared request until a worker has it",
            (),
            buckets=_TOKENIZE,
        ).labels()
        self.plane_ttft = plane.fast_histogram(
            "roundtrip_ttft_seconds",
            "From a prepared request to its first token",
            (),
            buckets=_PLANE_TTFT,
        ).labels()

    def follow(self, plane: requests.RequestPlane) -> None:
        """Show the bytes of the request plane, if it is TCP."""
        if plane.name == "tcp":
            self._sent.adopt(plane.traffic.sent)
            self._received.adopt(plane.traffic.received)
