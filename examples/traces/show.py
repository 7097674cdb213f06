"""Receive traces by OTLP over HTTP and print each as a tree. Needs the extra `otel`.

    python examples/traces/show.py                 # then start a frontend and workers as README.md says

A trace is printed when none of its spans has come for a while, because each process sends its own.
"""

import argparse
import contextlib
import gzip
import threading
import time
from collections.abc import Iterator
from http import server

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

MOST_BYTES = 2**24  # of one request
MOST_SPANS = 10_000  # that wait to be printed; further ones are dropped


class Spans:
    """The spans that have come and are not printed, by trace."""

    def __init__(self) -> None:
        self._by_trace: dict[bytes, list[trace_pb2.Span]] = {}
        self._came_at: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def add(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        with self._lock:
            num_free = MOST_SPANS - sum(map(len, self._by_trace.values()))
            sent = [
                span
                for process in request.resource_spans
                for scope in process.scope_spans
                for span in scope.spans
            ]
            for span in sent[:num_free]:
                self._by_trace.setdefault(span.trace_id, []).append(span)
                self._came_at[span.trace_id] = time.monotonic()

    def take(self, quiet_s: float) -> list[list[trace_pb2.Span]]:
        """Return the traces without a new span for so many seconds, and forget them."""
        until = time.monotonic() - quiet_s
        with self._lock:
            ended = [trace_id for trace_id, at in self._came_at.items() if at <= until]
            for trace_id in ended:
                del self._came_at[trace_id]
            return [self._by_trace.pop(trace_id) for trace_id in ended]


def render(trace: list[trace_pb2.Span]) -> Iterator[str]:
    """Yield the lines of a tree: when a span began, and how long it took."""
    trace = sorted(trace, key=lambda span: span.start_time_unix_nano)
    ids = {span.span_id for span in trace}
    began_at = trace[0].start_time_unix_nano

    def below(parent: bytes | None, depth: int) -> Iterator[str]:
        for span in trace:
            if span.parent_span_id == parent or (parent is None and span.parent_span_id not in ids):
                start_ms = (span.start_time_unix_nano - began_at) / 1e6
                length_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
                yield f"{start_ms:9.1f} ms {length_ms:9.1f} ms  {'  ' * depth}{span.name}"
                yield from below(span.span_id, depth + 1)

    yield f"trace {trace[0].trace_id.hex()}"
    yield from below(None, 0)


class Handler(server.BaseHTTPRequestHandler):
    """Takes what an exporter posts to /v1/traces."""

    spans: Spans

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        if self.path != "/v1/traces" or length > MOST_BYTES:
            self.send_error(404 if length <= MOST_BYTES else 413)
            return
        body = self.rfile.read(length)
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.spans.add(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing about each request."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=4318)
    parser.add_argument("--quiet", type=float, default=2.0, help="seconds without a new span")
    options = parser.parse_args()
    Handler.spans = spans = Spans()
    try:
        listening = server.ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    except OSError as error:
        parser.error(f"--port {options.port}: {error.strerror}")
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    print(f"listening on http://127.0.0.1:{options.port}/v1/traces", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        show(spans, options.quiet)


def show(spans: Spans, quiet_s: float) -> None:
    """Print each trace when it has ended, until Ctrl-C."""
    while True:
        time.sleep(quiet_s / 4)
        for trace in spans.take(quiet_s):
            print("\n".join(render(trace)), flush=True)


if __name__ == "__main__":
    main()
